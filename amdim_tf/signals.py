"""Signals that ask a run to stop."""

from __future__ import annotations

import signal


class StopSignals:
    """While entered, notes SIGINT (Ctrl-C) and SIGTERM instead of dying of them.

    The work at hand looks at `received` when it can stop. A second signal acts at once, as it would
    have without this.
    """

    def __init__(self):
        self.received = ""
        self._before = {}

    def __enter__(self) -> StopSignals:
        """Takes over both signals."""
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        """Gives them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        del frame
        self.received = signal.Signals(number).name
        self.__exit__()
