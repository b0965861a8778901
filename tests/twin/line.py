"""The part of the verbs that is about waiting: the line, what its calls are woken with, and tickets."""

from collections.abc import Callable

from tests.model.line import AWAY, waiter, waiting
from tests.model.permits import at, highest_in, limit_of, terms_in
from tests.model.store import (
    LINGERS_MS,
    MS,
    NUMBER,
    SECOND,
    Answer,
    Calls,
    Line,
    Record,
    Store,
    Ticket,
    up,
)
from tests.twin.pace import Pace
from tests.twin.permits import Choice, Fits, next_room, noted

AWAY_AT_MOST = 3600 * SECOND
FOREIGNRECORD = ("FOREIGNRECORD",)


def without_place(store: Store, task: str) -> Store:
    """The keys when a task waits in line no more."""
    places = tuple(place for place in store.line.places if place[1] != task)
    return store._replace(line=Line(places, store.line.lease) if places else Line())


def with_call(store: Store, task: str, call: object, lease: int) -> Store:
    """The keys with what a task is woken with."""
    fields = {**dict(store.calls.fields), task: str(call)}
    return store._replace(calls=Calls(tuple(sorted(fields.items())), max(store.calls.lease, lease)))


def with_place(store: Store, task: str, since: int, lease: int) -> Store:
    """The keys when a task has a place in line."""
    places = [*without_place(store, task).line.places, (since, task)]
    return store._replace(line=Line(tuple(sorted(places, key=_rank)), max(store.line.lease, lease)))


def without_call(store: Store, task: str) -> Store:
    """The keys when nothing is known any more of what a task is woken with."""
    fields = tuple(field for field in store.calls.fields if field[0] != task)
    return store._replace(calls=Calls(fields, store.calls.lease) if fields else Calls())


def with_ticket(store: Store, task: str, text: str, lease: int) -> Store:
    """The keys with a task's ticket."""
    tickets = {**dict(store.tickets), task: Ticket(text, lease)}
    return store._replace(tickets=tuple(sorted(tickets.items())))


def without_ticket(store: Store, task: str) -> Store:
    """The keys without a task's ticket."""
    return store._replace(tickets=tuple(found for found in store.tickets if found[0] != task))


class Waiting(Pace):
    """What a lock does for those who wait for it: `serve`, `park` and `leave`."""

    is_past: Callable[[int, int], bool]
    proves_death: Callable[[Record, str], bool]
    value_of: Callable[[int], str]
    choose: Callable[[Store, int, int, int, Fits], Choice]

    def heir_of(self, record: Record | None) -> str | None:
        """The task for which a lock is kept, or was until its deadline."""
        return record.info if record is not None and record.state == "handed" else None

    def is_woken(self, ticket: Ticket | None, copy: str) -> bool:
        """Whether a call has waited and been woken, though late: nobody runs under a lock that is handed."""
        return ticket is not None and ticket.begun_by == "" and copy != "-"

    def may_pass(self, store: Store, task: str | None, heir: str | None, *, woken: bool) -> bool:
        """Whether a caller need not stand behind those who wait: nobody does, or it has its turn."""
        line = waiting(store)
        return not line or (task is not None and (task == line[0] or woken or self.is_for(heir, task)))

    def is_for(self, heir: str | None, task: str | None) -> bool:
        """Whether a lock is kept for this task."""
        return heir is not None and heir == task

    def overtaken(self, store: Store, heir: str) -> Store:
        """The keys when another has the lock that was kept for a task: it stands where it stood."""
        known = waiter(store, heir)
        if known is None:
            return without_call(store, heir)
        after = with_call(store, heir, known._replace(comes=True), -1)
        return with_place(after, heir, known.since, -1)

    def passed_over(self, store: Store, heir: str, now: int, lease: int) -> Store:
        """The keys when a lock was handed to a task in vain: it is out of the line for a while."""
        known = waiter(store, heir)
        if known is None:
            return without_call(store, heir)
        away = min(lease * 2**known.vain, AWAY_AT_MOST)
        after = with_call(store, heir, known._replace(vain=known.vain + 1, comes=False), -1)
        return self.lasts_as_calls(with_place(after, heir, AWAY + now + away, -1))

    def taken_back(self, store: Store, heir: str) -> Store:
        """The keys when the one a lock was kept for has not been woken: it stands where it stood."""
        known = waiter(store, heir)
        if known is None:
            return without_call(store, heir)
        return self.lasts_as_calls(with_place(store, heir, known.since, -1))

    def handed_back(self, store: Store, now: int) -> Store:
        """The keys when a call may not start yet to which a permit was handed: it stands where it stood."""
        record = store.holder
        known = waiter(store, record.info)
        store = self.nobodys(store, record._replace(state="released"), now, LINGERS_MS)
        return self.lasts_as_calls(
            store if known is None else with_place(store, record.info, known.since, -1)
        )

    def lasts_as_calls(self, store: Store) -> Store:
        """The keys of a line that may be there anew."""
        line = store.line
        return store._replace(
            line=line._replace(lease=max(line.lease, store.calls.lease)) if line.places else line
        )

    def put_back(self, store: Store, now: int) -> Store:
        """The keys when those who were passed over for long enough stand where they stood."""
        for until, task in store.line.places:
            if until >= AWAY and self.is_past(now, until - AWAY):
                known = waiter(store, task)
                store = without_place(store, task)
                store = store if known is None else with_place(store, task, known.since, -1)
                store = self.lasts_as_calls(store)
        return store

    def is_stale(self, ticket: Ticket, attempt: int, copy: str) -> bool:
        """Whether an attempt has been started by another message than this copy, or a later one exists."""
        later = ticket.attempt - attempt
        return later > 0 or (later == 0 and ticket.begun_by not in ("", copy))

    def vain_of(self, store: Store, task: str, ticket: Ticket | None, attempt: int) -> str:
        """How often a task was woken in vain."""
        known = waiter(store, task)
        if known is not None:
            return str(known.vain)
        return ticket.vain if ticket is not None and ticket.attempt == attempt else "0"

    def begun(self, store: Store, task: str, text: str, ticket: Ticket | None, remember: int) -> Store:
        """The keys when a message of a task has acquired: no other message may start it."""
        if ticket is None and remember <= 0:
            return store
        return with_ticket(store, task, text, remember or (ticket.lease if ticket else 0))

    def next_in_line(self, store: Store, now: int) -> tuple[str | None, int, tuple[str, ...]]:
        """To which task a lock is handed, until when that one asks by itself, and who does no more."""
        gone: list[str] = []
        calls = dict(store.calls.fields)
        for task in waiting(store)[:10]:
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

    def wakes(self, store: Store, heir: str | None) -> str | None:
        """What an heir is woken with; None if it asks by itself, or its wake-up is on its way."""
        known = waiter(store, heir)
        return None if known is None or known.comes else known.call

    def serve(
        self,
        store: Store,
        now: int,
        *,
        token: str,
        hand_over: int,
        remember: int,
        lease: int,
        dead: str = "",
        away: str = "",
        unsent: str = "",
        terms: str = "0",
        count: int = 0,
    ) -> Answer:
        """lua/serve.lua; `count`: as for acquire."""
        choice, lapsed, paced = None, 0, 0
        highest = highest_in(store)[0]
        if highest > max(count, 1):
            return store, ("more", str(highest))
        terms = terms_in(store) if terms == "0" else terms
        limit = limit_of(terms)
        if count:

            def fits(record: Record, live: bool) -> int | None:
                nonlocal lapsed
                if live and record.state == "handed" and (record.token == token or record.info == away):
                    return 1
                if not live and record.state == "handed":
                    lapsed += 1
                    return self.rank_of_lapsed()
                return 5 if live and self.proves_death(record, dead) else None

            choice = self.choose(store, now, count, limit, fits)
            paced = self.served_till(store, terms, choice, now)
            store = self.starts_kept(store, terms, now) if paced else store
        number = choice.number if choice else 0
        store = at(store, number)
        after, reply = self._serve_one(
            store, now, token, hand_over, remember, lease, dead, away, unsent, choice, terms, paced
        )
        if choice and lapsed > (choice.rank == 3) and len(reply) > 6:
            backs = [until - AWAY for until, _ in after.line.places if until >= AWAY]
            reply = (*reply[:6], str(min([now, *backs[:1]])))
        return at(after, number), reply

    def served_till(self, store: Store, terms: str, choice: Choice, now: int) -> int:
        """Until when nobody is handed a permit, as no start is left; 0 if one is."""
        return self.paced_till(store, terms, choice.handed - (choice.rank == 1), now, self.ahead)

    def rank_of_lapsed(self) -> int | None:
        """How well a permit fits that was handed to a call in vain: it is served before one that is free."""
        return 3

    def looks_at_others(self, word: str) -> bool:
        """Whether a line is to be looked at again when another permit ends."""
        return True

    def drains(self, choice: Choice, limit: int) -> bool:
        """Whether a permit is nobody's any more, as the limit was lowered."""
        return choice.number >= limit

    def _serve_one(
        self,
        store: Store,
        now: int,
        token: str,
        hand_over: int,
        remember: int,
        lease: int,
        dead: str,
        away: str,
        unsent: str,
        choice: Choice | None,
        terms: str,
        paced: int,
    ) -> Answer:
        record, value = store.record, store.value
        if isinstance(record, str):
            return store, FOREIGNRECORD
        text = None if record is None else str(record)
        store, found, heir = self.put_back(store, now), store.holder, self.heir_of(record)

        def answer(after: Store, word: str, to: str | None, look: int) -> Answer:
            if choice and choice.next and self.looks_at_others(word):
                look = min(look, choice.next) if look else choice.next
            if choice and waiting(after):
                room = paced or next_room(after, terms, now, self.ahead)
                look = min(look or room, room) if room else look
                if choice.spare > 0 and not paced:
                    look = now
            backs = [until - AWAY for until, _ in after.line.places if until >= AWAY]
            look = min([*backs[:1], *[look] * (look > 0)], default=0)
            return after, (word, str(now), value, text, to, self.wakes(after, to), str(look))

        died = False
        if value is not None:
            if not NUMBER.fullmatch(value):
                return answer(store, "held", None, 0)
            if not self.is_past(now, found.deadline):
                if (found.state, found.token) == ("handed", token):
                    return answer(store, "handed", heir, found.deadline)
                died = self.proves_death(found, dead)
                if not died and (heir is None or heir != away):
                    return answer(store, "held", None, found.deadline)
            elif found.deadline > 0 and value == self.value_of(found.deadline):
                died = found.state != "resting" and heir is None
            else:
                until = int((min(float(value), 1e11) + 1) * SECOND)
                if now < until:
                    return answer(store, "held", None, until)
                died = True
        after = store
        if heir is not None:
            after = self.taken_back(store, heir) if unsent else self.passed_over(store, heir, now, lease)
        stays = choice is not None and (self.drains(choice, limit_of(terms)) or paced > 0)
        to, lingers, gone = (None, 0, ()) if unsent or stays else self.next_in_line(after, now)
        for task in gone:
            after = without_call(without_place(after, task), task)
        if to is not None:
            hand_over = lingers - now + 50_000 if lingers else hand_over
            if choice is not None and terms != terms_in(store):
                ms = up(hand_over, MS) + remember
                after = noted(after, max(limit_of(terms), choice.top), terms, ms)
            after = self.handed(after, found._replace(token=token), now, to, hand_over, remember)
            return answer(after, "taken_over" if died else "handed", to, now + hand_over)
        if heir is not None:
            after = self.nobodys(after, found._replace(state="released"), now, remember)
        return answer(after, "empty", None, now if len(gone) == 10 else 0)

    def nobodys(self, store: Store, record: Record, now: int, remember: int) -> Store:
        """The keys of a lock that is free."""
        expiry = now // 1_000 + remember
        return store._replace(
            value=None, expiry=None, record=record._replace(deadline=0), record_expiry=expiry
        )

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
        terms: str = "0",
        shared: str = "0",
        count: int = 1,
    ) -> Answer:
        """lua/park.lua."""
        number, highest = 0, highest_in(store)[0]
        if highest > max(count, 1):
            return store, ("more", str(highest))
        if count > 1:
            terms = terms_in(store) if terms == "0" else terms
            limit = limit_of(terms)

            def fits(record: Record, live: bool) -> int | None:
                return 1 if self.is_for(self.heir_of(record), task) else None

            choice = self.choose(store, now, count, limit, fits)
            number = choice.number
            store = noted(store, max(limit, choice.top), terms, remember)
        about = (task, attempt, copy, since, call, remember)
        after, reply = self._park_one(at(store, number), now, *about, is_shared=shared == "1")
        return at(after, number), reply

    def _park_one(
        self,
        store: Store,
        now: int,
        task: str,
        attempt: int,
        copy: str,
        since: int,
        call: str,
        remember: int,
        *,
        is_shared: bool,
    ) -> Answer:
        record = store.record
        ticket = dict(store.tickets).get(task)

        def answer(word: str, after: Store) -> Answer:
            order = [waiter for _, waiter in after.line.places]
            place = order.index(task) + 1 if task in order else 0
            text = None if record is None else str(record)
            return after, (word, str(now), store.value, text, str(place))

        if ticket is not None and self.is_stale(ticket, attempt, copy):
            if ticket.attempt == attempt and copy == "" and self.has_one_message(ticket):
                shorter = min(ticket.lease, remember)
                return answer("stale", with_ticket(store, task, ticket.text, shorter))
            return answer("stale", store)
        if is_shared and self.is_anothers(store, task, ticket):
            return answer("taken", store)
        is_later = ticket is not None and ticket.attempt < attempt
        vain = self.vain_of(store, task, ticket, attempt)
        after = self.outlived(with_ticket(store, task, f"{attempt}||{vain}", remember), remember)
        is_courier, is_known = copy == "", task in dict(store.calls.fields)
        is_heir = store.value is not None and self.is_for(self.heir_of(store.holder), task)
        is_heir = is_heir and self.has_turn(is_courier=is_courier, is_known=is_known)
        if is_heir and (is_courier or self.is_kept(store, now)):
            if is_later or waiter(store, task) is None:
                after = with_call(after, task, f"{vain}|{since}|{call}", remember)
            return answer("handed", after)
        if (
            not is_courier
            or waiter(store, task) is None
            or is_later
            or task not in [other for _, other in store.line.places]
        ):
            text = f"{vain}{self.still_comes(store, task, copy)}|{since}|{call}"
            after = with_call(after, task, text, remember)
            after = with_place(after, task, since, remember)
        had_begun = ticket is not None and ticket.attempt == attempt and ticket.begun_by != ""
        return answer("new" if ticket is None or had_begun else "parked", after)

    def is_anothers(self, store: Store, task: str, ticket: Ticket | None) -> bool:
        """Whether a place is that of another call with the same task id."""
        waits = ticket is not None and ticket.begun_by == ""
        return not waits and waiter(store, task) is not None

    def has_turn(self, *, is_courier: bool, is_known: bool) -> bool:
        """Whether a lock that is kept for a call is its own, though an attempt before left with its place."""
        return is_known or not is_courier

    def is_kept(self, store: Store, now: int) -> bool:
        """Whether a lock that was handed to a task that parks is nobody else's, be it past its deadline."""
        deadline = store.holder.deadline
        return not self.is_past(now, deadline) or store.value == self.value_of(deadline)

    def has_one_message(self, ticket: Ticket) -> bool:
        """Whether a call that has begun was woken once at most: no message of it comes very late."""
        return ticket.vain == "0"

    def still_comes(self, store: Store, task: str, copy: str) -> str:
        """Whether a wake-up of a task that parks is on its way still: that is forgotten."""
        return ""

    def outlived(self, store: Store, remember: int) -> Store:
        """The keys of those that are there when they are to last for so long at least."""
        line, calls = store.line, store.calls
        if line.places:
            store = store._replace(line=line._replace(lease=max(line.lease, remember)))
        if calls.fields:
            store = store._replace(calls=calls._replace(lease=max(calls.lease, remember)))
        return store

    def leave(
        self,
        store: Store,
        now: int,
        *,
        task: str,
        attempt: int,
        copy: str,
        remember: int,
        shared: str = "0",
        count: int = 1,
    ) -> Answer:
        """lua/leave.lua."""
        number, highest = 0, highest_in(store)[0]
        if highest > max(count, 1):
            return store, ("more", str(highest))
        if count > 1:

            def fits(record: Record, live: bool) -> int | None:
                return 1 if self.is_for(self.heir_of(record), task) else None

            number = self.choose(store, 0, count, 1, fits).number
        ticket = dict(store.tickets).get(task)
        if ticket is not None and self.is_stale(ticket, attempt, copy):
            return store, ("stale",)
        store = at(store, number)
        if shared == "1" and self.is_anothers(store, task, ticket):
            return at(with_ticket(store, task, f"{attempt}|{copy}|0", remember), number), ("left",)
        text = f"{attempt}|{copy}|{self.vain_of(store, task, ticket, attempt)}"
        after = with_ticket(without_call(without_place(store, task), task), task, text, remember)
        is_heir = store.value is not None and self.is_for(self.heir_of(store.holder), task)
        return at(after, number), ("handed" if is_heir else "left",)


def _rank(place: tuple[int, str]) -> tuple[int, bytes]:
    """As Redis sorts: by time, then by the bytes of the name."""
    return place[0], place[1].encode()
