"""Calls of one key, played on the tasks of `tests.ecosystem.watched`."""

from collections.abc import Callable
from typing import Any

from tests.harness import Journal

QUEUE = "watched"


class Play:
    """Calls of one key, brought to where a test wants them."""

    def __init__(self, tasks: Any, journal: Journal, gates: Callable[..., None], name: str) -> None:
        self.tasks, self._journal, self._open, self.name = tasks, journal, gates, name

    def holder(self) -> tuple[str, str]:
        """Ids of a call whose body has started and waits at its gate, and of what has published it."""
        publisher, held = self._published(self.name)
        self._journal.wait_for("start", task_id=held)
        return publisher, held

    def parked(self) -> tuple[str, str]:
        """Ids of a call that waits in line and has left its pool slot, and of what has published it."""
        publisher, waiting = self._published()
        self.leaves_its_slot(waiting)
        return publisher, waiting

    def leaves_its_slot(self, task_id: str) -> None:
        """Wait until a call waits in line, and its worker does not wait for it."""
        self._journal.wait_for("waiting", task_id=task_id)
        self._journal.wait_for("postrun", task_id=task_id)

    def let_go(self, *task_ids: str) -> None:
        """Let the holder's body end, and wait until these calls have succeeded."""
        self._open(self.name)
        for task_id in task_ids:
            self._journal.wait_for("postrun", task_id=task_id, state="SUCCESS")

    def failed(self, task: str, *args: str) -> str:
        """Id of a call that has failed."""
        return self.reached("postrun", getattr(self.tasks, task).apply_async(args), state="FAILURE")

    def reached(self, what: str, result: Any, **details: Any) -> str:
        """Id of a call, once this has happened to it."""
        self._journal.wait_for(what, task_id=result.id, **details)
        return str(result.id)

    def greet(self, *event: str) -> Any:
        """Have a plain task run; and send an event of its own, if one is named."""
        return self.tasks.announces.delay(*event).get(timeout=60)

    def _published(self, *gate: str) -> tuple[str, str]:
        publisher = self.tasks.front.delay(self.tasks.waits.name, self.name, *gate)
        return publisher.id, publisher.get(timeout=60)
