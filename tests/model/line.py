"""The part of the verbs that is about waiting: the line, what its calls are woken with, and tickets."""

from collections.abc import Callable

from tests.model.store import LINGERS_MS, Answer, Calls, Line, Record, Store, Ticket


def first_in_line(store: Store) -> str | None:
    """The task that waits first; None if none does."""
    return store.line.places[0][1] if store.line.places else None


def without_place(store: Store, task: str) -> Store:
    """The keys when a task waits in line no more."""
    places = tuple(place for place in store.line.places if place[1] != task)
    return store._replace(line=Line(places, store.line.lease) if places else Line())


def with_call(store: Store, task: str, call: str, lease: int) -> Store:
    """The keys with what a task is woken with; under '' who watches the lock."""
    fields = {**dict(store.calls.fields), task: call}
    return store._replace(calls=Calls(tuple(sorted(fields.items())), max(store.calls.lease, lease)))


def with_place(store: Store, task: str, since: int, call: str, lease: int) -> Store:
    """The keys when a task waits in line, with what it is woken with."""
    places = [*without_place(store, task).line.places, (since, task)]
    line = Line(tuple(sorted(places, key=_rank)), max(store.line.lease, lease))
    return with_call(store._replace(line=line), task, call, lease)


def without_call(store: Store, task: str) -> Store:
    """The keys when nothing is known any more of what a task is woken with."""
    fields = tuple(field for field in store.calls.fields if field[0] != task)
    return store._replace(calls=Calls(fields, store.calls.lease) if fields else Calls())


def with_ticket(store: Store, task: str, text: str, lease: int) -> Store:
    """The keys with a task's ticket."""
    tickets = {**dict(store.tickets), task: Ticket(text, lease)}
    return store._replace(tickets=tuple(sorted(tickets.items())))


class Waiting:
    """What a lock does for those who wait for it, and `park` and `leave`."""

    is_past: Callable[[int, int], bool]
    kept: Callable[[Store, Record, int], Store]

    def heir_of(self, record: Record | None) -> str | None:
        """The task for which a lock is kept, or was until its deadline."""
        return record.info if record is not None and record.state == "handed" else None

    def is_woken(self, ticket: Ticket | None, copy: str) -> bool:
        """Whether a call has waited and been woken, though late: nobody runs under a lock that is handed."""
        return ticket is not None and ticket.text.endswith("|") and copy != "-"

    def overtaken(self, store: Store, heir: str, since: int) -> Store:
        """The keys when the one a lock was kept for was overtaken: it is among the first in line again."""
        call = dict(store.calls.fields).get(heir)
        if call is None:
            return store
        after = with_place(store, heir, since, call, LINGERS_MS)
        return after._replace(calls=store.calls)

    def is_for(self, heir: str | None, task: str | None) -> bool:
        """Whether a lock is kept for this task."""
        return heir is not None and heir == task

    def is_stale(self, ticket: Ticket, attempt: int, copy: str) -> bool:
        """Whether an attempt has been started by another message than this copy, or a later one exists."""
        waits, begun_by = ticket.text.split("|", 1)
        later = int(waits) - attempt
        return later > 0 or (later == 0 and begun_by not in ("", copy))

    def begun(self, store: Store, task: str, text: str, ticket: Ticket | None, remember: int) -> Store:
        """The keys when a message of a task has acquired: no other message may start it."""
        if ticket is not None:
            return with_ticket(store, task, text, ticket.lease)
        return with_ticket(store, task, text, remember) if remember > 0 else store

    def next_in_line(self, store: Store, now: int) -> tuple[str | None, int, tuple[str, ...]]:
        """To which task a lock is handed, until when that one asks by itself, and who does no more."""
        gone: list[str] = []
        calls = dict(store.calls.fields)
        for _, task in store.line.places[:10]:
            call = calls.get(task, "")
            lingers = int(call[1:]) if call.startswith("@") else 0
            if not lingers or not self.is_past(now, lingers):
                return task, lingers, tuple(gone)
            gone.append(task)
        return None, 0, tuple(gone)

    def handed(
        self, store: Store, record: Record, now: int, heir: str, hand_over: int, remember: int
    ) -> Store:
        """The keys of a lock that is kept for the first in line until it comes."""
        kept = record._replace(deadline=now + hand_over, state="handed", since=now, info=heir)
        return without_place(self.kept(store, kept, remember), heir)

    def park(
        self,
        store: Store,
        now: int,
        *,
        task: str,
        attempt: int,
        copy: str,
        since: int,
        call: str,
        remember: int,
        watch: int = 0,
    ) -> Answer:
        """lua/park.lua."""
        record = store.record
        ticket = dict(store.tickets).get(task)

        def answer(word: str, after: Store) -> Answer:
            order = [waiter for _, waiter in after.line.places]
            place = order.index(task) + 1 if task in order else 0
            watches = watch > 0 and bool(order) and self.may_watch(after, now, task)
            if watches:
                after = with_call(after, "", f"{now + watch} {task}", remember)
            text = None if record is None else str(record)
            return after, (word, str(now), store.value, text, str(place), "1" if watches else "0")

        if ticket is not None and self.is_stale(ticket, attempt, copy):
            return answer("stale", store)
        after = self.outlived(with_ticket(store, task, f"{attempt}|", remember), remember)
        if self.is_kept_for(store, now, task):
            return answer("handed", after)
        after = with_place(after, task, since, call, remember)
        return answer("new" if ticket is None else "parked", after)

    def outlived(self, store: Store, remember: int) -> Store:
        """The keys of those that are there when they are to last for so long at least."""
        line, calls = store.line, store.calls
        if line.places:
            store = store._replace(line=line._replace(lease=max(line.lease, remember)))
        if calls.fields:
            store = store._replace(calls=calls._replace(lease=max(calls.lease, remember)))
        return store

    def may_watch(self, store: Store, now: int, task: str) -> bool:
        """Whether a courier may be the one that watches the lock: no other does."""
        watch = dict(store.calls.fields).get("")
        if watch is None:
            return True
        until, other = watch.split(" ", 1)
        return other == task or self.is_past(now, int(until))

    def is_kept_for(self, store: Store, now: int, task: str) -> bool:
        """Whether a lock that was handed over is still kept for this task."""
        record = store.holder
        return (
            store.value is not None
            and self.is_for(self.heir_of(record), task)
            and not self.is_past(now, record.deadline)
        )

    def leave(self, store: Store, now: int, *, task: str, attempt: int, copy: str, remember: int) -> Answer:
        """lua/leave.lua."""
        ticket = dict(store.tickets).get(task)
        if ticket is not None and self.is_stale(ticket, attempt, copy):
            return store, ("stale",)
        after = with_ticket(
            without_call(without_place(store, task), task), task, f"{attempt}|{copy}", remember
        )
        return after, ("handed" if self.is_kept_for(store, now, task) else "left",)


def _rank(place: tuple[int, str]) -> tuple[int, bytes]:
    """As Redis sorts: by time, then by the bytes of the name."""
    return place[0], place[1].encode()
