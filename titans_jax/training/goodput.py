"""Goodput: how much of a run's time went into training steps that count."""

import time


class Goodput:
    """Seconds in training steps over seconds since the run was first started, kept with its checkpoints.

    It is lowered by compiling, evaluating, writing, waiting for a machine, and by steps after the last checkpoint
    before a crash, which have to be repeated.
    """

    def __init__(self) -> None:
        self._first_start, self._seconds = time.time(), 0.0

    def add(self, seconds: float) -> None:
        """Count time that a training step took."""
        self._seconds += seconds

    def share(self) -> float:
        """The goodput so far, 0 to 1."""
        return self._seconds / max(time.time() - self._first_start, self._seconds, 1e-9)

    def get_state(self) -> dict[str, float]:
        """The counts, to be saved in a checkpoint: {"first_start": seconds since 1970, "seconds": in steps}."""
        return {"first_start": self._first_start, "seconds": self._seconds}

    def set_state(self, state: dict[str, float]) -> None:
        """Go on counting from what `get_state` returned."""
        self._first_start, self._seconds = state["first_start"], state["seconds"]
