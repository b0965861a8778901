"""What binding settles of a task: its options, how its key is computed, where its locks live."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.backends.base import DisabledBackend

from celery_setnx.connection import client_for
from celery_setnx.exceptions import OptionError
from celery_setnx.keys import KeyFunction, key_name, mark_name
from celery_setnx.lock import SetnxLock
from celery_setnx.options import Options, check_name, merged, plain, settings
from celery_setnx.trial import check_at_worker_start


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
    ) -> None:
        self.app = app
        self.ignores_result = ignores_result
        self.task = task
        self.signature = signature
        self.settings = settings(app.conf)
        self.layers = [self.settings.defaults, *layers]
        self.options = self._checked(merged(task, *self.layers))
        # One for each process that says who it is: those of its calls are made after it, not checked again.
        self._locks: dict[str | None, SetnxLock] = {}
        self.key_function = self._key_function(self.options)
        check_name(f"scope of {task}", self.options.scope or task)
        check_at_worker_start(app)

    def under(self, call: Mapping[str, Any]) -> Guard:
        """The guard of many calls that have the same options of their own.

        Raises:
            OptionError: An option is unknown, malformed, or cannot be combined with the task's.
        """
        layers = [*self.layers[1:], call]
        return Guard(self.app, self.task, self.signature, layers, ignores_result=self.ignores_result)

    def _key_function(self, options: Options) -> KeyFunction:
        return KeyFunction(options.key, self.signature, self.task)

    def header(
        self,
        args: Any,
        kwargs: Any,
        call: Mapping[str, Any] | None,
        inherited: Mapping[str, Any] | None = None,
        retries: int = 0,
    ) -> dict[str, Any]:
        """The header of a call: its finished key, its own options, and what a retry brings along.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
            call: Options of this call alone.
            inherited: The header of the attempt before, if this call is a retry. Defaults to none.
            retries: How often the task has retried itself. Defaults to 0.
        """
        inherited = inherited or {}
        travelling = dict(inherited.get("options") or {})
        if call:
            travelling.update(plain(f"a call of {self.task}", call))
        header: dict[str, Any] = {
            "key": self.key(args or (), kwargs or {}, travelling),
            # A call that comes back stays the one that it was: one that came without a header has no id.
            "call_id": inherited.get("call_id", "") if inherited else os.urandom(6).hex(),
        }
        if travelling:
            header["options"] = travelling
        if "wait" in inherited:
            header["wait"] = inherited["wait"]
        if inherited.get("key", header["key"]) == header["key"]:
            marked = self._marked_again(travelling, inherited, retries)
            if marked:
                header["marked"] = marked
        return header

    def _marked_again(self, call: Mapping[str, Any], before: Mapping[str, Any], retries: int) -> Any:
        """Whether the key of a call that comes back is marked for it when it starts.

        True if it was the only one queued when it was published; `"again"` if it was not marked then, and the
        mark that its release has set may be another call's.
        """
        if (before.get("wait") or {}).get("retries") == retries:
            return before.get("marked")  # it has not started since
        options = self.options_of(call)
        if not retries or options.dedupe != "until_done" or options.hold_on_retry:
            return None
        return before.get("marked") or "again"

    def key(self, args: Any, kwargs: Mapping[str, Any], call: Mapping[str, Any]) -> str:
        """The Redis key of a call's lock."""
        options, function = self.options, self.key_function
        if call:
            options = self.options_of(call)
            if "key" in call:
                function = self._key_function(options)
        scope = options.scope or self.task
        return key_name(self.settings.prefix, scope, function.digest(args, kwargs))

    def options_of(self, call: Mapping[str, Any]) -> Options:
        """The options of one call."""
        if not call:
            return self.options
        return self._checked(merged(f"a call of {self.task}", *self.layers, call))

    def _checked(self, options: Options) -> Options:
        """Refuse to join a result that nobody stores."""
        if options.on_conflict == "join" and self.ignores_result:
            raise OptionError(
                f"{self.task} has on_conflict='join' and ignore_result: there is no result to end with; "
                "store it, or use on_conflict='wait'"
            )
        return options

    def check_backend(self, options: Options) -> None:
        """Refuse to join a result that no worker can read. Not when the task is bound: Celery binds it to
        every app of a process, and those that only publish need no result backend.

        Raises:
            OptionError: The options say join, and the app has no persistent result backend.
        """
        if options.on_conflict != "join":
            return
        backend = self.app.backend
        if isinstance(backend, DisabledBackend) or not backend.persistent:
            raise OptionError(
                f"{self.task} has on_conflict='join', which needs a result backend that all workers "
                "can read: set result_backend (not rpc://), or use on_conflict='wait'"
            )

    def options_for(self, header: Mapping[str, Any], call: Mapping[str, Any] | None) -> Options:
        """The options with which a call is published: those that travel, and those that stay at home."""
        layer = {**(header.get("options") or {}), **(call or {})}
        return self.options_of(layer)

    def lock(
        self,
        header: Mapping[str, Any],
        args: Any,
        kwargs: Mapping[str, Any],
        info: str | None = None,
    ) -> SetnxLock:
        """The lock of a call: named by its header, or computed where a message has none."""
        call = header.get("options")
        options = self.options_of(call) if call else self.options
        key = header.get("key") or self.key(args, kwargs, call or {})
        mark = mark_name(key) if options.dedupe or header.get("marked") else None
        like = None if call else self._locks.get(info)
        client = client_for(self.app)
        if like is not None and like.client is client:
            return like.named(key, mark)
        lock = SetnxLock(
            client,
            key,
            lease=options.lease,
            retention=self.settings.retention,
            info=info,
            mark=mark,
            line=True,
        )
        if not call:
            self._locks[info] = lock.named(key, None)  # which is never used itself
        return lock
