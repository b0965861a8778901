"""Locks on a Redis Cluster."""

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_setnx import LockUnavailable, SetnxLock
from celery_setnx.arguments import Arguments
from celery_setnx.connection import client_for
from celery_setnx.lock.keeper import Keeper
from celery_setnx.lock.line import claim, note_due, settle
from celery_setnx.lock.marks import Mark, done_by, extend_all, free_all, mark_all
from celery_setnx.lock.names import due_names, mark_name, record_name
from celery_setnx.lock.survey import forget_starts, survey
from celery_setnx.lock.wire import hang_up
from tests.harness import wait_until
from tests.topologies.contract import each_key_runs_once, lock_lives_and_ends, runs_under_its_lock
from tests.topologies.servers import Cluster, Server

PROCESSES, TIMES, MOVES = 4, 150, 20
NOWHERE = "redis+cluster://127.0.0.1:1"


def test_tasks_are_locked_on_the_cluster(work_with, settings, client, journal, gates, name):
    """setnx_url=redis+cluster://..., a plain broker: locked, looked at, deduplicated, renewed, released."""
    runs_under_its_lock(work_with(**settings), journal, gates, name, client.exists)


def test_fan_out_over_the_cluster_sends_each_key_once(work_with, settings, cluster, journal):
    """300 calls of 100 keys in one batch, on every node: 100 bodies, and no mark is left."""
    each_key_runs_once(work_with(concurrency=4, **settings), journal, 100)
    for node in cluster.nodes:
        assert list(node.client().scan_iter("t:*:holder"))


def test_lock_lives_and_ends_on_the_cluster(client):
    """acquire, held, renew, hold, look, resume, take over, release."""
    lock_lives_and_ends(client)


def test_marks_of_many_slots_are_set_in_one_go(client):
    """Marked, found, extended and freed, the keys on all nodes."""
    marks = [Mark(f"t:{{mark:{number}}}", f"id{number}") for number in range(50)]
    assert {mark.state for mark in mark_all(client, marks, dedupe="until_done", lease=10)} == {"marked"}
    again = mark_all(client, [Mark(mark.key, "other") for mark in marks], dedupe="until_done", lease=10)
    assert [mark.task_id for mark in again] == [mark.task_id for mark in marks]
    assert extend_all(client, marks, [20.0] * len(marks)) is None
    assert all(client.pttl(mark.name) > 10_000 for mark in marks)
    assert free_all(client, marks) is None
    assert not any(client.exists(mark.name) for mark in marks)


def test_pace_is_kept_on_the_cluster(client):
    """Starts on all nodes are counted, seen, taken back and forgotten."""
    keys = {f"t:{{paced:{number:032x}}}" for number in range(20)}
    for key in keys:
        lock = SetnxLock(client, key, rate=(2, 60))
        lock.acquire().lock.release()
        held = lock.acquire().lock
        held.take_start_back()
        held.release()
        assert lock.acquire().lock.release() == "released"
        assert lock.acquire().paced
    seen = {sighting.key: sighting for sighting in survey(client, "t")}
    assert {key for key, one in seen.items() if one.is_paced and one.started == 2} == keys
    for key in keys:
        assert forget_starts(client, seen[key]) == 2
        assert SetnxLock(client, key, rate=(2, 60)).acquire().lock.release() == "released"


def test_lines_of_many_tasks_are_swept_on_the_cluster(client, cluster):
    """One script for each of 16 slots, on all nodes; each line is claimed once, and settled where it is."""
    tasks, lines = [f"task{number}" for number in range(100)], "t:lines:0"
    epochs = {task: note_due(client, lines, task, f"t:{{{task}}}", within=0.0).epoch for task in tasks}
    assert len(set(epochs.values())) == 16
    assert all(list(node.client().scan_iter(f"{lines}:*")) for node in cluster.nodes)
    claimed = claim(client, lines, tasks, tasks[:50])
    assert sorted(claimed.lines) == sorted((task, f"t:{{{task}}}") for task in tasks)
    assert {task: slot.epoch for task, slot in claimed.slots.items()} == epochs
    assert claim(client, lines, tasks).lines == []
    for task, key in claimed.lines:
        assert settle(client, lines, task, key, claimed, within=None) is None
    assert not any(client.exists(due_names(lines, task, in_cluster=True)[0]) for task in tasks)


def test_dead_node_does_not_keep_lines_of_others_from_being_swept(client, cluster, fail):
    """Theirs are found; that not all were looked at is said."""
    tasks, lines = [f"task{number}" for number in range(100)], "t:lines:0"
    for task in tasks:
        note_due(client, lines, task, f"t:{{{task}}}", within=0.0)
    node = cluster.nodes[1]
    gone = {task for task in tasks if cluster.serves(node, due_names(lines, task, in_cluster=True)[0])}
    assert 0 < len(gone) < 100
    fail("kill", node)
    claimed = claim(client, lines, tasks)
    assert {task for task, _ in claimed.lines} == set(tasks) - gone == set(claimed.slots)
    assert isinstance(claimed.error, LockUnavailable)


def test_success_is_found_on_the_cluster(client):
    """By who asks under its lock."""
    held = SetnxLock(client, "t:{done:1}", line=True).acquire(token="id|0|ab").lock
    held.release(done_for=60)
    assert done_by(client, "t:{done:1}") == "id"
    assert done_by(client, "t:{done:2}") is None


@pytest.mark.parametrize(
    "scope", ["plain", "with space", "a:b", "ünï→✓", "new\nline", "*?[x]", "%s", "'\"\\"]
)
def test_keys_of_a_lock_share_a_slot(tasks_of, settings, cluster, scope):
    """Lock, record and mark, whatever the scope, the arguments and the prefix look like."""
    tasks = tasks_of(**settings, setnx_prefix="pre fix:é")
    for options in ({"scope": scope}, {"scope": scope, "key": ()}):
        key = tasks.once._guard.under(options).key(Arguments(("x",), {}), {})
        assert len({cluster.slot(name) for name in (key, record_name(key), mark_name(key))}) == 1
        with SetnxLock(client_for(tasks.app), key, mark=mark_name(key)):
            pass


@pytest.mark.parametrize("name", ["lock.foo", "{tag}rest", "a{tag}b", "a{b", "lock foo→"])
def test_keys_of_a_named_lock_share_a_slot(client, cluster, name):
    """A lock that the user has named."""
    assert cluster.slot(name) == cluster.slot(record_name(name))
    with SetnxLock(client, name):
        pass
    client.delete(name, record_name(name))


def increment(url: str, name: str, file: Path, enough: Path) -> tuple[Counter[str], list[int]]:
    """Increment an unprotected number under a lock, until there is a file: what the lock answered how often,
    and the fences."""
    app = Celery("incrementer", set_as_current=False)
    app.conf.update(setnx_url=url)
    lock, answers, fences = SetnxLock(client_for(app), name, lease=5), Counter[str](), []
    while len(fences) < TIMES or not enough.exists():
        try:
            held = lock.acquire(wait=10).lock
        except LockUnavailable as error:
            answers[f"unavailable: {error.reason[:60]}"] += 1
            continue
        if held is None:
            answers["held"] += 1
            continue
        number = int(file.read_text())
        held.ensure()
        file.write_text(str(number + 1))
        fences.append(held.fence)
        try:
            answers[held.release()] += 1
        except LockUnavailable as error:
            answers[f"not released: {error.reason[:60]}"] += 1
    return answers, fences


def test_nothing_is_lost_while_a_slot_moves(settings, cluster, tmp_path, note):
    """Processes increment under a lock whose slot goes to and fro: no overlap, no error, rising fences."""
    (counter := tmp_path / "counter").write_text("0")
    enough = tmp_path / "enough"
    lock = "t:{moving}"
    slot = cluster.slot(lock)
    home = cluster.owner(slot)
    away = next(node for node in cluster.nodes if node is not home)
    moves = keys = 0
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        running = [pool.submit(increment, cluster.url(), lock, counter, enough) for _ in range(PROCESSES)]
        try:
            wait_until(lambda: int(counter.read_text() or 0) > 0, "the first increment")
            while not all(future.done() for future in running) and moves < 400:
                keys += cluster.move(slot, home if cluster.owner(slot) is away else away)
                moves += 1
                if moves == MOVES:
                    enough.touch()
        finally:
            enough.touch()
        results = [future.result(60) for future in running]
    answers = sum((answers for answers, _fences in results), Counter[str]())
    fences = [fence for _answers, fences in results for fence in fences]
    note(f"cluster: {len(fences)} increments, {moves} moves of the slot with {keys} keys; {answers}")
    assert int(counter.read_text()) == len(fences)
    assert len(set(fences)) == len(fences)
    assert all(fences == sorted(fences) for _answers, fences in results)
    assert moves >= MOVES
    assert not {"lost", "gone"} & set(answers)


@pytest.fixture
def fail(cluster) -> Iterator[Callable[..., None]]:
    """Kills nodes, or freezes them; they are well again afterwards."""

    def fail(how: str, *nodes: Server) -> None:
        for node in nodes:
            getattr(node, how)()

    yield fail
    for node in cluster.nodes:
        node.recover()
    cluster.wait_until_whole()


def name_on(tasks: Any, cluster: Cluster, node: Server) -> str:
    """An argument whose lock the node serves."""
    return next(f"n{n}" for n in range(1000) if cluster.serves(node, tasks.work.lock_key(f"n{n}")))


@pytest.mark.clock
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_locks_of_a_dead_node_are_unavailable_soon_and_others_go_on(client, cluster, fail, note, how):
    """LockUnavailable within seconds, at once and later; locks of other nodes are served all the while."""
    keys = [f"t:{{dead:{n}}}" for n in range(1000)]
    lock, other = (
        SetnxLock(client, next(key for key in keys if cluster.serves(node, key)), lease=60)
        for node in (cluster.nodes[2], cluster.nodes[0])
    )
    held, other = lock.acquire().lock, other.acquire().lock
    fail(how, cluster.nodes[2])
    times = []
    for attempt in [lock.acquire, held.renew, lock.holder] if how == "kill" else [lock.acquire]:
        began = time.monotonic()
        with pytest.raises(LockUnavailable):
            attempt()
        times.append(time.monotonic() - began)
        other.renew()
    note(f"cluster: {how} of a node: its locks are unavailable within {max(times):.1f} s")
    assert max(times) < 9
    assert held.remaining_s() > 0
    assert other.release() == "released"


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_dead_node_does_not_fail_the_marks_of_others(client, cluster, fail, how):
    """One batch for all nodes: what the living ones have is marked."""
    marks = [Mark(f"t:{{batch:{n}}}", f"id{n}") for n in range(20)]
    assert not [m for m in mark_all(client, marks, dedupe="until_done", lease=30) if m.state != "marked"]
    fail(how, cluster.nodes[2])
    found = mark_all(client, marks, dedupe="until_done", lease=30)
    on_dead = [cluster.serves(cluster.nodes[2], mark.key) for mark in marks]
    assert [isinstance(outcome, LockUnavailable) for outcome in found] == on_dead
    assert {outcome.state for outcome, is_dead in zip(found, on_dead) if not is_dead} == {"marked"}


@pytest.mark.parametrize(("how", "lease"), [("kill", 6.0), ("freeze", 15.0)])
def test_locks_of_living_nodes_are_renewed(client, cluster, fail, how, lease):
    """One keeper, locks on all nodes: those of a dead node are lost, which is waited for if it is silent."""
    keeper, lost = Keeper(time.monotonic), set()
    locks = [SetnxLock(client, f"t:{{live:{n}}}", lease=lease).acquire().lock for n in range(30)]
    dead = {lock.key for lock in locks if cluster.serves(cluster.nodes[2], lock.key)}
    for lock in locks:
        keeper.watch(lock, lambda held, _reason: lost.add(held.key))
    assert 0 < len(dead) < len(locks)
    until = time.monotonic() + 10
    fail(how, cluster.nodes[2])
    wait_until(lambda: lost >= dead, "the dead node's locks are lost", 2 * lease)
    wait_until(lambda: time.monotonic() > until, "ten seconds")
    for lock in locks:
        if lock.key not in dead:
            lock.ensure()
            assert keeper.forget(lock)
            assert lock.release() == "released"
    assert lost == dead


@pytest.mark.parametrize("dead", [[2], [0, 1, 2]], ids=["one", "all"])
def test_worker_outlives_dead_nodes(work_with, settings, cluster, fail, dead):
    """A call whose keys they have waits for them, others run; it is done when they are back."""
    tasks = work_with(**settings)
    nodes = [cluster.nodes[number] for number in dead]
    on_dead, on_living = (name_on(tasks, cluster, node) for node in (nodes[0], cluster.nodes[0]))
    assert tasks.work.delay(on_dead).get(timeout=60) == on_dead
    fail("kill", *nodes)
    waiting = tasks.work.delay(on_dead)
    tasks.worker.wait_for_log(waiting.id)
    if cluster.nodes[0].is_running:
        assert tasks.work.delay(on_living).get(timeout=60) == on_living
    assert not waiting.ready()
    for node in nodes:
        node.start()
    cluster.wait_until_whole()
    assert waiting.get(timeout=60) == on_dead


def test_cluster_that_goes_away_is_unavailable(client, cluster, fail):
    """The error of any unreachable Redis from every verb, and the same client serves again afterwards."""
    held = SetnxLock(client, "t:{away}", lease=60).acquire().lock
    fail("kill", *cluster.nodes)
    for verb in (held.renew, held.release, SetnxLock(client, "t:{away}").acquire):
        with pytest.raises(LockUnavailable):
            verb()
    (mark,) = mark_all(client, [Mark("t:{away}", "id")], dedupe="until_done", lease=5)
    assert isinstance(mark, LockUnavailable)
    for node in cluster.nodes:
        node.start()
    cluster.wait_until_whole()
    assert SetnxLock(client, "t:{away}").acquire().lock.release() == "released"


def test_worker_starts_while_a_node_is_dead(work_with, settings, fail, cluster):
    """The other nodes name the slots, and the worker serves what they have."""
    fail("kill", cluster.nodes[2])
    tasks = work_with(**settings)
    name = name_on(tasks, cluster, cluster.nodes[0])
    assert tasks.work.delay(name).get(timeout=60) == name


def test_cluster_that_cannot_be_reached_is_unavailable(tasks_of):
    """The error of any unreachable Redis; but publishing goes on, because the run is guarded."""
    tasks = tasks_of(setnx_url=NOWHERE, task_default_queue="topologies-nowhere")
    with pytest.raises(LockUnavailable):
        tasks.work.locked("a")
    assert not tasks.once.delay("a").deduplicated


def test_worker_starts_without_its_cluster(work_with):
    """A warning, no refusal, as with any lock server that is down."""
    worker = work_with(setnx_url=NOWHERE).worker
    worker.wait_for_log("Until it answers, tasks do as their on_redis_error says")


def test_connections_to_all_nodes_are_closed_after_the_check(tasks_of, settings, cluster):
    """A parent of processes does not use them again; if it does, it connects again."""
    client = client_for(tasks_of(**settings, setnx_transport_options={"client_name": "check"}).app)

    def connections() -> int:
        return sum(each["name"] == "check" for node in cluster.nodes for each in node.client().client_list())

    marks = [Mark(f"t:{{mark:{number}}}", f"id{number}") for number in range(50)]
    mark_all(client, marks, dedupe="until_done", lease=10)
    client.info("memory", target_nodes="primaries")
    assert connections() >= 3
    hang_up(client)
    wait_until(lambda: connections() == 0, "all are closed", 10)
    assert free_all(client, marks) is None


def test_worker_start_warns_of_a_node_that_evicts(work_with, settings, cluster):
    """One node of three is enough."""
    node = cluster.nodes[1]
    node.ask("CONFIG", "SET", "maxmemory", "50mb", "maxmemory-policy", "allkeys-lru")
    try:
        log = work_with(**settings).worker.wait_for_log("maxmemory-policy")
    finally:
        node.ask("CONFIG", "SET", "maxmemory", "0", "maxmemory-policy", "noeviction")
    assert log.count("maxmemory-policy allkeys-lru") == 1


def test_worker_starts_in_silence_on_a_good_cluster(work_with, settings, cluster):
    """No warning of ours, and the check leaves no lock behind."""
    log = work_with(**settings).worker.log_text()
    assert "lock server" not in log
    assert "Redis" not in log
    for node in cluster.nodes:
        assert not list(node.client().scan_iter("t:{*}"))  # its lines may be known by then
