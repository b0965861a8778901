"""The chaos suite: real workers, injected faults, a history, and a checker. `python -m tests.chaos`."""
