"""What binding settles of a task: its options, how its key is computed, where its locks live."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.backends.base import DisabledBackend
from kombu.exceptions import SerializerNotInstalled
from kombu.serialization import dumps
from kombu.utils import json

from celery_setnx.arguments import Arguments, pass_on_time_limit
from celery_setnx.call.live import live_terms_at
from celery_setnx.call.message import REPLACED, Call, has_random_id
from celery_setnx.configured import configured
from celery_setnx.connection import client_for
from celery_setnx.exceptions import OptionError, UnkeyableCall
from celery_setnx.keys import KeyFunction
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.names import key_name, mark_name, newest_name, scope_and_digest
from celery_setnx.log import Log, fields
from celery_setnx.options import (
    NAMES,
    OF_THE_TASK,
    UNSET,
    Options,
    Settings,
    check_name,
    merged,
    plain,
    settings_of,
)
from celery_setnx.wording import ABOUT, shortened

logger = Log("celery_setnx")

DECORATED = "__singleton__"
"""The attribute of a function under `@singleton` that has its options."""


class Guard:
    """What binding settles of a task: its options, its key function, where its locks live."""

    def __init__(
        self,
        app: Celery,
        task: str,
        signature: inspect.Signature,
        layers: list[Mapping[str, Any]],
        *,
        ignores_result: bool = False,
        **checks: Any,
    ) -> None:
        self.app = app
        self.state = configured(app)  # by which it is made
        self.ignores_result = ignores_result
        self.checks = checks  # what `KeyFunction` asks of a call's arguments
        self.task = task
        self.signature = signature
        self.layers = [self.settings.defaults, *layers]
        self.options = self._checked(merged(task, *self.layers))
        self.key_function = KeyFunction(self.options.key, signature, task, **checks)
        check_name(f"scope of {task}", self.options.scope or task)

    @property
    def settings(self) -> Settings:
        """The app's settings as they are now: a worker's parent may ask a guard that was made before."""
        return settings_of(self.app)

    def under(self, call: Mapping[str, Any]) -> Guard:
        """The guard of many calls that have the same options of their own."""
        layers, own = [*self.layers[1:], call], {"ignores_result": self.ignores_result, **self.checks}
        return Guard(self.app, self.task, self.signature, layers, **own)

    def call(
        self,
        new: Call,
        arguments: Arguments,
        own: Mapping[str, Any] | None,
        before: Call | None,
        *,
        shown: bool,
    ) -> Call:
        """A call that is to be published: its finished key, its own options, and what a retry brings."""
        options = dict(before.options) if before else {}
        if own:
            options.update(plain(f"a call of {self.task}", own))
        try:
            key, about = self.key_and_about(arguments, options, shown=shown)
        except UnkeyableCall as error:
            if before is None or not before.key or not new.attempt % REPLACED:
                raise
            text = "The retry of %s keeps the key %s, because its own cannot be computed: %s"
            logger.warning(text, before, before.key, error, extra=fields(of=before))
            key, about = before.key, before.about if shown else ""
        # A later attempt of a call stays that call, whose ticket tells which attempt may start; what else is
        # published under its id is another. A call of a fan-out has nothing but its id.
        if before and before.attempt < new.attempt and (before.call_id or has_random_id(new.task_id)):
            call_id = before.call_id
        else:
            call_id = os.urandom(6).hex()
        marked, generation = None, 0
        if new.attempt % REPLACED:
            marked = self._marked_again(options, before, key)
            generation = before.generation if before and before.key == key else 0
        return Call(
            *new[:3], key, call_id, options, marked, about=about, generation=generation, has_header=True
        )

    def _marked_again(self, own: Mapping[str, Any], before: Call | None, key: str) -> bool | str | None:
        """Whether a retry's key is marked for it when it starts.

        True if the call was the only one queued when it was published; `"again"` if it was not marked then,
        and the mark that its release has set may be another call's.
        """
        options = self.options_of(own)
        if options.dedupe != "until_done" or options.hold_on_retry or (before and before.key != key):
            return None
        return (before.marked if before else None) or "again"

    def fitting(self, call: Call) -> Call:
        """The call without options of its own that this task does not take, since a deploy has changed it.

        Nothing is raised, whatever they are: they came in a message.
        """
        if not call.options:
            return call
        try:
            known = {
                name: call.options[name] for name in NAMES if name in call.options and name not in OF_THE_TASK
            }
            self.check_backend(self.options_of(known))
            self._key_function_of(known)
            json.dumps(known)  # type: ignore[no-untyped-call] # as it is when the call comes back
        except SoftTimeLimitExceeded:  # of the task that is running
            raise
        except Exception as error:  # noqa: BLE001 - an OptionError, or whatever such values lead to
            logger.warning("%s runs without the options of its call: %s", call, error, extra=fields(of=call))
            known = {}
        return call._replace(options=known)

    def key(self, arguments: Arguments, call: Mapping[str, Any]) -> str:
        """The Redis key of a call's lock."""
        return self.key_and_about(arguments, call, shown=False)[0]

    def key_and_about(self, arguments: Arguments, call: Mapping[str, Any], *, shown: bool) -> tuple[str, str]:
        """The same, and what the key was made of; nothing if that is not to be shown."""
        function, about = self._key_function_of(call), ""
        if shown and self.settings.show_arguments:
            digest, about = function.digest_and_about(*arguments)
        else:
            digest = function.digest(*arguments)
        return key_name(self.settings.prefix, self.scope_of(call), digest), about

    def digest_of_all(self, arguments: Arguments) -> str:
        """The digest of a call: its task, and all its arguments, whatever its key is made of; empty if they
        have none.
        """
        try:
            digest = self._all_arguments.digest(*arguments)
        except UnkeyableCall:
            return ""
        return blake2b(f"{self.task}\n{digest}".encode(), digest_size=8).hexdigest()

    @cached_property
    def _all_arguments(self) -> KeyFunction:
        return KeyFunction(None, self.signature, self.task, **self.checks)

    def asked(self, arguments: Arguments) -> tuple[str, str]:
        """The Redis key of a call that somebody asks about, and what it was made of.

        Arguments that the key does not name may be missing.
        """
        digest, about = self.key_function.asked(*arguments)
        return key_name(self.settings.prefix, self.scope_of({}), digest), about

    def may_have(self, call: Call, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has the key of its arguments, as far as that can be told again.

        A callable is not asked: it is the user's code, which may answer otherwise elsewhere, or not at all.
        With a `key` of its own, other than the task's, a call could have any arguments.
        """
        options = self.fitting(call).options
        if "key" in options and not _are_same(options["key"], self.options.key):
            return False
        if callable(self.options_of(options).key):
            return scope_and_digest(call.key)[0] == self.scope_of(options)
        try:
            return self.key(Arguments(args, kwargs), options) == call.key
        except UnkeyableCall:
            return False

    def _key_function_of(self, call: Mapping[str, Any]) -> KeyFunction:
        if "key" not in call:
            return self.key_function
        return KeyFunction(self.options_of(call).key, self.signature, self.task, **self.checks)

    def scope_of(self, call: Mapping[str, Any]) -> str:
        """The scope of a call's lock."""
        return self.options_of(call).scope or self.task

    def scope_at(self, call: Call) -> str:
        """The scope of the lock of a call that has come: by its key, if its message names that."""
        return scope_and_digest(call.key)[0] if call.key else self.scope_of(call.options)

    def options_of(self, call: Mapping[str, Any]) -> Options:
        """The options of one call."""
        if not call:
            return self.options
        return self._checked(merged(f"a call of {self.task}", *self.layers, call))

    def _checked(self, options: Options) -> Options:
        """Refuse to join a result that nobody stores, and to skip with one that cannot be stored."""
        if options.on_conflict == "join" and self.ignores_result:
            raise OptionError(
                f"{self.task} has on_conflict='join' and ignore_result: there is no result to share; store "
                "it, or use on_conflict='wait'"
            )
        if options.skip_result is not UNSET and not self.ignores_result:
            self._check_skip_result(options.skip_result)
        return options

    def _check_skip_result(self, value: Any) -> None:
        serializer = self.app.conf.result_serializer
        try:
            dumps(value, serializer=serializer)  # type: ignore[no-untyped-call]
        except SerializerNotInstalled:
            pass  # here, where calls may only be published
        except Exception as error:  # noqa: BLE001 - whatever the value's own code raises
            pass_on_time_limit(error)
            raise OptionError(
                f"skip_result of {self.task} cannot be stored as a result "
                f"({type(error).__name__}: {error}, with result_serializer={serializer!r}), so a skipped "
                f"call would fail; use text, a number or None, not {shortened(repr(value), ABOUT)}"
            ) from None

    def check_backend(self, options: Options) -> None:
        """Refuse to join a result that no worker can read. Not when the task is bound: Celery binds it to
        every app of a process, and those that only publish need no result backend.
        """
        if options.on_conflict != "join":
            return
        try:
            backend = self.app.backend
        except Exception as error:
            pass_on_time_limit(error)
            raise OptionError(  # the error's own words may quote a part of a password
                f"{self.task} has on_conflict='join', and result_backend cannot be used "
                f"({type(error).__name__}): fix it, or use on_conflict='wait'"
            ) from error
        if isinstance(backend, DisabledBackend) or not backend.persistent:
            raise OptionError(
                f"{self.task} has on_conflict='join', which needs a result backend that all workers "
                "can read: set result_backend (not rpc://), or use on_conflict='wait'"
            )

    def lock(self, call: Call, arguments: Arguments, info: str | None = None) -> SetnxLock:
        """The lock of a call: named by its message, or computed where that does not name it."""
        options = self.options_of(call.options)
        key = call.key or self.key(arguments, call.options)
        mark = mark_name(key) if options.dedupe or call.marked else None
        if call.generation:
            mark = newest_name(key)
        return SetnxLock(
            client_for(self.app),
            key,
            lease=options.lease,
            retention=self.settings.retention,
            info=info,
            mark=mark,
            line=True,
            limit=options.limit,
            rate=options.rate,
            live=live_terms_at(self.app, key),
        )


def decorated(run: Any) -> Mapping[str, Any] | None:
    """The options of @singleton on a task's function, or on what is below its decorators; None without."""
    options: Mapping[str, Any] | None = getattr(run, DECORATED, None)
    while options is None and hasattr(run, "__wrapped__"):
        run = run.__wrapped__
        options = getattr(run, DECORATED, None)
    return options


def _are_same(key: Any, other: Any) -> bool:
    """Whether two `key` options are one; a message makes a list of a tuple."""
    both = [list(each) if isinstance(each, tuple) else each for each in (key, other)]
    return bool(both[0] == both[1])


def is_singleton(task: Any) -> bool:
    """True for a `SingletonTask`; False where only the function is guarded, under another base class."""
    return getattr(task, "_guard", None) is not None


def guard_of(task: Any) -> Guard | None:
    """The guard of a task, be it a `SingletonTask` or its function decorated; None if it is plain."""
    return getattr(task, "_guard", None) or getattr(task, "_setnx_guard", None)
