"""Workflows of dedupe tasks, in both modes: nothing hangs, nothing is lost, no mark and no lock is left."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import redis
from celery import chain, chord, group, uuid
from celery.canvas import chunks, xmap
from celery.exceptions import ChordError
from celery.result import AsyncResult

from celery_setnx import OptionError, is_skipped
from tests.harness import Journal, Worker, wait_until
from tests.stage import assert_one_at_a_time

TIMEOUT_S = 60
DEDUPE = ("until_started", "until_done")


def in_modes(*modes: str) -> Any:
    """A test of tasks in these modes too, which have no `dedupe`."""
    return pytest.mark.parametrize("tasks", [*DEDUPE, *modes], indirect=True)


@pytest.fixture(scope="module")
def canvas_worker(module_worker) -> Worker:
    """A prefork worker with four processes for the tasks of `tests.canvasapp`."""
    return module_worker("tests.canvasapp", concurrency=4)


@pytest.fixture
def app(canvas_worker, locks, journal) -> Any:
    """The app, and its tasks that have no lock."""
    from tests import canvasapp

    return canvasapp


@pytest.fixture
def broker(server, app) -> Iterator[redis.Redis]:
    """The broker's own database."""
    with redis.Redis.from_url(server.url(app.BROKER_DB), decode_responses=True) as client:
        yield client


@pytest.fixture(params=DEDUPE)
def tasks(request, app, locks, journal, broker) -> Iterator[Any]:
    """The tasks of one mode. After the test all messages are used up, and so are marks and locks."""
    yield app.OF[request.param]
    wait_until(lambda: not messages(broker), "every message used up")
    # One that another's release has let in may be about to begin.
    wait_until(lambda: len(bodies(journal, what="end")) == len(bodies(journal)), "every body ended")
    wait_until(lambda: not marks(locks) and not [*locks.scan_iter("setnx:{*}")], "no mark and no lock left")
    assert_one_at_a_time(journal)
    assert journal.entries(what="lapsed") == []


@pytest.fixture
def later(tasks, app, canvas_worker, broker) -> Iterator[Callable[[], None]]:
    """Call it to let the worker start what was published to the queue `later`."""
    asked = {"reply": True, "destination": [canvas_worker.node], "timeout": TIMEOUT_S}

    started = []

    def start() -> None:
        started.append(app.app.control.add_consumer(app.LATER, **asked))
        assert started[-1]

    yield start
    if not started:  # a test failed before; a worker may take a second order after that to cancel
        start()
    wait_until(lambda: not messages(broker), "every message used up")
    assert app.app.control.cancel_consumer(app.LATER, **asked)
    # A read that is under way may still take a message of that queue: this one ends it.
    app.note.delay().get(timeout=TIMEOUT_S)


@pytest.fixture
def queued(tasks, app, locks, later) -> Iterator[AsyncResult]:
    """A call with the key of all the others, which is queued during the test. Its mark stays, and it runs."""
    result = tasks.step.apply_async((40,), queue=app.LATER)
    assert marks(locks) == {result.id}
    yield result
    assert marks(locks) == {result.id}
    later()
    assert result.get(timeout=TIMEOUT_S) == 41


@pytest.fixture
def running(tasks, journal, gates) -> Iterator[Callable[[], None]]:
    """A call with the key of all the others, which runs until this is called."""
    first = journal.reached("start", tasks.step.delay(40, gate="first"))

    def finish() -> None:
        gates("first")
        assert first.get(timeout=TIMEOUT_S) == 41

    return finish


def messages(broker: redis.Redis) -> int:
    """Messages that are queued, delayed or being worked on."""
    return broker.llen("celery") + broker.llen("later") + broker.hlen("unacked")


def marks(locks: redis.Redis) -> set[str]:
    """The task ids of all marks."""
    return {locks.get(key) or "" for key in locks.scan_iter("*:queued")}


def bodies(journal: Journal, result: AsyncResult | None = None, what: str = "start") -> list[dict[str, Any]]:
    """The runs of all bodies, or of one task's."""
    wanted = {"task_id": result.id} if result else {}
    return journal.entries(what=what, **wanted)


def ran(journal: Journal, result: AsyncResult) -> list[str]:
    """The functions that have run under one id, in order."""
    return [entry["task"].rpartition(".")[2] for entry in bodies(journal, result)]


def answers(journal: Journal, members: Any) -> list[Any]:
    """The result of every member: it has run, or was skipped and says so."""
    found = []
    for member in members:
        value = member.get(timeout=TIMEOUT_S)
        assert bool(bodies(journal, member)) != is_skipped(value)
        found.append(value)
    return found


def steps(t: Any, count: int) -> list[Any]:
    """Equal calls, whose results are 1, 2, 3 ..."""
    return [t.step.si(number) for number in range(count)]


def retrying(t: Any, **options: Any) -> list[Any]:
    """Equal calls that retry themselves, by hand or automatically, and one that does not: seven bodies."""
    calls = [t.step.si(0, failures=2), t.autoretried.si(1, failures=2), t.step.si(2)]
    return [call.set(singleton=options) for call in calls]


def joint(t: Any, members: Iterable[Any]) -> Any:
    """A chord whose body has the key of its members; the results of these are its result."""
    return chord(list(members), t.collect.s())


Workflow = tuple[Callable[[Any], Any], Any, int]
"""How a workflow is made of the tasks of a mode, its result, and how many bodies run."""

EVERY: dict[str, Workflow] = {
    "chain": (lambda t: chain(t.step.s(0), t.step.s(), t.step.s()), 3, 3),
    "chain-of-retrying-steps": (
        lambda t: chain(t.step.s(0, failures=2), t.autoretried.s(failures=2), t.step.s(failures=1)),
        3,
        8,
    ),
    "group-in-a-chain": (lambda t: t.step.s(0) | group([t.step.s()] * 2) | t.collect.s(), [2, 2], 4),
    "chord-in-a-chain": (lambda t: t.step.s(0) | joint(t, [t.step.s()] * 2) | t.collect.s(), [2, 2], 5),
    "chain-with-a-replaced-step": (lambda t: t.step.si(0) | t.replacing.si(t.step.si(1)) | t.step.s(), 3, 4),
    "group-of-retrying-members": (lambda t: group(retrying(t, on_conflict="retry")), [1, 2, 3], 7),
    "chord": (lambda t: joint(t, steps(t, 4)), [1, 2, 3, 4], 5),
    "chord-of-retrying-members": (lambda t: joint(t, retrying(t)), [1, 2, 3], 8),
    "chord-of-chains": (lambda t: joint(t, [s | t.step.s() for s in steps(t, 3)]), [2, 3, 4], 7),
    "chord-of-a-chord": (lambda t: joint(t, [joint(t, steps(t, 2)), t.step.si(2)]), [[1, 2], 3], 5),
    "chord-of-replaced-members": (lambda t: joint(t, map(t.replacing.si, steps(t, 2))), [1, 2], 5),
    "replaced-by-a-chain": (lambda t: t.replacing.s(EVERY["chain"][0](t)), 3, 4),
    "replaced-by-a-group": (lambda t: t.replacing.s(group(steps(t, 3))), [1, 2, 3], 4),
    "replaced-by-a-chord": (lambda t: t.replacing.s(joint(t, steps(t, 3))), [1, 2, 3], 5),
}
BESIDE: dict[str, Workflow] = {
    "chain": (lambda t: chain(t.step.s(0), t.step.s()), 2, 2),
    "chord": (lambda t: joint(t, steps(t, 3)), [1, 2, 3], 4),
    "chain-of-one": (lambda t: chain(t.step.si(0)), 1, 1),
    "group-of-one": (lambda t: group([t.step.si(1)]), [2], 1),
    "chord-of-one": (lambda t: joint(t, [t.step.si(2)]), [3], 2),
    "replaced": (lambda t: t.replaced.s(t.step.si(0)), 1, 1),
}


@pytest.mark.parametrize("shape", EVERY)
def test_workflow_of_equal_calls_runs_them_all(tasks, journal, shape):
    """Each has its turn and counts once; own retries of theirs, by hand or automatic, are no duplicates."""
    make, expected, runs = EVERY[shape]
    assert make(tasks).delay().get(timeout=TIMEOUT_S) == expected
    assert len(bodies(journal)) == runs


@pytest.mark.parametrize("shape", ["chain", "chord", "chord-of-retrying-members"])
@pytest.mark.parametrize("tasks", ["auto", "wait"], indirect=True)
def test_workflow_of_equal_calls_without_dedupe_runs_them_all(tasks, journal, shape):
    """They come back, or wait in line, until it is their turn."""
    test_workflow_of_equal_calls_runs_them_all(tasks, journal, shape)


@pytest.mark.parametrize("shape", BESIDE)
def test_workflow_beside_a_queued_call_leaves_its_mark(tasks, journal, queued, shape):
    """It is published, and runs to its end, while an equal call is queued, which then runs as well."""
    make, expected, runs = BESIDE[shape]
    assert make(tasks).delay().get(timeout=TIMEOUT_S) == expected
    assert len(bodies(journal)) == runs


@pytest.mark.parametrize(("shape", "first"), [("chain", 1), ("chord", 3)])
@in_modes("auto", "wait")
def test_workflow_beside_a_running_call_waits_for_it(tasks, journal, running, shape, first):
    """It is published though an equal call runs, and its first calls come back until that has ended."""
    make, expected, runs = BESIDE[shape]
    result = make(tasks).delay()
    wait_until(
        lambda: len({e["task_id"] for e in journal.entries(what="conflict")}) == first, "the conflicts"
    )
    running()
    assert result.get(timeout=TIMEOUT_S) == expected
    assert len(bodies(journal)) == 1 + runs


@pytest.mark.parametrize("shape", ["chain", "chord"])
def test_workflow_with_a_call_that_fails_fails(tasks, journal, shape):
    """What comes after it does not run, and get() raises the error."""
    step, failing = tasks.step.si(0), tasks.failing.si()
    workflow = chain(step, failing, step) if shape == "chain" else chord([step, failing], tasks.collect.s())
    result = workflow.delay()
    with pytest.raises((ChordError, ZeroDivisionError), match="same"):
        result.get(timeout=TIMEOUT_S)
    journal.wait_for("start", count=2)
    assert bodies(journal, result) == []


@in_modes("auto", "wait")
def test_group_of_equal_members_answers_for_each(tasks, journal):
    """Equal members are published one and all; each runs, or is skipped at run time if it does not wait."""
    members = group(steps(tasks, 4)).delay().results
    assert len({member.id for member in members}) == 4
    values = answers(journal, members)
    if tasks.mode in ("until_started", "wait"):
        assert values == [1, 2, 3, 4]
    assert bodies(journal)


@in_modes("wait")
def test_group_beside_a_running_call_answers_for_each(tasks, journal, running):
    """Members that meet a running call wait for it, or are skipped with until_done."""
    members = group(steps(tasks, 3)).delay().results
    for member in members:
        journal.wait_for("conflict", task_id=member.id)
    if tasks.mode == "until_done":
        assert all(is_skipped(value) for value in answers(journal, members))
    running()
    if tasks.mode != "until_done":
        assert answers(journal, members) == [1, 2, 3]


def test_group_beside_a_queued_call_leaves_its_mark(tasks, journal, queued):
    """Members run though an equal call is queued, which then runs as well."""
    answers(journal, group(steps(tasks, 3)).delay().results)


def test_chord_of_members_that_hold_their_lock(tasks, journal):
    """With hold_on_retry a member keeps its lock through its retries, and the others wait for it."""
    holding = {"hold_on_retry": True}
    members = [tasks.step.si(n, failures=2).set(singleton=holding) for n in range(2)]
    assert chord(members, tasks.collect.s()).delay().get(timeout=TIMEOUT_S) == [1, 2]
    runs = [entry["task_id"] for entry in bodies(journal)]
    assert len(set(runs[:3])) == len(set(runs[3:6])) == 1
    assert len(runs) == 7


@in_modes("auto")
def test_map_starmap_and_chunks_are_refused(tasks, app):
    """Where they are made; and where they run, if they are made of a signature, or elsewhere."""
    refused = f"of canvas.{tasks.mode}.step is refused"
    for loop in (tasks.step.map, tasks.step.starmap, lambda it: tasks.step.chunks(it, 2)):
        with pytest.raises(OptionError, match=refused):
            loop([(0, "same")])
    for made in (xmap(tasks.step.s(), [0, 0], app=app.app), chunks(tasks.step.s(), [(0,)], 2, app=app.app)):
        with pytest.raises(OptionError, match=f"map {refused}"):
            made.delay().get(timeout=TIMEOUT_S)


def test_replace_by_a_dedupe_task_answers_under_the_first_id(tasks, journal):
    """A task without a lock is replaced by a dedupe task: its result is the successor's."""
    result = tasks.replaced.delay(tasks.step.si(0))
    assert result.get(timeout=TIMEOUT_S) == 1
    assert len(bodies(journal, result)) == 1


@in_modes("raise")
def test_replace_by_an_equal_call_waits_for_its_own_lock(tasks, journal):
    """A dedupe task replaced by another of its key, and that by a third: each runs after the one before."""
    result = tasks.replacing.delay(tasks.replacing.si(tasks.step.si(0)))
    assert result.get(timeout=TIMEOUT_S) == 1
    assert ran(journal, result) == ["replacing", "replacing", "step"]


def test_replacement_of_a_call_that_has_waited_runs(tasks, journal, running):
    """A dedupe task that was woken and is replaced by an equal call: its successor is a new attempt."""
    waits = {"on_conflict": "wait"}
    result = tasks.replacing.apply_async((tasks.step.si(0),), task_id=uuid(), singleton=waits)
    journal.wait_for("conflict", task_id=result.id)
    running()
    assert result.get(timeout=TIMEOUT_S) == 1
    assert ran(journal, result) == ["replacing", "step"]


# Links


def test_link_on_a_duplicate_publishes_it(tasks, app, journal, queued):
    """A duplicate with a link is published and runs beside the queued call, so its callback runs."""
    linked = tasks.step.apply_async((0,), link=app.note.s("linked"))
    assert not linked.deduplicated
    assert linked.get(timeout=TIMEOUT_S) == 1
    journal.wait_for("note", arguments=[1, "linked"])


@in_modes("auto", "wait")
def test_link_on_a_call_beside_a_running_call_waits(tasks, app, journal, running):
    """A call whose link takes its result is published, and comes back until the running call has ended."""
    linked = tasks.step.apply_async((0,), link=app.note.s("linked"))
    assert not linked.deduplicated
    journal.wait_for("conflict", task_id=linked.id)
    running()
    journal.wait_for("note", arguments=[1, "linked"])
    assert len(journal.entries(what="note")) == 1


def test_link_error_on_a_duplicate_publishes_it(tasks, app, journal, queued):
    """A duplicate with a link_error is published, so its errback runs if it fails."""
    linked = tasks.failing.apply_async(link_error=app.note.si("failed"))
    assert not linked.deduplicated
    with pytest.raises(ZeroDivisionError):
        linked.get(timeout=TIMEOUT_S)
    journal.wait_for("note", arguments=["failed"])


def test_link_on_a_canvas_runs_once(tasks, app, journal):
    """What is linked to a chain or a chord of equal members runs after the last of them."""
    steps = chain(tasks.step.s(0), tasks.step.s())
    steps.link(app.note.s("chain"))
    numbers = chord([tasks.step.si(0), tasks.step.si(1)], tasks.collect.s())
    numbers.link(app.note.s("chord"))
    assert steps.delay().get(timeout=TIMEOUT_S) == 2
    assert numbers.delay().get(timeout=TIMEOUT_S) == [1, 2]
    journal.wait_for("note", arguments=[2, "chain"])
    journal.wait_for("note", arguments=[[1, 2], "chord"])
    assert len(journal.entries(what="note")) == 2


def test_link_to_its_own_key_runs(tasks, journal):
    """A call's lock and mark are gone when its callback is published, so that is no duplicate of the call."""
    first = tasks.step.apply_async((0,), link=tasks.step.s())
    assert first.get(timeout=TIMEOUT_S) == 1
    (second,) = first.children
    assert second.get(timeout=TIMEOUT_S) == 2
    assert len(bodies(journal)) == 2


def test_link_that_is_a_duplicate_is_published(tasks, app, journal, queued):
    """A lone callback equal to a queued call is never dropped: it carries the first call's result."""
    first = app.note.apply_async((1,), link=tasks.step.s())
    assert first.get(timeout=TIMEOUT_S) == 1
    (callback,) = first.children
    assert callback.id != queued.id
    answers(journal, [callback])
    assert len(bodies(journal)) == 1


def test_link_with_on_duplicate_raise_leaves_its_parent_alone(tasks, app, queued):
    """Celery would fail the parent, which has succeeded, and cut its chain: so a callback is not refused."""
    step = app.note.si(1)
    step.link(tasks.step.s().set(singleton={"on_duplicate": "raise"}))
    assert chain(step, app.note.si(2)).delay().get(timeout=TIMEOUT_S) == 2


def test_links_of_one_call_are_all_published(tasks, app, journal, queued):
    """Celery sends several callbacks of a call as a group, whose members are never dropped."""
    first = app.note.apply_async((1,), link=[tasks.step.s(), tasks.step.s()])
    assert first.get(timeout=TIMEOUT_S) == 1
    (callbacks,) = first.children
    answers(journal, callbacks.results)


def test_link_to_a_canvas_runs_every_member(tasks, app, journal, queued):
    """A chain or chord as the callback is never dropped, though an equal call is queued."""
    app.note.apply_async((1,), link=chain(tasks.step.s(), tasks.step.s(), app.note.s("chain")))
    app.note.apply_async((1,), link=chord([tasks.step.s(), tasks.step.s()], app.note.s("chord")))
    journal.wait_for("note", arguments=[3, "chain"])
    journal.wait_for("note", arguments=[[2, 2], "chord"])
    assert len(bodies(journal)) == 4


def test_link_error_that_is_a_duplicate_is_published(tasks, journal, queued):
    """Celery sends errbacks as a group, so a dedupe task as the errback of a call is never dropped."""
    failed = tasks.failing.apply_async(link_error=tasks.collect.s())
    journal.wait_for("end", task=f"canvas.{tasks.mode}.collect")
    with pytest.raises(ZeroDivisionError):
        failed.get(timeout=TIMEOUT_S)
    assert len(bodies(journal)) == 2


def test_link_error_with_three_parameters_is_called_unguarded(tasks, journal):
    """Celery calls an unbound errback of (request, exc, traceback) as a function: no lock, no mark."""
    failed = tasks.failing.apply_async(link_error=tasks.mourn.s())
    (mourned,) = journal.wait_for("end", task=f"canvas.{tasks.mode}.mourn")
    assert mourned["key"] is None
    with pytest.raises(ZeroDivisionError):
        failed.get(timeout=TIMEOUT_S)


def test_chain_that_ends_with_a_group_answers_for_each(tasks, journal):
    """At the end of a chain every member answers as in a group."""
    last = chain(tasks.step.s(0), group(tasks.step.s(), tasks.step.s())).delay()
    answers(journal, last.results)


def test_chain_in_a_group_runs_every_step(tasks, journal):
    """Of a group of chains every first step runs; a last step runs, or is skipped with until_done."""
    chains = group(chain(tasks.step.s(0), tasks.step.s()) for _ in range(3)).delay()
    values = answers(journal, chains.results)
    assert answers(journal, [last.parent for last in chains.results]) == [1, 1, 1]
    if tasks.mode == "until_started":
        assert values == [2, 2, 2]


# Calls from inside, and of members


def test_call_of_itself_from_inside(tasks, journal):
    """With until_started a body may publish its own key, to run after it; with until_done it gets itself."""
    first = tasks.repeating.delay(2)
    answer = first.get(timeout=TIMEOUT_S)
    if tasks.mode == "until_done":
        assert answer == {"id": first.id, "deduplicated": True}
        assert len(bodies(journal)) == 1
    else:
        second = tasks.repeating.AsyncResult(answer["id"]).get(timeout=TIMEOUT_S)
        assert not answer["deduplicated"]
        assert tasks.repeating.AsyncResult(second["id"]).get(timeout=TIMEOUT_S) == "done"
        assert len(bodies(journal)) == 3


def test_canvas_of_its_own_key_from_inside(tasks, app, journal, gates):
    """A chain, a group and a chord that a body of the same key publishes are published, and wait for it."""
    first = tasks.starting.delay("inside")
    journal.wait_for("conflict", count=3)
    gates("inside")
    steps, numbers, *members = map(app.app.AsyncResult, first.get(timeout=TIMEOUT_S))
    # A last step answers as a member of a group does: with until_done it is skipped if it meets another.
    (last,) = answers(journal, [steps])
    assert last == 3 or (is_skipped(last) and tasks.mode == "until_done")
    assert numbers.get(timeout=TIMEOUT_S) == 6
    answers(journal, members)


def test_call_equal_to_a_running_member(tasks, journal, gates):
    """With until_done a call is a duplicate of a running member, with until_started it runs after it."""
    result = chord([tasks.step.si(0, gate="member"), tasks.step.si(1, "other")], tasks.collect.s()).delay()
    member = journal.reached("start", result.parent.results[0])
    call = tasks.step.delay(7)
    assert call.deduplicated == (tasks.mode == "until_done")
    assert (call.id == member.id) == call.deduplicated
    gates("member")
    assert call.get(timeout=TIMEOUT_S) == (1 if call.deduplicated else 8)
    assert result.get(timeout=TIMEOUT_S) == [1, 2]


def test_call_equal_to_a_queued_member(tasks, app, journal, later):
    """A member is not marked while it is queued, so an equal call is published, and is marked itself."""
    members = group(tasks.step.si(n).set(queue=app.LATER) for n in range(2)).delay().results
    call = tasks.step.delay(7)
    again = tasks.step.delay(7)
    assert not call.deduplicated
    assert call.get(timeout=TIMEOUT_S) == 8
    assert again.get(timeout=TIMEOUT_S) == 8
    later()
    answers(journal, members)


def test_call_equal_to_a_queued_successor(tasks, app, journal, later):
    """What replaces a task is not marked while it is queued, so an equal call is published and runs."""
    first = journal.reached("released", tasks.replacing.delay(tasks.step.si(0).set(queue=app.LATER)))
    call = tasks.step.delay(7)
    assert not call.deduplicated
    assert call.get(timeout=TIMEOUT_S) == 8
    later()
    assert first.get(timeout=TIMEOUT_S) == 1


def test_retrying_member_beside_a_queued_call_reports_no_lapse(tasks, journal, queued):
    """A member was never marked, so its retry misses no mark."""
    assert tasks.step.apply_async((0,), {"failures": 1}, task_id=uuid()).get(timeout=TIMEOUT_S) == 1
    assert journal.entries(what="lapsed") == []
