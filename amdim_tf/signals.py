"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, notes SIGINT (Ctrl-C) and SIGTERM instead of dying of them.

    The work at hand looks at `received` when it can stop. A second signal ends the process at once,
    with the exit code that shells give to that signal.
    """

    def __init__(self):
        self.received = ""
        self._before = {}

    def __enter__(self) -> StopSignals:
        """Takes over both signals."""
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        self.take_over()
        return self

    def take_over(self) -> None:
        """Takes them again, from a library that has taken them meanwhile."""
        for number in _NUMBERS:
            signal.signal(number, self._note)

    def __exit__(self, *_) -> None:
        """Gives them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        del frame
        if self.received:
            os._exit(128 + number)
        self.received = signal.Signals(number).name
