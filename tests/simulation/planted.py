"""Defects that are planted in the real Python and Lua: each is found by a seed.

Most of them are old ones of this project, as they were before they were mended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha1
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from celery_setnx import request, terms
from celery_setnx.call import delivery, ended, guard, marking, wake
from celery_setnx.call import live as known
from celery_setnx.call.back import ComesBack, Waits
from celery_setnx.lock import held, keeper, lock, verbs
from celery_setnx.lock import newest as generations
from celery_setnx.lock.line import PARK, DueReply
from celery_setnx.lock.record import ORIGINAL
from celery_setnx.lock.scripts import Script
from celery_setnx.run import (
    attempt,
    cleanup,
    courier,
    decide,
    give_back,
    join,
    linger,
    looks,
    park,
    run,
    sweep,
)
from celery_setnx.run.decide import Ask, End, Facts
from tests.simulation import calls, live, locks, newest
from tests.simulation.scheduler import World
from tests.simulation.substitutes import monotonic


def plant(monkeypatch: pytest.MonkeyPatch, script: Script, good: str, bad: str) -> None:
    """Change a script."""
    assert script.text.count(good) == 1, good
    text = script.text.replace(good, bad)
    monkeypatch.setattr(script, "text", text)
    monkeypatch.setattr(script, "sha", sha1(text.encode()).hexdigest())


def release_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, verbs.RELEASE, "if p.token ~= token then", "if not p.token then")


def late_release_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Redis did not hear is not tried again."""
    monkeypatch.setattr(keeper.Keeper, "try_again", lambda *_args: None)


def deadline_from_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder counts its lease from the reply, and not from before it asked."""

    def local_deadline(_before: float, remaining_us: int, _lease_s: float) -> float:
        return monotonic() + remaining_us / 1e6

    for module in (lock, held):
        monkeypatch.setattr(module, "local_deadline", local_deadline)


def loss_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is asked twice, of a lock that Redis has lost meanwhile, raises a TypeError."""
    parsed = verbs._ended

    def raising(reply: Any) -> verbs.EndReply:
        if reply[0] == "lost":
            int(reply[4])
        return parsed(reply)

    monkeypatch.setattr(verbs, "_ended", raising)


def no_wakeup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hands a lock over sends nothing."""
    monkeypatch.setattr(wake, "_send", lambda *_args: None)


def line_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call parks, and no sweep is told."""
    monkeypatch.setattr(park, "look_within", lambda *_args, **_more: DueReply("epoch"))


def sweep_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is due is looked at, and does not go on."""
    unserved = SimpleNamespace(waits=1, look_in_s=None)
    monkeypatch.setattr(sweep, "let_the_line_go_on", lambda *_args, **_more: unserved)


def plant_rules(monkeypatch: pytest.MonkeyPatch, told: decide.Told, *, without: Ask | End) -> None:
    """Decide without one of the rules."""
    kept = tuple(rule for rule in decide.RULES[told] if rule.then != without)
    monkeypatch.setattr(decide, "RULES", {**decide.RULES, told: kept})


def no_courier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call parks, and nothing of it is left with the broker."""
    monkeypatch.setattr(courier.ParkedCall, "send", lambda *_args, **_more: None)


def leaves_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that has sent itself again leaves the line, in which the new message stands by then."""
    end_wait = give_back._end_wait

    def leave(of: attempt.Attempt, fate: Any) -> None:
        end_wait(of, fate)
        if of.lingers_since and fate.back_in is not None and not fate.parked:
            give_back._leave(of, of.call, linger.LINGER_S)

    monkeypatch.setattr(give_back, "_end_wait", leave)


def joins_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls each is to end with the other's result, which has had the lock only to ask for this one's;
    and is stored as one that retries.
    """
    come_back = join.come_back

    def storing(*args: Any, **more: Any) -> Any:
        try:
            come_back(*args, **more)
        except Waits as waits:
            raise ComesBack(str(waits), when=waits.when) from None

    def joined_by(task: Any, holder: Any, call: Any) -> str | None:
        is_other = holder.task_id != call.task_id and holder.task == task.name
        return holder.task_id if is_other and holder.state == "running" else call.join

    monkeypatch.setattr(attempt, "joined_by", joined_by)
    monkeypatch.setattr(join, "come_back", storing)


def late_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command of a call that waits by now comes late, and gets the lock that nobody hears of."""
    plant(monkeypatch, verbs.ACQUIRE, "(is_begun or begun_by == '' and is_first)", "is_begun")


def _learn_of_no_end(of: attempt.Attempt) -> None:
    of.facts.ended = "no"


def backend_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is delivered again does not ask whether it has ended."""
    monkeypatch.setattr(attempt.Attempt, "_ask_ended", _learn_of_no_end)


def no_timed_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starts of a pace are left to the sweep."""
    monkeypatch.setattr(looks.TimedLooks, "_wake", lambda *_args: None)


def window_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has failed after its release counts as a success."""
    monkeypatch.setattr(cleanup.Cleanup, "take_back", lambda *_args: None)


def pace_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is used at twice its rate."""
    text = lock.Terms.__str__

    def doubled(self: lock.Terms) -> str:
        return text(self._replace(starts=2 * self.starts))

    monkeypatch.setattr(lock.Terms, "__str__", doubled)


def twin_of_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that came back does not ask whether the delivery that has sent it has succeeded since."""
    may_have_twin = attempt.Attempt._may_have_twin

    def asking(of: attempt.Attempt) -> bool:
        return may_have_twin(of) and (of.call.again or of.call.copy != ORIGINAL)

    monkeypatch.setattr(attempt.Attempt, "_may_have_twin", asking)


def late_release_waits_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late release is tried again when there is another errand, and not before."""
    following = keeper._Errands._next
    monkeypatch.setattr(keeper._Errands, "_next", lambda errands, _wait_s: following(errands, None))


def another_since_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another has acquired since its release is told as lost, if the release was asked twice."""
    monkeypatch.setattr(held, "word_of", lambda _lock, ask, *_args: ask().word)


def parked_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose process dies just after it has parked is told as failed, and waits on."""
    monkeypatch.setattr(request.SingletonRequest, "_goes_on", lambda _request: False)


def failed_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails while it is parked, or sent again, leaves its place and its message behind."""
    monkeypatch.setattr(run, "end_attempt", lambda _attempt: None)


def stored_success_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A success is taken back if its process dies after it was stored."""
    monkeypatch.setattr(request.SingletonRequest, "_has_stored_success", lambda _request: False)


def success_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call does not ask under its lock whether another has succeeded since it was published."""
    monkeypatch.setattr(attempt, "done_by", lambda *_args: None)


def join_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call runs which the holder's release has overtaken on its way into the line."""

    plant_rules(monkeypatch, "acquired", without=Ask.ASK_JOINED)


def early_retry_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry that came early gives the lock back that was held for it, to look once more."""
    known = attempt.Attempt._known

    def knowing(of: attempt.Attempt, **more: Any) -> Facts:
        of.options, options = replace(of.options, hold_on_retry=False), of.options
        try:
            return known(of, **more)
        finally:
            of.options = options

    monkeypatch.setattr(attempt.Attempt, "_known", knowing)


def early_sweeps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All sweeps of a worker count as early: none looks after the couriers that it holds."""
    sweeping = sweep.Sweep.sweep

    def early(of: sweep.Sweep, app: Any, *, is_early: bool = False, **details: Any) -> Any:
        return sweeping(of, app, is_early=True, **details)

    monkeypatch.setattr(sweep.Sweep, "sweep", early)


def death_keeps_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose process dies before it has the lock keeps its mark."""
    forget = request.SingletonRequest._forget

    def forgetting(
        of: request.SingletonRequest, *, is_sent_again: bool = False, has_died: bool = False
    ) -> None:
        if not has_died:
            forget(of, is_sent_again=is_sent_again)

    monkeypatch.setattr(request.SingletonRequest, "_forget", forgetting)


def started_by_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """STARTED is stored for each message, also over the result of a call that has ended."""
    init = attempt.Attempt.__init__

    def storing(of: attempt.Attempt, task: Any, guard: Any, came: Any, *args: Any) -> None:
        attempt.store_started(task, came)
        init(of, task, guard, came, *args)

    monkeypatch.setattr(attempt.Attempt, "__init__", storing)


def _count_as_sent_once_taken(monkeypatch: pytest.MonkeyPatch, kind: type[marking.Marking]) -> None:
    take = kind.take

    def taking(of: marking.Marking, *batch: Any) -> Any:
        found = take(of, *batch)
        of._extend(of._taken)
        return found

    monkeypatch.setattr(kind, "take", taking)


def marks_before_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks last for the queue lease before their messages are sent."""
    _count_as_sent_once_taken(monkeypatch, marking.Marking)


def unsent_stay_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the broker has not taken stays marked."""
    monkeypatch.setattr(marking, "free_unless_away", lambda *_args: None)


def retry_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The retry of a call of a fan-out has a ticket of its own: its first attempt leaves with its place."""
    monkeypatch.setattr(guard, "has_random_id", lambda _task_id: False)


def paced_release_notes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release while no call may start tells nobody when one may."""
    give_turn = wake.give_turn

    def giving(app: Any, task: str, key: str, turn: Any) -> float | None:
        return None if turn is not None and turn.look_in_s is not None else give_turn(app, task, key, turn)

    monkeypatch.setattr(wake, "give_turn", giving)


def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that has waited for another of its call runs as soon as that has given its lock back."""
    plant_rules(monkeypatch, "acquired", without=End.LOOK_AGAIN)


def success_asked_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call asks whether it has succeeded before it has its lock, and not under it."""
    given_back, ask_ended = run._given_back, attempt.Attempt._ask_ended

    def asking(of: attempt.Attempt, body: Any) -> Any:
        ask_ended(of)
        ended = of.facts.ended
        if ended == "no":
            return given_back(of, body)
        return of._end_as_stored() if ended == "stored" else of._drop()

    monkeypatch.setattr(run, "_given_back", asking)
    monkeypatch.setattr(attempt.Attempt, "_ask_ended", _learn_of_no_end)


def later_death_is_its(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies ends all runs that its parent still knows of it, not only the last one."""
    has_not = property(lambda _request: False, lambda *_args: None)
    monkeypatch.setattr(request.SingletonRequest, "_has_returned", has_not)


def turn_has_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose turn came while it parked does not ask whether a message that was woken for it has run."""
    is_woken = property(lambda self: self.call.is_woken)
    monkeypatch.setattr(attempt.Attempt, "is_woken", is_woken)


def put_back_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that has put a call back into a paced line leaves its start to the next sweep."""
    monkeypatch.setattr(sweep, "_put_back", lambda app, order: courier.put_back(app, order, wait_s=0.0))


def end_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a delivery that comes while a look goes on is forgotten with the one before it."""
    turn = looks.TimedLooks._turn

    def turning(of: looks.TimedLooks) -> bool:
        goes_on = turn(of)
        of._has_ended = False
        return goes_on

    monkeypatch.setattr(looks.TimedLooks, "_turn", turning)


def woken_ahead_parks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that was woken just ahead of its start goes back into its line."""
    pause_s = linger._pause_s

    def asking(outcome: lock.Outcome, task_id: str, *, stands: bool, is_woken: bool) -> float:
        return 0.0 if outcome.paced else pause_s(outcome, task_id, stands=stands, is_woken=is_woken)

    monkeypatch.setattr(linger, "_pause_s", asking)


def ended_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark of older data counts, also of a call that has ended."""
    monkeypatch.setattr(ended, "_free", lambda *_args: False)


def unplaced_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of whose place Redis has not heard has no courier that says so."""
    monkeypatch.setattr(park, "replace", lambda order, **_changes: order)


def outage_puts_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that the broker does not take has been woken in vain: it is passed over."""
    monkeypatch.setattr(wake, "_take_back", lambda *_args: None)


def start_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call starts, and calls that are older are not superseded by that."""
    plant(monkeypatch, verbs.ACQUIRE, "  newest.start(generation, call.task, true)\n", "")


def replaced_before_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call replaces those before it though its message is never sent."""
    _count_as_sent_once_taken(monkeypatch, marking.Replacing)


def retry_is_of_no_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry is not superseded by a newer call that has begun."""
    call = guard.Guard.call

    def told(*args: Any, **more: Any) -> Any:
        return call(*args, **more)._replace(generation=0)

    monkeypatch.setattr(guard.Guard, "call", told)


def never_overdue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is published faster than its messages travel is never run."""
    plant(monkeypatch, verbs.ACQUIRE, "now >= newest.first + bound", "false")


def first_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that a call has waited counts for those after it."""
    plant(
        monkeypatch,
        verbs.ACQUIRE,
        "newest.first, newest.superseded = is_pending and now or 0, 0",
        "newest.superseded = 0",
    )


def place_without_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply ends early if an older call is known, and has its turn: the call that parks fails."""
    plant(monkeypatch, PARK, "return place and its or false, since", "return place and its, since")


def equal_to_an_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is dropped as a duplicate of one that has begun."""
    plant(
        monkeypatch,
        generations.RESERVE,
        "is_pending, is_alone = newest.settled > newest.started,",
        "is_pending, is_alone = newest.settled > 0,",
    )


def no_quiet_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for newer ones is sent without a countdown."""
    monkeypatch.setattr(marking.Replacing, "delayed", lambda _of, call, _found: (call, {}))


def hash_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the terms of tasks."""
    monkeypatch.setattr(known, "live_terms_of_tasks", lambda *_args: {})


def terms_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery brings no terms to the child, as if there were none by now."""
    monkeypatch.setattr(delivery, "_live_terms", lambda *_args: ("", monotonic()))


def scope_not_roused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are not looked at when the terms of their task have changed."""
    for module in (sweep, terms):
        monkeypatch.setattr(module, "rouse", lambda *_args: None)


def key_not_roused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is not looked at when the terms of its key have changed."""
    monkeypatch.setattr(terms, "let_others_go_on", lambda *_args: False)


def pause_of_key_not_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call does not ask for the terms of its key when nobody waits there."""
    plant(
        monkeypatch,
        verbs.ACQUIRE,
        "LINE, MARK, TICKET, PERMITS, TERMS) > 0",
        "LINE, MARK, TICKET, PERMITS) > 0",
    )


def paused_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is refused in a pause loses its place, as if it had not come."""
    plant(
        monkeypatch,
        verbs.ACQUIRE,
        "line.put_back(p.heir, 'unsent')",
        "line.put_back(p.heir, 'missed', 6000000)",
    )


def ended_term_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term that is over counts until another takes its place."""
    for script in (verbs.ACQUIRE, verbs.SERVE, PARK, verbs.RELEASE):
        plant(monkeypatch, script, "if field and #till < 18 and now < tonumber(till) then", "if field then")


def override_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What counts for a while stands beside the lock as the task's own."""
    plant(
        monkeypatch,
        PARK,
        "note_permits(PERMITS, known, seen.top, own, remember)",
        "note_permits(PERMITS, known, seen.top, terms, remember)",
    )


def all_are_skipped_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `auto` no call waits in a pause."""
    monkeypatch.setattr(attempt.Attempt, "_may_wait_alone", lambda _attempt: False)


def retry_is_skipped_in_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has begun is skipped as a new one is."""
    monkeypatch.setattr(decide.Facts, "may_be_its_start", False)


class Planted(NamedTuple):
    """A defect, the scenario that finds it, and a seed by which it does at present: it is played first."""

    play: Callable[[int], World]
    defect: Callable[[pytest.MonkeyPatch], None]
    seed: int


PLANTED = [
    Planted(locks.play, release_of_another, 8),
    Planted(locks.play, late_release_forgotten, 9),
    Planted(locks.play, deadline_from_the_reply, 15),
    Planted(locks.play, loss_without_time, 4),
    Planted(locks.play, pace_of_one_more, 4),
    Planted(partial(calls.play, task="waits"), no_wakeup, 1),
    Planted(partial(calls.play, task="waits"), no_courier, 20),
    Planted(partial(calls.play, task="slow"), line_not_noted, 1),
    Planted(partial(calls.play, task="waits"), sweep_serves_nobody, 246),
    Planted(partial(calls.play, task="paced"), no_timed_look, 2),
    Planted(partial(calls.play, task="once_early"), window_not_taken_back, 26),
    Planted(partial(calls.play, task="joins_late"), joins_each_other, 57),
    Planted(partial(calls.play, task="holds"), late_command, 3091),
    Planted(partial(calls.play, task="waits_late"), backend_not_asked, 32),
    Planted(partial(calls.play, task="retries"), twin_of_a_retry, 26),
    Planted(partial(calls.play, task="waits_late"), leaves_late, 831),
    Planted(locks.play, late_release_waits_for_another, 9),
    Planted(locks.play, another_since_is_a_loss, 8),
    Planted(partial(calls.play, task="joins"), join_lost, 27),
    Planted(partial(calls.play, task="once"), success_not_asked, 19),
    Planted(partial(calls.play, task="once_early"), stored_success_taken_back, 64),
    Planted(partial(calls.play, task="waits"), parked_has_failed, 12),
    Planted(partial(calls.play, task="retries_early"), failed_comes_back, 67),
    Planted(partial(calls.play, task="once_early"), death_keeps_mark, 401),
    Planted(partial(calls.play, task="holds"), early_retry_gives_back, 7),
    Planted(partial(calls.play, task="waits_late"), started_by_message, 85),
    Planted(partial(calls.play, task="paced"), early_sweeps_alone, 160),
    Planted(partial(calls.play, task="queued"), marks_before_it_sends, 605),
    Planted(partial(calls.play, task="unique"), unsent_stay_marked, 11),
    Planted(partial(calls.play, task="waits_late"), retry_is_another_call, 173),
    Planted(partial(calls.play, task="paced"), paced_release_notes_nothing, 10),
    Planted(partial(calls.play, task="retries"), no_second_look, 12),
    Planted(partial(calls.play, task="retries"), success_asked_early, 80),
    Planted(partial(calls.play, task="waits"), later_death_is_its, 125),
    Planted(partial(calls.play, task="paced"), turn_has_no_twin, 1066),
    Planted(partial(calls.play, task="paced"), put_back_unseen, 403),
    Planted(partial(calls.play, task="paced"), end_lost_between_threads, 4221),
    Planted(partial(calls.play, task="paced"), woken_ahead_parks, 7),
    Planted(partial(calls.play, task="unique"), ended_stays, 65),
    Planted(partial(calls.play, task="waits"), unplaced_not_put_back, 1252),
    Planted(partial(calls.play, task="waits"), outage_puts_off, 37),
    Planted(partial(newest.play, task="newest"), start_not_noted, 0),
    Planted(partial(newest.play, task="newest"), replaced_before_sent, 10),
    Planted(partial(newest.play, task="newest_holds"), retry_is_of_no_generation, 9),
    Planted(partial(newest.play, task="debounced"), never_overdue, 25),
    Planted(partial(newest.play, task="debounced"), first_stays, 2),
    Planted(partial(newest.play, task="debounced"), place_without_call, 4),
    Planted(partial(newest.play, task="newest"), equal_to_an_older, 43),
    Planted(partial(newest.play, task="debounced"), no_quiet_time, 0),
    Planted(partial(live.play, task="waits"), hash_not_read, 0),
    Planted(partial(live.play, task="waits"), terms_not_carried, 7),
    Planted(partial(live.play, task="waits"), scope_not_roused, 0),
    Planted(partial(live.play, task="waits"), key_not_roused, 10),
    Planted(partial(live.play, task="skips"), pause_of_key_not_heeded, 0),
    Planted(partial(live.play, task="waits"), paused_is_passed_over, 0),
    Planted(partial(live.play, task="few"), ended_term_counts, 6),
    Planted(partial(live.play, task="few"), override_is_noted, 2),
    Planted(partial(live.play, task="autos"), all_are_skipped_in_a_pause, 5),
    Planted(partial(live.play, task="skips"), retry_is_skipped_in_a_pause, 26),
]
