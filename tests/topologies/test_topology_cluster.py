"""Locks on a Redis Cluster."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_setnx import LockUnavailable, SetnxLock
from celery_setnx.connection import client_for
from celery_setnx.keeper import Keeper
from celery_setnx.keys import mark_name, record_name
from celery_setnx.marks import Mark, extend_all, free_all, mark_all
from tests.harness import wait_until
from tests.topologies.contract import each_key_runs_once, runs_under_its_lock
from tests.topologies.servers import Cluster, Server

PROCESSES, TIMES, MOVES = 4, 150, 20


@pytest.fixture
def settings(cluster) -> Iterator[dict[str, Any]]:
    """Locks on the empty cluster; afterwards every key of ours must have a TTL."""
    for node in cluster.nodes:
        node.ask("FLUSHALL")
    yield {"setnx_url": cluster.url()}
    for node in cluster.nodes:
        client = node.client()
        assert not [key for key in client.scan_iter("t:*") if client.pttl(key) == -1]


@pytest.fixture
def client(tasks_of, settings) -> Any:
    """The client that the app's locks have."""
    return client_for(tasks_of(**settings).app)


def test_tasks_are_locked_on_the_cluster(work_with, settings, cluster, journal, gates, name):
    """setnx_url=redis+cluster://..., a plain broker: locked, looked at, deduplicated, renewed, released."""

    def exists(*keys: str) -> int:
        return cluster.owner(cluster.slot(keys[0])).ask("EXISTS", *keys)

    runs_under_its_lock(work_with(**settings), journal, gates, name, exists)


def test_fan_out_over_the_cluster_sends_each_key_once(work_with, settings, cluster, journal):
    """300 calls of 100 keys in one batch, on every node: 100 bodies, and no mark is left."""
    each_key_runs_once(work_with(concurrency=4, **settings), journal, 100)
    for node in cluster.nodes:
        wait_until(lambda n=node: not list(n.client().scan_iter("t:*:queued")), "no mark")
        assert list(node.client().scan_iter("t:*:holder"))


def test_lock_lives_and_ends_on_the_cluster(client):
    """acquire, held, renew, hold, resume, take over, release."""
    lock = SetnxLock(client, "t:{life}", lease=5)
    held = lock.acquire(token="id|0|aa").lock
    assert lock.acquire().holder.token == "id|0|aa"
    held.renew()
    assert held.hold(30) == "held_for_retry"
    again = lock.acquire(token="id|1|bb").lock
    assert again.fence == held.fence
    taken = lock.acquire(dead="id|1|bb")
    assert taken.taken_over_from.token == "id|1|bb"
    assert taken.lock.fence > held.fence
    assert again.release() == "lost"
    assert taken.lock.release() == taken.lock.release() == "released"


def test_marks_of_many_slots_are_set_in_one_go(client):
    """Marked, found, extended and freed, the keys on all nodes."""
    marks = [Mark(f"t:{{mark:{number}}}", f"id{number}") for number in range(50)]
    found = mark_all(client, marks, dedupe="until_done", lease=10)
    assert {mark.state for mark in found} == {"marked"}
    others = [Mark(mark.key, "other") for mark in marks]
    again = mark_all(client, others, dedupe="until_done", lease=10)
    assert [mark.task_id for mark in again] == [mark.task_id for mark in marks]
    assert extend_all(client, marks, [20.0] * len(marks)) is None
    assert all(client.pttl(mark.name) > 10_000 for mark in marks)
    assert free_all(client, marks) is None
    assert not any(client.exists(mark.name) for mark in marks)


def test_keeper_renews_locks_of_many_slots(client):
    """Thirty locks on three nodes stay ours for more than two leases."""
    keeper, lost, lease = Keeper(time.monotonic), [], 4
    locks = [SetnxLock(client, f"t:{{keep:{number}}}", lease=lease).acquire().lock for number in range(30)]
    for lock in locks:
        keeper.watch(lock, lambda *of: lost.append(of))
    until = time.monotonic() + 2.5 * lease
    wait_until(lambda: lost or time.monotonic() > until, "two leases and a half")
    for lock in locks:
        lock.ensure()
        assert keeper.forget(lock)
        assert lock.release() == "released"
    assert lost == []


@pytest.mark.parametrize(
    "scope", ["plain", "with space", "a:b", "ünï→✓", "new\nline", "*?[x]", "%s", "'\"\\"]
)
def test_keys_of_a_lock_share_a_slot(tasks_of, settings, cluster, scope):
    """Lock, record and mark, whatever the scope, the arguments and the prefix look like."""
    tasks = tasks_of(**settings, setnx_prefix="pre fix:é")
    for options in ({"scope": scope}, {"scope": scope, "key": ()}):
        key = tasks.once._guard.under(options).key(("x",), {}, {})
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


def test_nothing_is_lost_while_a_slot_moves(settings, cluster, tmp_path, note):
    """Processes increment under a lock whose slot goes to and fro: no overlap, no error, rising fences."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    lock = "t:{moving}"
    about = {"url": cluster.url(), "lock": lock, "counter": str(counter), "times": TIMES}
    command = [sys.executable, "-m", "tests.topologies.incrementer", json.dumps(about)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    try:
        wait_until(lambda: int(counter.read_text() or 0) > 0, "the first increment")
        slot = cluster.slot(lock)
        home = cluster.owner(slot)
        away = next(node for node in cluster.nodes if node is not home)
        moves = keys = 0
        while any(process.poll() is None for process in processes) and moves < 400:
            keys += cluster.move(slot, home if cluster.owner(slot) is away else away)
            moves += 1
        results = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        if cluster.owner(slot) is not home:
            cluster.move(slot, home)
    answers: dict[str, int] = {}
    for result in results:
        for answer, count in result["answers"].items():
            answers[answer] = answers.get(answer, 0) + count
    note(f"cluster: {PROCESSES * TIMES} increments, {moves} moves of the slot with {keys} keys; {answers}")
    assert [process.returncode for process in processes] == [0] * PROCESSES
    assert int(counter.read_text()) == PROCESSES * TIMES
    fences = [fence for result in results for fence in result["fences"]]
    assert len(set(fences)) == len(fences)
    assert all(result["fences"] == sorted(result["fences"]) for result in results)
    assert moves >= MOVES
    assert "lost" not in answers
    assert "gone" not in answers


@pytest.fixture
def fail(cluster) -> Iterator[Callable[..., None]]:
    """Kills nodes, or freezes them; they are well again afterwards."""
    failed: list[tuple[Server, str]] = []

    def fail(how: str, *nodes: Server) -> None:
        for node in nodes:
            failed.append((node, how))
            node.kill() if how == "kill" else node.freeze()

    yield fail
    for node, how in failed:
        if how == "freeze":
            node.thaw()
        elif not node.is_running:
            node.start()
    cluster.wait_until_whole()


def name_on(tasks: Any, cluster: Cluster, node: Server) -> str:
    """An argument whose lock the node serves."""
    return next(f"n{n}" for n in range(1000) if cluster.serves(node, tasks.work.lock_key(f"n{n}")))


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_locks_of_a_dead_node_are_unavailable_soon_and_others_go_on(client, cluster, fail, note, how):
    """LockUnavailable within seconds, at once and later; locks of other nodes are served all the while."""
    on_dead = cluster.key_on(cluster.nodes[2], lambda n: f"t:{{dead:{n}}}")
    on_living = cluster.key_on(cluster.nodes[0], lambda n: f"t:{{living:{n}}}")
    held = SetnxLock(client, on_dead, lease=60).acquire().lock
    other = SetnxLock(client, on_living, lease=60).acquire().lock
    fail(how, cluster.nodes[2])
    attempts = [SetnxLock(client, on_dead).acquire, held.renew, SetnxLock(client, on_dead).holder]
    times = []
    for attempt in attempts if how == "kill" else attempts[:1]:
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
    for mark, outcome in zip(marks, found):
        if cluster.serves(cluster.nodes[2], mark.key):
            assert isinstance(outcome, LockUnavailable)
        else:
            assert outcome.state == "marked"


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_locks_of_living_nodes_are_renewed_while_one_is_dead(client, cluster, fail, how):
    """One keeper, locks on all nodes: only those of the dead node are lost."""
    lease = 6.0 if how == "kill" else 15.0  # what does not answer is waited for
    keeper, lost = Keeper(time.monotonic), set()
    locks = [SetnxLock(client, f"t:{{live:{n}}}", lease=lease).acquire().lock for n in range(12)]
    dead = {lock.key for lock in locks if cluster.serves(cluster.nodes[2], lock.key)}
    for lock in locks:
        keeper.watch(lock, lambda held, _reason: lost.add(held.key))
    assert 0 < len(dead) < len(locks)
    fail(how, cluster.nodes[2])
    wait_until(lambda: lost >= dead, "the dead node's locks are lost", 2 * lease)
    living = [lock for lock in locks if lock.key not in dead]
    for lock in living:
        lock.ensure()
        assert keeper.forget(lock)
        assert lock.release() == "released"
    assert lost == dead


def test_worker_outlives_a_dead_node(work_with, settings, cluster, fail, journal):
    """Calls of its keys wait for it, the others run; when it is back they are done."""
    tasks = work_with(**settings)
    dead = cluster.nodes[2]
    on_dead, on_living = (name_on(tasks, cluster, node) for node in (dead, cluster.nodes[0]))
    assert tasks.work.delay(on_dead).get(timeout=10) == on_dead
    fail("kill", dead)
    waiting = tasks.work.delay(on_dead)
    assert tasks.work.delay(on_living).get(timeout=10) == on_living
    assert not waiting.ready()
    dead.start()
    cluster.wait_until_whole()
    assert waiting.get(timeout=30) == on_dead


def test_worker_outlives_its_whole_cluster(work_with, settings, cluster, fail):
    """No node answers: a call waits for them, and is done when they are back."""
    tasks = work_with(**settings)
    assert tasks.work.delay("before").get(timeout=10) == "before"
    fail("kill", *cluster.nodes)
    waiting = tasks.work.delay("meanwhile")
    tasks.worker.wait_for_log(waiting.id)
    assert not waiting.ready()
    for node in cluster.nodes:
        node.start()
    assert waiting.get(timeout=30) == "meanwhile"


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
    assert tasks.work.delay(name).get(timeout=10) == name


def test_cluster_that_cannot_be_reached_is_unavailable(tasks_of):
    """No node answers: the error of any unreachable Redis, at the first use and at a publish."""
    tasks = tasks_of(setnx_url="redis+cluster://127.0.0.1:1")
    with pytest.raises(LockUnavailable):
        tasks.work.locked("a")


def test_call_is_published_while_the_cluster_cannot_be_reached(tasks_of, journal):
    """Publishing goes on, because the run is guarded."""
    tasks = tasks_of(setnx_url="redis+cluster://127.0.0.1:1", task_default_queue="topologies-nowhere")
    assert not tasks.once.delay("a").deduplicated


def test_worker_starts_without_its_cluster(work_with):
    """A warning, no refusal, as with any lock server that is down."""
    tasks = work_with(setnx_url="redis+cluster://127.0.0.1:1")
    tasks.worker.wait_for_log("Until it answers, tasks do as their on_redis_error says")


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
        assert not [key for key in node.client().scan_iter("t:*") if key.endswith("}")]
