"""What is wrong with a deployment: its lock server is asked and tried, then its app is checked."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

import redis
from celery import Celery
from redis.exceptions import RedisError
from redis.utils import str_if_bytes

from celery_setnx.address import masked
from celery_setnx.call.back import visibility_timeout_s
from celery_setnx.connection import broker_write_urls, client_for, lock_url
from celery_setnx.doctor.app import (
    Finding,
    check,
    check_tasks,
    fail,
    guarded_tasks,
    note,
    ok,
    refused,
    warn,
)
from celery_setnx.doctor.broker import courier_findings
from celery_setnx.doctor.holes import open_holes
from celery_setnx.doctor.trial import TRIAL, trial_name, try_lock
from celery_setnx.exceptions import LockLost, LockRefused, LockUnavailable, OptionError
from celery_setnx.lock.live import LiveTerm, live_terms_of, live_terms_of_tasks
from celery_setnx.lock.lock import DAY_S
from celery_setnx.lock.look import Sighting
from celery_setnx.lock.scripts import REDIS_ERRORS, is_cluster, translated
from celery_setnx.lock.survey import BATCH, BEAT, survey
from celery_setnx.options import Settings, settings_of
from celery_setnx.wording import sentence

__all__ = ["Finding", "check", "examine", "refused"]

_OLDEST = {"Redis": (6, 2), "Valkey": (7, 2)}
_NEARLY_FULL = 0.9
_OLD_S = 3600.0  # a run that has taken so long may hang
_TRIES_PER_CLUSTER = 1000  # names, to find one on each node
_CLOCK_S = 1.0  # clocks that are this near each other do no harm


def examine(app: Celery) -> Iterator[Finding]:
    """Examine the lock server, then everything that `check` does; each finding as soon as it is known.

    Writes nothing to it but the keys of its own trials, and deletes those. An AMQP broker is asked for the
    queues in which couriers wait.

    Args:
        app: The app, with its tasks imported.
    """
    yield from _lock_server(app)
    yield from check_tasks(app)
    yield from _redeliveries(app)
    yield from courier_findings(app)


def _lock_server(app: Celery) -> Iterator[Finding]:
    try:
        url, setting = lock_url(app)
        client = client_for(app)
    except (OptionError, ValueError) as error:
        yield fail("connection", sentence(error), "Without a lock server no guarded task can run.")
        return
    where = f"{masked(url)} ({setting})"
    try:
        yield from _shared_with_broker(app, url)
        yield from _servers(client, where)
        with suppress(OptionError):  # check tells what is wrong with the settings
            yield from _locks(client, settings_of(app))
    except REDIS_ERRORS as error:
        yield _no_answer(where, error)


def _servers(client: Any, where: str) -> Iterator[Finding]:
    """What the lock server says of itself; of a cluster, each primary."""
    in_cluster = is_cluster(client)
    for name, server in _each_server(client):
        try:
            yield from _facts(name, server, where, in_cluster=in_cluster)
        except RedisError as error:
            if not in_cluster:
                raise
            yield _no_answer(f"{name} of {where}", error)


def _locks(client: Any, own: Settings) -> Iterator[Finding]:
    """What can be done with locks there, and what there is of them."""
    yield from _permissions(client, own.prefix)
    try:
        yield from _leftovers(client, own)
        yield from _endless_keys(client, own.prefix)
    except redis.ResponseError as error:
        yield warn(
            "commands",
            f"The locks cannot be listed: {sentence(error)}",
            "`celery setnx list`, `watch` and `release --queued` need SCAN, MGET, TYPE, PTTL and ZCOUNT.",
            "Grant these commands to the user that operators use. Tasks do not need them.",
        )


def _each_server(client: Any) -> list[tuple[str, Any]]:
    """Every server that has locks, named, with a client of its own."""
    if not is_cluster(client):
        return [("The lock server", client)]
    return [(f"Node {node.name}", client.get_redis_connection(node)) for node in client.get_primaries()]


def _no_answer(who: str, error: Exception) -> Finding:
    known = translated(who, error)
    said = sentence(known.reason)
    if isinstance(known, LockRefused):
        is_trusted = "CERTIFICATE_VERIFY_FAILED" not in said
        what = f"{who} {'refuses us' if is_trusted else 'is not trusted'}: {said}"
        return fail("connection", what, "No guarded task can run.", known.remedy)
    return fail(
        "connection",
        f"{who} does not answer: {said}",
        "Until it answers, no lock can be acquired there, and tasks do as their on_redis_error says.",
        known.remedy
        or "Check that the server runs, and the host, port and TLS of the setting (rediss://, or redis://).",
    )


def _master(server: Any) -> str:
    """The master that Sentinels name."""
    pool = server.connection_pool
    if not hasattr(pool, "sentinel_manager"):
        return ""
    host, port = pool.get_master_address()
    return f"; the Sentinels name {host}:{port} as master of {pool.service_name}"


def _shared_with_broker(app: Celery, url: str) -> Iterator[Finding]:
    if url in broker_write_urls(app):
        yield note(
            "broker",
            "Locks and the broker's queues share one database.",
            "FLUSHDB frees every lock, and a long backlog fills the memory that locks need.",
            "Give locks their own database or, better, their own server: setnx_url.",
        )


def _facts(name: str, server: Any, where: str, *, in_cluster: bool) -> Iterator[Finding]:
    """What a server says of itself."""
    clock = _asked(partial(clock_of, server))
    took = f" in {clock[0] * 1000:.2f} ms" if clock else ""
    yield ok("connection", f"{name} answers{took}: {where}{_master(server)}.")
    if clock:
        yield _clock(name, *clock)
    info = _asked(server.info)
    if info is None:
        yield warn(
            "server",
            f"{name} forbids INFO.",
            "Its version, eviction policy, memory, persistence and replication are not known.",
            "Grant INFO and CONFIG GET to this user, or run doctor with another user in setnx_url.",
        )
        return
    yield _version(name, info)
    yield from _holes(name, info)
    yield _eviction(name, info)
    yield from _memory(name, info)
    yield from _clients(name, info)
    yield _persistence(name, info, server)
    yield _replication(name, info, server)
    if info.get("cluster_enabled"):
        yield _cluster(name, server, in_cluster=in_cluster)


def _product(info: Mapping[str, Any]) -> tuple[str, str]:
    product = "Valkey" if "valkey_version" in info else "Redis"
    return product, str(info.get(f"{product.lower()}_version", "0"))


def _version(name: str, info: Mapping[str, Any]) -> Finding:
    product, version = _product(info)
    oldest = _OLDEST[product]
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < oldest:
        return fail(
            "server",
            f"{name} is {product} {version}.",
            "The lock's scripts need SET with PXAT and KEEPTTL.",
            f"Upgrade to {product} {oldest[0]}.{oldest[1]} or later.",
        )
    return ok("server", f"{name} is {product} {version}.")


def _holes(name: str, info: Mapping[str, Any]) -> Iterator[Finding]:
    """Known holes in its Lua."""
    product, version = _product(info)
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    for hole in open_holes(product, numbers):
        closed_in = [".".join(map(str, release)) for release in hole.closed_in[product]]
        yield warn(
            "security",
            f"{name} is {product} {version}. Its Lua has known security holes: {hole.names}.",
            hole.why,
            f"Upgrade to {', '.join(closed_in)} or later, unless your distribution or host has patched this "
            "version.",
        )


def _eviction(name: str, info: Mapping[str, Any]) -> Finding:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ok("eviction", f"{name} evicts nothing (maxmemory-policy noeviction).")
    why = "A full server then deletes locks of running tasks, and duplicates run."
    do = "Set maxmemory-policy noeviction, or point setnx_url at a server that has it."
    if info.get("maxmemory"):
        return fail("eviction", f"{name} evicts keys when it is full (maxmemory-policy {policy}).", why, do)
    return warn(
        "eviction", f"{name} would evict keys (maxmemory-policy {policy}) if it had a maxmemory.", why, do
    )


def _memory(name: str, info: Mapping[str, Any]) -> Iterator[Finding]:
    used, most = info.get("used_memory", 0), info.get("maxmemory", 0)
    if most and used > _NEARLY_FULL * most:
        yield warn(
            "memory",
            f"{name} uses {used / most:.0%} of its maxmemory of {most / 2**20:.0f} MiB.",
            "A full server renews and releases locks, but grants no new one.",
            "Raise maxmemory, or give locks their own server: setnx_url.",
        )


def _clients(name: str, info: Mapping[str, Any]) -> Iterator[Finding]:
    known, most = info.get("connected_clients", 0), info.get("maxclients", 0)
    if most and known > _NEARLY_FULL * most:
        yield warn(
            "clients",
            f"{name} has {known} of at most {most} connections (maxclients).",
            "A process that connects when there is no room cannot lock, and does as its on_redis_error says.",
            "Raise maxclients, and its host's limit of open files; see docs/how-it-works.md#connections.",
        )


def _persistence(name: str, info: Mapping[str, Any], server: Any) -> Finding:
    do = "Set appendonly yes and appendfsync everysec; or accept the risk, and let resources check the fence."
    if not info.get("aof_enabled"):
        save = _config(server, "save")
        forgets = "all locks" if save == "" else "the locks since its last snapshot, or all"
        return warn(
            "persistence",
            f"{name} keeps no log of its writes (appendonly no{'' if save is None else f', save {save!r}'}).",
            f"A restart forgets {forgets}, while their holders still run: duplicates may run.",
            do,
        )
    fsync = _config(server, "appendfsync")
    if fsync == "no":
        return warn(
            "persistence",
            f"{name} lets its host decide when to write its log to disk (appendfsync no).",
            "When the host dies, the locks of the last half minute may be forgotten.",
            do,
        )
    return ok(
        "persistence",
        f"{name} logs its writes (appendonly yes, appendfsync {fsync or 'not known'}).",
    )


def _replication(name: str, info: Mapping[str, Any], server: Any) -> Finding:
    if info.get("role") == "slave":
        master = f"{info.get('master_host')}:{info.get('master_port')}"
        return fail(
            "replication",
            f"{name} is a replica of {master}.",
            "A replica refuses locks, or forgets them when it synchronizes.",
            "Point setnx_url at the master, or at the Sentinels that name it.",
        )
    replicas = info.get("connected_slaves", 0)
    if not replicas:
        return ok("replication", f"{name} is a master without replicas.")
    least = _config(server, "min-replicas-to-write")
    what = f"{name} has {replicas} replicas, and min-replicas-to-write {least or 'is not known'}."
    why = "A failover may forget the last locks: two holders may run at once until the first one notices."
    if least == "0":
        return warn(
            "replication",
            what,
            why,
            "Set min-replicas-to-write 1 and min-replicas-max-lag 10, and let resources check the fence.",
        )
    return note("replication", what, why, "Let the protected resources check the fence.")


def _cluster(name: str, server: Any, *, in_cluster: bool) -> Finding:
    if not in_cluster:
        return fail(
            "cluster",
            f"{name} is a node of a cluster, but is used as a single server.",
            "It refuses every lock in a slot of another node.",
            "Use the scheme redis+cluster:// in setnx_url.",
        )
    reply = str(
        _asked(partial(server.execute_command, "CLUSTER INFO")) or "not known: CLUSTER INFO is forbidden"
    )
    if "cluster_state:fail" in reply or "'cluster_state': 'fail'" in reply:
        return fail(
            "cluster",
            f"{name} says that the cluster is down (cluster_state fail).",
            "Locks in slots without a primary cannot be acquired.",
            "Look at CLUSTER NODES, and bring the missing primaries back.",
        )
    return ok("cluster", f"{name} says that the cluster is up.")


def clock_of(server: Any, now: Callable[[], float] = time.time) -> tuple[float, float]:
    """Seconds of a round trip, and by how many the server's clock is ahead of this one: the best of five."""
    best = (float("inf"), 0.0)
    for _ in range(5):
        before = now()
        seconds, microseconds = server.time()
        after = now()
        best = min(best, (after - before, seconds + microseconds / 1e6 - (before + after) / 2))
    return best


def _clock(name: str, round_trip_s: float, ahead_s: float) -> Finding:
    apart = f"{abs(ahead_s):.3f} s {'ahead of' if ahead_s > 0 else 'behind'} this host's"
    what = f"{name}'s clock is {apart} (within {round_trip_s / 2:.3f} s)."
    if abs(ahead_s) - round_trip_s / 2 <= _CLOCK_S:
        return ok("clock", what)
    return warn(
        "clock",
        what,
        "Locks use only the server's clock, but eta, beat and classic clients use their host's.",
        "Run NTP on both.",
    )


def _permissions(client: Any, prefix: str) -> Iterator[Finding]:
    """A trial on each server: on a cluster, each has an ACL of its own."""
    names = [trial_name(prefix)]
    if is_cluster(client):
        many = [trial_name(prefix) for _ in range(_TRIES_PER_CLUSTER)]
        names = list({client.get_node_from_key(name).name: name for name in many}.values())
    failed = False
    for name in names:
        try:
            try_lock(client, name)
        except LockRefused as error:
            failed = True
            yield fail("permissions", str(error), "No task can run that has its lock there.")
        except (LockUnavailable, LockLost) as error:
            failed = True
            yield fail(
                "permissions",
                f"The trial of a lock failed. {sentence(error)}",
                "Until it succeeds, tasks do as their on_redis_error says.",
                "Look at the server's log.",
            )
    if not failed:
        yield ok("permissions", "Everything that a lock needs was tried, and works.")


def _redeliveries(app: Celery) -> Iterator[Finding]:
    limit_s = visibility_timeout_s(app)
    late = [task.name for task, _ in guarded_tasks(app) if task.acks_late] if limit_s else []
    if late:
        yield note(
            "visibility",
            f"The broker redelivers calls with acks_late that run for more than {limit_s:g} s: "
            f"{', '.join(late[:3])}{', ...' if len(late) > 3 else ''}.",
            "The second delivery waits for the first, and is dropped if that succeeds.",
            "Keep runs shorter than visibility_timeout in broker_transport_options, or raise that.",
        )


def _leftovers(client: Any, own: Settings) -> Iterator[Finding]:
    """What is in Redis, and should perhaps not be there any more."""
    held = waiting = paced = paused = marks = 0
    texts = live_terms_of_tasks(client, own.prefix)
    terms = [(scope, term) for scope, text in texts.items() for term in live_terms_of(text, time.time())]
    dead: list[Sighting] = []
    old: list[Sighting] = []
    lapses_s = 0.0
    for seen in survey(client, own.prefix):
        if seen.scope == TRIAL:  # another's, that runs now, or was killed
            continue
        waiting += seen.waiting
        terms += [(seen.key, term) for term in seen.live]
        paced += seen.waiting if seen.is_paced else 0
        paused += seen.waiting if seen.is_paused else 0
        if seen.queued is not None:
            marks, lapses_s = marks + 1, max(lapses_s, seen.queued_for_s or 0.0)
        held += len(seen.living)
        for one in seen.of_each():
            holder = one.holder
            if holder is not None and holder.state == "foreign" and holder.deadline is None:
                held -= 1
                yield _foreign(one, seen)
            elif holder is not None and one.is_stale and holder.state in ("running", "held_for_retry"):
                dead.append(one)
            elif _is_old(one):
                old.append(one)
    whys = [(paced, "for their pace"), (paused, "in a pause")]
    why = "".join(f", {count} of them {why}" for count, why in whys if count)
    yield ok("locks", f"Locks held: {held}; calls that wait in line: {waiting}{why}.")
    if dead:
        yield _dead(dead)
    if old:
        yield _old(old)
    if marks:
        yield _marks(marks, lapses_s)
    if terms:
        yield _live_terms(terms)


def _foreign(one: Sighting, seen: Sighting) -> Finding:
    """A lock, or a permit of one, that never ends."""
    return fail(
        "foreign",
        f"{one.name} is held by {one.holder}.",
        f"No call {'gets this permit' if seen.has_several else 'with this key runs'} until it is deleted.",
        f"If nobody needs it: celery setnx release --force {shlex.quote(one.name)}",
    )


def _dead(dead: list[Sighting]) -> Finding:
    """Locks whose holders have died."""
    oldest = min(dead, key=lambda seen: seen.remaining_s or 0.0)
    return warn(
        "locks",
        f"Locks that expired unreleased: {len(dead)}; the first was {oldest.name} of {oldest.holder}.",
        "Their holders died. They block no call: the next call of such a key takes over the lock.",
        "See `celery setnx list --stale`, and look in the workers' logs for the reason.",
    )


def _is_old(seen: Sighting) -> bool:
    """Whether one run has had a lock for so long that it may hang; a beat leads for as long as it lives."""
    age_s = seen.age_s or 0.0
    is_running = seen.process in ("alive", "unknown")
    return is_running and age_s >= _OLD_S and not seen.scope.startswith(BEAT)


def _old(old: list[Sighting]) -> Finding:
    """Runs that have had their locks for long."""
    oldest = max(old, key=lambda seen: seen.age_s or 0.0)
    task_id = oldest.holder and oldest.holder.task_id
    return note(
        "locks",
        f"Locks held by one run for {_OLD_S / 3600:g} h or more: {len(old)}; the oldest is {oldest.name} of "
        f"{oldest.holder}.",
        "A task that hangs keeps its lock, because its process is alive and renews it.",
        "See `celery setnx list --older 1h`, and give the task a time_limit. To stop one that hangs: "
        f"celery -A APP control terminate KILL {shlex.quote(task_id or 'ID')}",
    )


def _live_terms(terms: list[tuple[str, LiveTerm]]) -> Finding:
    """What was said by hand, and may be forgotten."""
    whose, oldest = min(terms, key=lambda each: each[1].since or math.inf)
    is_old = 0 < oldest.since < time.time() - DAY_S
    return (warn if is_old else note)(
        "terms",
        f"Live terms: {len(terms)}; the oldest: {whose} is {oldest.told()}",
        "They count above the tasks' own options." + (" It was set more than a day ago." if is_old else ""),
        "See `celery setnx terms`. To end one: `resume`, `limit ... own` or `rate ... own`.",
    )


def _marks(count: int, lapses_s: float) -> Finding:
    """Marks, which may be left of what was purged."""
    return note(
        "marks",
        f"Calls marked as queued: {count}; the last mark lapses in {lapses_s / 60:.0f} min.",
        "A mark stays after a purge, though its message is gone, and makes new calls duplicates.",
        "After a purge: celery setnx release --queued --task NAME",
    )


def _endless_keys(client: Any, prefix: str) -> Iterator[Finding]:
    """Keys beside locks without a TTL. A lock itself may have none: a classic client's value says its end."""
    endless: list[bytes] = []
    pattern = re.sub(r"([\\*?\[\]^-])", r"\\\1", prefix) + ":{*}*:*"
    for _, server in _each_server(client):
        names = server.scan_iter(match=pattern, count=BATCH)
        while batch := list(islice(names, BATCH)):
            with server.pipeline(transaction=False) as pipe:
                for name in batch:
                    pipe.pttl(name)
                endless += [name for name, ttl_ms in zip(batch, pipe.execute()) if ttl_ms == -1]
    if endless:
        yield warn(
            "ttl",
            f"Keys without a TTL: {len(endless)}, such as {str_if_bytes(endless[0])}.",
            "All keys of celery_setnx have one: another program has written or persisted these, and they "
            "stay for ever.",
            "Find out which program uses this prefix, give each environment its own setnx_prefix, and delete "
            "them.",
        )


def _asked(ask: Callable[[], Any]) -> Any:
    """The reply, or None if the command is forbidden or unknown."""
    try:
        return ask()
    except redis.ResponseError as error:
        if "DB index" in str(error):  # of the SELECT before it: nothing is answered there
            raise
        return None


def _config(server: Any, name: str) -> str | None:
    """A setting of the server, or None if it does not tell."""
    found = _asked(partial(server.config_get, name)) or {}
    return next((str_if_bytes(value) for value in found.values()), None)
