"""What happens to locks, as Celery signals. Receivers observe; an error in one is logged, never felt.

Every signal has the task as sender and, but for `tick_late`, the arguments `task_id`, `key` and `about`: what
the key was made of, such as `account_id=7`; it may be empty. They are sent in the process that runs the task;
where not, it says so. docs/monitoring.md has them in one table.
"""

from __future__ import annotations

from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery.utils.dispatch import Signal

from celery_setnx.log import Log

logger = Log("celery_setnx")


class LockSignal(Signal):  # type: ignore[misc]
    """A signal of Celery's, whose receivers are never felt: Celery logs what one raises, and at that a filter
    of the log may raise.
    """

    def send(self, sender: Any, **details: Any) -> Any:
        """Tell all receivers."""
        try:
            responses = super().send(sender, **details)
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            logger.exception("A receiver of %s failed; others may not have been told.", self.name)
            return []
        for _receiver, response in responses:
            if isinstance(response, SoftTimeLimitExceeded):  # the running task's: Celery has only logged it
                raise response
        return responses


lock_acquired = LockSignal(
    name="lock_acquired", providing_args={"task_id", "key", "about", "fence", "waited_s"}
)
"""The lock is ours and the body is about to run, `waited_s` seconds after its call met the lock held; 0.0 if
it never did."""

lock_conflict = LockSignal(
    name="lock_conflict", providing_args={"task_id", "key", "about", "holder", "remaining_s", "policy"}
)
"""Another holds the lock; `policy` is what becomes of the call."""

lock_waiting = LockSignal(name="lock_waiting", providing_args={"task_id", "key", "about", "holder", "place"})
"""A call waits in line for its lock (`on_conflict="wait"` or `"join"`), at this `place`; the first is 1."""

lock_woken = LockSignal(name="lock_woken", providing_args={"task_id", "key", "about", "waited_s"})
"""A call that waited in line has its lock, `waited_s` seconds after it met it; `lock_acquired` follows."""

lock_taken_over = LockSignal(
    name="lock_taken_over", providing_args={"task_id", "key", "about", "fence", "holder"}
)
"""An expired lock was taken over from the dead `holder`; `lock_acquired` follows, of this call or, if it was
taken over for those who wait in line, of the first of them."""

lock_released = LockSignal(
    name="lock_released", providing_args={"task_id", "key", "about", "fence", "outcome", "held_s"}
)
"""The lock was given back, `held_s` seconds after `lock_acquired`: `outcome` is `released`, `resting`,
`repaired` or `held_for_retry`. Or it is `freed` when the worker's parent did it for a process that died or
a retry that will not come, and `by_hand` when `celery setnx release` did; `held_s` is None then, and
`fence` too if it is `freed`."""

lock_lost = LockSignal(name="lock_lost", providing_args={"task_id", "key", "about", "fence", "reason"})
"""A living holder found its lock gone, another's, or past its deadline. Sent once per held lock, mostly
by a thread of its own."""

call_deduplicated = LockSignal(name="call_deduplicated", providing_args={"task_id", "key", "about", "state"})
"""A call was not published, because the task `task_id` is `queued` or `running`, or has succeeded (`done`,
with `dedupe_for`). Sent by the publisher, with the task's name as sender if it does not have the task's code.
A call that asks again when it has its lock is skipped, and its worker sends this."""

call_superseded = LockSignal(
    name="call_superseded", providing_args={"task_id", "key", "about", "superseded_by"}
)
"""A call is skipped, because a newer call of its key runs instead (`on_duplicate="replace"`): the task
`superseded_by`."""

uniqueness_lapsed = LockSignal(
    name="uniqueness_lapsed", providing_args={"task_id", "key", "about", "marked_by"}
)
"""A call that was marked starts, and its mark is gone, or another's (`marked_by`): another with its key
may have been published meanwhile. It runs under the lock all the same."""

tick_late = LockSignal(name="tick_late", providing_args={"entry", "late_s", "missed"})
"""Beat sends an entry more than a second after it was due, and `missed` further due times had passed by then.
Sent by the leading `celery_setnx.beat.HotStandbyScheduler`, which is the sender."""
