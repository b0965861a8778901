"""The pace of starts: when one more may be, and what is noted of those that were."""

from collections.abc import Callable

from tests.model.permits import pace_of
from tests.model.store import MS, SECOND, Record, Start, Starts, Store, up

MOST_STARTS = 1_100


class Pace:
    """What a lock asks before a start, and notes of it."""

    kept: Callable[[Store, Record, int], Store]

    def with_starts(self, store: Store, times: tuple[Start, ...]) -> Store:
        """The keys when these are the starts that are known."""
        return store._replace(starts=Starts(times, store.starts.expiry) if times else Starts())

    ahead = 20_000
    """How long before its start a call may be handed a permit."""

    def paced_till(self, store: Store, terms: str, handed: int, now: int, ahead: int = 0) -> int:
        """When one more may start, at the earliest, or so much ahead of that; 0 if it may now.

        Who is handed a permit is about to.
        """
        count, period = pace_of(terms)
        if not count:
            return 0
        left = count - handed
        place = max(left, 1)
        times = [start for start in store.starts.times if start[0] <= now]  # else the clock was set back
        till = times[-place][0] + period - ahead if len(times) >= place else 0
        if left < 1:
            till = max(till, now + min(period, SECOND))
        return till if till > now else 0

    def starts_kept(self, store: Store, terms: str, now: int) -> Store:
        """The keys when a start was refused: they are kept for as long as who asks needs them."""
        times, expiry = store.starts
        ms = up(pace_of(terms)[1], MS)
        if not times or (expiry is not None and expiry - now // MS >= ms):
            return store
        return store._replace(starts=Starts(times, now // MS + 2 * ms))

    def start_of(self, record: Record, number: int) -> Start:
        """As what the start of a permit's holder is noted."""
        return record.since, number, record.fence

    def start_noted(self, store: Store, terms: str, start: Start, now: int) -> Store:
        """The keys when a call has started under a permit: kept for as long as anybody may ask for it.

        Of very many the last are kept.
        """
        period = pace_of(terms)[1]
        if not period:
            return store
        _, expiry = store.starts
        keep = max(period, (expiry - now // MS) * MS if expiry is not None else 0)
        times = sorted({known for known in store.starts.times if known[0] <= now} | {start})
        oldest = max(now - keep, times[-MOST_STARTS][0] if len(times) >= MOST_STARTS else 0)
        kept = tuple(known for known in times if known[0] >= oldest)
        return store._replace(starts=Starts(kept, now // MS + up(max(keep, 2 * period), MS)))

    def start_taken_back(self, store: Store, start: Start) -> Store:
        """The keys when nothing has begun under a permit that was acquired."""
        return self.with_starts(store, tuple(known for known in store.starts.times if known != start))

    def held_longer(self, store: Store, start: int, now: int, retention: int) -> Store:
        """The keys of a lock that is held for a retry, which comes later: an hour past its start at most."""
        record = store.holder
        deadline = max(record.deadline, min(record.deadline + start - now, start + 3600 * SECOND))
        return self.kept(store, record._replace(deadline=deadline), retention)
