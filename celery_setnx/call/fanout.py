"""Bulk fan-out: many calls of one task, marked and sent in batches.

Calls are drawn into a window, where equal ones meet; its distinct calls are sent batch by batch. For each
batch, in this order: the marks for the time of the send, the messages, the marks for the queue lease. What
fails in between, or dies, leaves no mark behind for longer than the first lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Signature, uuid
from kombu.exceptions import EncodeError

from celery_setnx.arguments import Arguments, copied
from celery_setnx.call.away import Error
from celery_setnx.call.binding import refuse_misplaced_in_call
from celery_setnx.call.later import is_published_at_once
from celery_setnx.call.marking import Found, Marking, mark_lease_s, marking_of, refuse_times
from celery_setnx.call.message import Call
from celery_setnx.call.publish import AWAITED, HIDES_ARGUMENTS, Send, may_be_duplicate
from celery_setnx.exceptions import FanOutFailed, OptionError
from celery_setnx.lock.marks import GRACE_S
from celery_setnx.log import Log, fields
from celery_setnx.options import plain
from celery_setnx.signals import call_deduplicated

try:
    from kombu.exceptions import BatchPublishError
except ImportError:  # kombu before 5.7 has no batches

    class BatchPublishError(Exception):  # type: ignore[no-redef]
        """Never raised."""


logger = Log("celery_setnx")

_WINDOW_BATCHES = 10
_WINDOW_CALLS = 100  # per distinct call of a batch
_WINDOW_S = 1.0
_COMMANDS = 20  # more than a message is for any queue and transport
_OF_A_SINGLE_CALL = (
    *("task_id", *AWAITED),
    *("args", "kwargs", "link", "link_error", "shadow"),
    *("producer", "publisher", "connection"),
)
_ITS_OWN_FAULT = (EncodeError, TypeError, ValueError)


@dataclass(frozen=True)
class CallOutcome:
    """What became of one call of a fan-out.

    Attributes:
        index: Its place in the iterable, from 0.
        state: `accepted`, `duplicate` or `failed`.
        task_id: Its own id if it was accepted; the earlier call's id if it is a duplicate; None if it failed.
        error: Why it failed, or None.
    """

    index: int
    state: str
    task_id: str | None = None
    error: BaseException | None = None


@dataclass
class FanOut:
    """What became of a fan-out's calls.

    Attributes:
        accepted: Calls that the broker has taken.
        duplicates: Calls that were not sent: the same call is queued or running, or has succeeded. With
            `on_duplicate="replace"` also those that a later call of the fan-out has replaced.
        failed: Calls that could not be sent: no key, wrong arguments, not serializable.
        first_error: The error of the first failed call, or None.
    """

    accepted: int = 0
    duplicates: int = 0
    failed: int = 0
    first_error: BaseException | None = None

    @property
    def total(self) -> int:
        """All calls whose fate is known."""
        return self.accepted + self.duplicates + self.failed


@dataclass
class _Distinct:
    """A distinct call of the window, and the calls that equal it: their places and arguments."""

    index: int
    args: Any
    kwargs: Any
    told: Call
    digest: str  # of all its arguments, if the newest call counts
    delay: dict[str, Any] = field(default_factory=dict)  # options of apply_async that have it wait
    equals: list[tuple[int, Any, Any]] = field(default_factory=list)

    @property
    def task_id(self) -> str:
        return self.told.task_id

    @property
    def size(self) -> int:
        return 1 + len(self.equals)


class FanningOut:
    """One fan-out on its way; see `SingletonTask.fan_out`.

    `send` publishes one call for real, `call` has the singleton options of these calls, and `options` those
    of `celery.Task.apply_async`.
    """

    def __init__(
        self, task: Any, send: Send, call: Mapping[str, Any] | None, options: dict[str, Any]
    ) -> None:
        wrong = sorted(set(options) & set(_OF_A_SINGLE_CALL))
        if wrong:
            raise OptionError(
                f"fan_out of {task.name} does not accept {', '.join(wrong)}; publish such calls one by one"
            )
        refuse_misplaced_in_call(options, task.name)
        guard = task._settled()
        self.task = task
        self.send, self.at_once = send, is_published_at_once(send, guard.app)
        # The options of these calls are settled once: a guard that has them as its nearest layer.
        self.travelling = plain(f"a fan-out of {guard.task}", call or {})
        self.guard = guard.under(call) if call else guard
        self.dedupes = self.guard.options.dedupe is not None and may_be_duplicate(guard.app, options)
        self.headers = dict(options.pop("headers", None) or {})
        # Celery subscribes to the result of every call that it sends, which costs as much as the sending, and
        # memory for each. A result is subscribed to when somebody asks for it; the header tells the worker.
        self.headers["ignore_result"] = bool(options.pop("ignore_result", task.ignore_result))
        self.options = {"add_to_parent": False, **options, "ignore_result": True}
        self.replaces = self.dedupes and self.guard.options.replaces
        if self.replaces:
            refuse_times(self.guard, self.options, task.expires)
        self.shows_arguments = not HIDES_ARGUMENTS & options.keys()
        self._lease_s()  # refuses an eta that cannot be read before anything is sent
        self.window: dict[Any, _Distinct] = {}
        self.window_calls = 0
        self.window_began = 0.0
        self.drawn = 0
        self.uncertain = 0
        self.counts = FanOut()
        self.warned = False

    def run(
        self,
        calls: Iterable[Any],
        batch_size: int,
        each: Callable[[CallOutcome], Any] | None,
        progress: Callable[[FanOut], Any] | None,
    ) -> FanOut:
        """Publish the calls."""
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError(
                f"fan_out of {self.task.name}: batch_size must be a whole number of 1 or more, not "
                f"{batch_size!r}"
            )
        self.batch_size, self.each, self.progress = batch_size, each, progress
        try:
            for call in calls:
                self._draw(call)
                if self._is_full():
                    self._send_window()
            self._send_window()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            counts = self.counts
            not_sent = self.drawn - counts.total - self.uncertain
            raise FanOutFailed(
                self.task.name,
                counts.accepted,
                counts.duplicates,
                counts.failed,
                self.uncertain,
                not_sent,
            ) from error
        self._say_what_became()
        return self.counts

    def _say_what_became(self) -> None:
        if self.counts.duplicates:  # one line for all of them
            text = "%d of %d calls of %s are not published: the same calls are queued or running already."
            if self.replaces:
                text = "%d of %d calls of %s are not published: later ones are, or equal ones are queued."
            logger.info(
                text,
                self.counts.duplicates,
                self.counts.total,
                self.task.name,
                extra=fields("duplicates", task=self.task.name),
            )
        if self.counts.failed:
            logger.error(
                "%d of %d calls of %s could not be sent. The first: %s",
                self.counts.failed,
                self.counts.total,
                self.task.name,
                self.counts.first_error,
                extra=fields(task=self.task.name),
            )

    def _draw(self, call: Any) -> None:
        index = self.drawn
        self.drawn += 1
        try:
            args, kwargs = _arguments(self.task, call)
            args, kwargs = copied(args), copied(kwargs)  # what is sent later is what is drawn now
            given = Arguments.given_to(self.task, args, kwargs, self.options.get("serializer"))
            key, about = self.guard.key_and_about(given, {}, shown=self.shows_arguments)
            digest = self.guard.digest_of_all(given) if self.guard.options.drops_equal else ""
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's key function or argument raises
            self._fail(index, error)
            return
        if not self.window:
            self.window_began = time.monotonic()
        self.window_calls += 1
        same = self.window.get(key) if self.dedupes else None
        if same is not None and self.replaces:  # the last of them wins
            same.equals.append((same.index, same.args, same.kwargs))
            same.index, same.args, same.kwargs, same.digest = index, args, kwargs, digest
        elif same is not None:
            same.equals.append((index, args, kwargs))
        else:
            told = Call(self.task.name, uuid(), key=key, options=self.travelling, about=about)
            self.window[key if self.dedupes else index] = _Distinct(index, args, kwargs, told, digest)

    def _is_full(self) -> bool:
        return (
            len(self.window) >= self.batch_size * _WINDOW_BATCHES
            or self.window_calls >= self.batch_size * _WINDOW_CALLS
            or (bool(self.window) and time.monotonic() - self.window_began >= _WINDOW_S)
        )

    def _send_window(self) -> None:
        calls = iter(self.window.values())
        self.window, self.window_calls = {}, 0
        while batch := list(islice(calls, self.batch_size)):
            self._send_batch(batch)
            if self.progress is not None:
                self.progress(self.counts)

    def _send_batch(self, batch: list[_Distinct]) -> None:
        """Mark, send, extend; whatever happens, what was not sent has no mark afterwards."""
        lease, options = self._lease_s(), self.guard.options
        told: dict[str, Any] = {"at_once": self.at_once, "complain": self._warn_once}
        marking = marking_of(options)(self.guard, options, lease, **told)
        try:
            with marking:
                fresh = self._marked(batch, marking) if self.dedupes else batch
                with self.guard.app.producer_or_acquire() as producer:
                    # The first goes by itself, with Celery's own retries: they bring a dead connection back.
                    self._publish(fresh[:1], producer, marking.sent)
                    self._publish_rest(fresh[1:], producer, marking.sent)
        finally:
            self._accept(marking.sent)

    def _marked(self, batch: list[_Distinct], marking: Marking) -> list[_Distinct]:
        """Mark the keys; those that are no duplicates are to be sent."""
        fresh = []
        taken = marking.take([call.told for call in batch], [call.digest for call in batch])
        for call, (told, marked) in zip(batch, taken):
            call.told, call.delay = marking.delayed(told, marked)
            if marked is not None and marked.is_duplicate:
                self._duplicate(call, marked)
            else:
                fresh.append(call)
        return fresh

    def _publish_rest(self, batch: list[_Distinct], producer: Any, sent: list[_Distinct]) -> None:
        if not batch or not self.at_once or not _buffers(producer):
            self._publish(batch, producer, sent)
            return
        options: dict[str, Any] = {"retry": False}  # nothing is sent before the batch is flushed
        if "declare" not in self.options and not self.guard.app.conf.task_routes:
            options["declare"] = []  # the first message has declared their queue
        buffered: list[_Distinct] = []
        try:
            # One message may be several commands: flushed at the end, not in between.
            with producer.batch(max_size=_COMMANDS * len(batch)):
                self._publish(batch, producer, buffered, **options)
        except BatchPublishError:
            self.uncertain += sum(call.size for call in buffered)
            raise
        sent += buffered

    def _publish(
        self, batch: Sequence[_Distinct], producer: Any, sent: list[_Distinct], **options: Any
    ) -> None:
        for call in batch:
            while True:
                try:
                    self._publish_one(call, producer, options)
                except _ITS_OWN_FAULT as error:
                    self._fail(call.index, error)
                    if not call.equals:
                        break
                    # Equal by its key, but another call: it may well be sent in the first one's place.
                    call.index, call.args, call.kwargs = call.equals.pop(-1 if self.replaces else 0)
                except BatchPublishError:
                    raise
                except Exception:
                    self.uncertain += call.size  # the broker may have taken it, and its reply was lost
                    raise
                else:
                    sent.append(call)
                    break

    def _publish_one(self, call: _Distinct, producer: Any, options: dict[str, Any]) -> None:
        options = {**self.options, **options, **call.delay, "task_id": call.task_id}
        options["headers"] = {**self.headers, **call.told.as_headers()}
        if "declare" in options:
            options["declare"] = list(options["declare"])  # a list of its own: kombu adds to it
        if self.at_once:  # else the producer may be another's by then
            options["producer"] = producer
        self.send(call.args, call.kwargs, **options)

    def _lease_s(self) -> float:
        return mark_lease_s(self.guard.app, self.guard.options, self.options, self.task.expires)

    def _warn_once(self, error: Error, _what: str) -> None:
        if not self.warned:
            logger.warning(
                "The fan-out of %s continues, but some marks are missing or kept too long: a call may be "
                "queued twice, or be taken for queued for %g s more. Every run is guarded. %s",
                self.task.name,
                GRACE_S,
                error,
                extra=fields(task=self.task.name),
            )
        self.warned = True

    def _accept(self, sent: list[_Distinct]) -> None:
        """Count first: what `each` raises must not make the counts wrong."""
        self.counts.accepted += len(sent)
        self.counts.duplicates += sum(len(call.equals) for call in sent)
        for call in sent:
            self._tell(call.index, "accepted", call.task_id)
            for index, _, _ in call.equals:
                self._tell_duplicate(index, call.told, call.task_id, "queued")

    def _duplicate(self, call: _Distinct, marked: Found) -> None:
        self.counts.duplicates += call.size
        for index in (call.index, *(index for index, _, _ in call.equals)):
            self._tell_duplicate(index, call.told, marked.task_id, marked.state)

    def _fail(self, index: int, error: Exception) -> None:
        self.counts.failed += 1
        self.counts.first_error = self.counts.first_error or error
        self._tell(index, "failed", error=error)

    def _tell_duplicate(self, index: int, told: Call, task_id: str, state: str) -> None:
        call_deduplicated.send(sender=self.task, task_id=task_id, key=told.key, about=told.about, state=state)
        self._tell(index, "duplicate", task_id)

    def _tell(
        self, index: int, state: str, task_id: str | None = None, error: Exception | None = None
    ) -> None:
        if self.each is not None:
            self.each(CallOutcome(index, state, task_id, error))


def _arguments(task: Any, call: Any) -> tuple[Any, Any]:
    """A call's positional and keyword arguments."""
    if isinstance(call, Signature):
        if call.task != task.name:
            raise TypeError(f"a fan-out of {task.name} cannot send a signature of {call.task}")
        return tuple(call.args), dict(call.kwargs)
    if isinstance(call, (tuple, list)):
        return tuple(call), {}
    if isinstance(call, Mapping):
        return (), dict(call)
    raise TypeError(
        "a call of a fan-out must be a tuple of positional arguments, a mapping of keyword arguments "
        f"or a signature, not {call!r}; for a single argument write ({call!r},)"
    )


def _buffers(producer: Any) -> bool:
    """True if the producer's transport collects the messages of a batch (kombu 5.7, on Redis)."""
    channel = producer.channel
    return (
        hasattr(producer, "batch")
        and getattr(channel, "create_publish_batch", None) is not None
        and getattr(channel, "supports_batch_publish", True)
    )
