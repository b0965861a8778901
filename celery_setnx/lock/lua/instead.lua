-- Say which task runs in the stead of one that has died, for all who wait for its result: the first who asks.
--
-- KEYS  1 instead   of the task that has died
-- ARGV  1 task id   who asks
--       2 remember  milliseconds for which it is remembered
-- Returns {task id}

redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2])
return {redis.call('GET', KEYS[1])}
