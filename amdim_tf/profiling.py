"""A profile of some steps, for TensorBoard's Profile tab."""

from __future__ import annotations

import tensorflow as tf


class Profile:
    """Records steps FIRST to LAST into a run's logs.

    Args:
        steps: (FIRST, LAST), or nothing.
        log: the run's MetricsLog; None: nothing is recorded.
    """

    def __init__(self, steps: tuple[int, ...], log):
        self._steps = steps if log is not None else ()
        self._directory = str(log.directory) if log is not None else ""
        self._running = False

    def before(self, step: int) -> None:
        """Begins or ends the recording; called before each step."""
        if not self._steps:
            return
        if not self._running and self._steps[0] <= step <= self._steps[1]:
            tf.profiler.experimental.start(self._directory)
            self._running = True
        elif self._running and step > self._steps[1]:
            self.__exit__()

    def __enter__(self) -> Profile:
        """For `with`: a recording that has begun is ended in any case."""
        return self

    def __exit__(self, *_) -> None:
        """Ends the recording, and writes it."""
        if self._running:
            tf.profiler.experimental.stop()
            self._running = False
            first, last = self._steps
            print(
                f"Wrote the profile of steps {first} to {last} below {self._directory}; "
                "TensorBoard shows it with what requirements-profile.txt lists."
            )
