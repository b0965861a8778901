"""The chaos suite: bare locks and real workers, injected faults, a history, a checker."""
