"""The keeper: what is renewed, when it stops, and how a loss is told."""

import os
import signal
import threading
import time
from typing import Any

import pytest
import redis

from celery_setnx import SetnxLock
from celery_setnx.keeper import Keeper, keeper_for_process
from examples.embedded import EmbeddedServer
from tests.harness import wait_until


@pytest.fixture
def losses() -> list[tuple[str, str]]:
    """Key and reason of every loss that was told."""
    return []


@pytest.fixture
def tell(losses) -> Any:
    """The `on_lost` of the tests."""
    return lambda held, reason: losses.append((held.key, reason))


def held(client: redis.Redis, name: str, lease: float = 1.0) -> Any:
    return SetnxLock(client, name, lease=lease).acquire().lock


def renewals(client: redis.Redis) -> int:
    """How many scripts the server has run."""
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "eval"))


def test_watched_lock_outlives_its_lease(locks, losses, tell):
    """Many leases later it is still ours; forgotten, it ends."""
    keeper = Keeper(time.monotonic)
    lock = held(locks, "a")
    keeper.watch(lock, tell)
    give_up = time.monotonic() + 3
    while time.monotonic() < give_up:
        assert not SetnxLock(locks, "a").acquire().acquired
    assert keeper.forget(lock)
    wait_until(lambda: SetnxLock(locks, "a").acquire().acquired, "the lease ends")
    assert losses == []


def test_many_locks_are_renewed_in_few_round_trips(locks, tell):
    """All that are due go in one pipeline: connections and packets do not grow with the locks."""
    keeper = Keeper(time.monotonic)
    many = [held(locks, f"lock-{n}", lease=2) for n in range(200)]
    for lock in many:
        keeper.watch(lock, tell)
    locks.config_resetstat()
    wait_until(lambda: renewals(locks) >= 200, "all are renewed")
    wait_until(lambda: all(lock.remaining_s() > 1 for lock in many), "their replies are read")
    for lock in many:
        keeper.forget(lock)
        lock.release()


def test_short_locks_cost_no_renewal(tell):
    """A lock that is released before a third of its lease is never renewed."""
    keeper = Keeper(time.monotonic)
    # A server of its own: on the shared one others run scripts as well.
    with EmbeddedServer() as server, redis.Redis.from_url(server.url()) as own:
        held(own, "first").release()  # from now on the server knows the scripts
        own.config_resetstat()
        for _ in range(20):
            lock = held(own, "short", lease=30)
            keeper.watch(lock, tell)
            keeper.forget(lock)
            lock.release()
        assert renewals(own) == 40


def test_vanished_lock_is_told_once(locks, losses, tell):
    """The loss is told once, and the lock is watched no more."""
    keeper = Keeper(time.monotonic)
    lock = held(locks, "a")
    keeper.watch(lock, tell)
    locks.delete("a")
    wait_until(lambda: losses, "told")
    assert not keeper.forget(lock)
    assert losses == [("a", "its key has vanished from Redis (deleted, evicted, or the data was lost)")]
    assert lock.lost == losses[0][1]


def impatient(server: EmbeddedServer) -> redis.Redis:
    """A client that soon finds out that the server does not answer."""
    return redis.Redis(port=server.port, socket_timeout=0.3, socket_connect_timeout=0.3, retry=None)


def test_dead_server_is_a_loss_at_the_deadline(losses, tell, caplog):
    """Without an answer for a whole lease the lock is lost; the trouble is logged once."""
    keeper = Keeper(time.monotonic)
    with EmbeddedServer() as server:
        lock = held(impatient(server), "a", lease=2)
        server.stop()
        keeper.watch(lock, tell)
        wait_until(lambda: losses, "the lease ends")
        assert losses == [("a", "Redis could not be reached for a whole lease of 2 s")]
        assert caplog.text.count("renewing goes on") == 1


def test_server_that_answers_again_in_time_saves_the_lock(losses, tell, caplog):
    """A failed renewal is no loss: it is tried again while the lease lasts."""
    keeper = Keeper(time.monotonic)
    with EmbeddedServer() as server:
        lock = held(impatient(server), "a", lease=3)
        os.kill(server.pid, signal.SIGSTOP)
        keeper.watch(lock, tell)
        wait_until(lambda: "renewing goes on" in caplog.text, "a renewal fails")
        assert 0 < lock.remaining_s() < 2.5
        os.kill(server.pid, signal.SIGCONT)
        wait_until(lambda: lock.remaining_s() > 2.5, "a renewal succeeds")
        assert losses == []
        keeper.forget(lock)


def test_at_most_for_lets_the_lease_run_out(locks, losses, tell):
    """Renewal stops after at_most_for, and the end of the lease is told."""
    keeper = Keeper(time.monotonic)
    before = time.monotonic()
    keeper.watch(held(locks, "a"), tell, at_most_for=0.5)
    wait_until(lambda: losses, "told")
    assert losses[0][1] == "its at_most_for is over, and its lease has ended"
    assert 0.5 <= time.monotonic() - before < 10


def test_failing_listener_does_not_stop_the_keeper(locks, caplog):
    """An error in on_lost is logged; other locks are renewed all the same."""

    def failing(_held: Any, _reason: str) -> None:
        raise ZeroDivisionError

    keeper = Keeper(time.monotonic)
    doomed, kept = held(locks, "doomed"), held(locks, "kept")
    keeper.watch(doomed, failing)
    keeper.watch(kept, failing)
    locks.delete("doomed")
    wait_until(lambda: "told of the loss of doomed failed" in caplog.text, "logged")
    give_up = time.monotonic() + 3
    while time.monotonic() < give_up:
        assert not SetnxLock(locks, "kept").acquire().acquired
    keeper.forget(kept)


def test_idle_keeper_wakes_for_a_new_lock(locks, losses, tell):
    """A keeper that waits for a far renewal wakes earlier for a short lease."""
    keeper = Keeper(time.monotonic)
    far = held(locks, "far", lease=60)
    keeper.watch(far, tell)
    near = held(locks, "near", lease=1)
    keeper.watch(near, tell)
    give_up = time.monotonic() + 3
    while time.monotonic() < give_up:
        assert not SetnxLock(locks, "near").acquire().acquired
    assert losses == []
    keeper.forget(far)
    keeper.forget(near)


def test_stream_of_short_tasks_does_not_wake_an_idle_keeper_for_each(locks, tell, monkeypatch):
    """Locks that are forgotten before the thread looks: a wake-up each would cost as much as they do."""
    sleeps: list[float] = []
    sleep = Keeper._sleep

    def counted(keeper: Keeper, seconds: float) -> float | None:
        sleeps.append(seconds)
        return sleep(keeper, seconds)

    monkeypatch.setattr(Keeper, "_sleep", counted)
    keeper = Keeper(time.monotonic)

    def run(lease: float) -> None:
        lock = held(locks, "short", lease)
        keeper.watch(lock, tell)
        keeper.forget(lock)
        lock.release()

    run(lease=1)
    wait_until(lambda: sleeps[-1:] == [float("inf")], "asleep until it is woken")
    known = len(sleeps)
    for _ in range(1000):
        run(lease=30)
    assert len(sleeps) - known < 500  # one, but for what comes before the thread gets a processor


def test_process_has_one_keeper_and_a_fork_its_own():
    """Threads do not survive a fork, so a child must not inherit the keeper."""
    keeper = keeper_for_process(time.monotonic)
    assert keeper_for_process(time.monotonic) is keeper
    child = os.fork()
    if child == 0:
        os._exit(0 if keeper_for_process(time.monotonic) is not keeper else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_keeper_runs_in_one_daemon_thread(locks, tell):
    """One thread however many locks, and it does not keep the process alive."""
    keeper = Keeper(time.monotonic)
    before = threading.active_count()
    watched = [held(locks, f"n{n}", lease=30) for n in range(5)]
    for lock in watched:
        keeper.watch(lock, tell)
    assert threading.active_count() == before + 1
    assert next(t for t in threading.enumerate() if t.name == "celery_setnx-keeper").daemon
    for lock in watched:
        keeper.forget(lock)


def test_unexpected_error_in_renewing_is_survived(locks, losses, tell, caplog):
    """A client that raises what nobody foresaw: logged, tried again, and the lock is kept."""

    class Faulty:
        """Fails once, then works."""

        failed = False

        def pipeline(self, **options: Any) -> Any:
            if not self.failed:
                self.failed = True
                raise ZeroDivisionError
            return locks.pipeline(**options)

    keeper = Keeper(time.monotonic)
    lock = held(locks, "a")
    lock.client = Faulty()
    keeper.watch(lock, tell)
    give_up = time.monotonic() + 3
    while time.monotonic() < give_up:
        assert not SetnxLock(locks, "a").acquire().acquired
    assert "Renewing 1 leases failed" in caplog.text
    assert losses == []
    keeper.forget(lock)
