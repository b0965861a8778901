"""The pace of starts: when one more may be, and what is noted of those that were."""

from collections.abc import Callable

from tests.model.permits import pace_of
from tests.model.store import MS, SECOND, Record, Starts, Store, up


class Pace:
    """What a lock asks before a start, and notes of it."""

    kept: Callable[[Store, Record, int], Store]

    def with_starts(self, store: Store, times: tuple[tuple[int, int], ...]) -> Store:
        """The keys when these are the starts that are known."""
        return store._replace(starts=Starts(times, store.starts.expiry) if times else Starts())

    def paced_till(self, store: Store, terms: str, handed: int, now: int) -> int:
        """When one more may start, at the earliest; 0 if it may now. Who is handed a permit is about to."""
        count, period = pace_of(terms)
        if not count:
            return 0
        left = count - handed
        place = max(left, 1)
        times = [start for start in store.starts.times if start[0] <= now]  # else the clock was set back
        till = times[-place][0] + period if len(times) >= place else 0
        if left < 1:
            till = max(till, now + min(period, SECOND))
        return till if till > now else 0

    def start_of(self, record: Record, number: int) -> tuple[int, int]:
        """As what the start of a permit's holder is noted: no permit has two within a microsecond."""
        return record.since, number

    def start_noted(self, store: Store, terms: str, start: tuple[int, int], now: int) -> Store:
        """The keys when a call has started under a permit: kept for as long as anybody may ask for it."""
        period = pace_of(terms)[1]
        if not period:
            return store
        _, expiry = store.starts
        keep = max(period, (expiry - now // MS) * MS if expiry is not None else 0)
        times = sorted({known for known in store.starts.times if now - keep < known[0] <= now} | {start})
        return store._replace(starts=Starts(tuple(times), now // MS + up(max(keep, 2 * period), MS)))

    def start_taken_back(self, store: Store, start: tuple[int, int]) -> Store:
        """The keys when nothing has begun under a permit that was acquired."""
        return self.with_starts(store, tuple(known for known in store.starts.times if known != start))

    def held_longer(self, store: Store, by: int, retention: int) -> Store:
        """The keys of a lock that is held for a retry, which comes later."""
        record = store.holder
        return self.kept(store, record._replace(deadline=record.deadline + by), retention)
