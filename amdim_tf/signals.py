"""Signals that ask a run to stop."""

from __future__ import annotations

import contextlib
import os
import signal

# Exit code of a program that was stopped by a signal, with nothing lost.
STOPPED_CODE = 75
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
        self._take_over()
        return self

    def _take_over(self) -> None:
        for number in _NUMBERS:
            signal.signal(number, self._note)

    @contextlib.contextmanager
    def held_back(self):
        """Keeps signals waiting while a library takes them for itself; then takes them again.

        That library's threads must have begun in `kept_from_threads`.
        """
        with kept_from_threads():
            try:
                yield
            finally:
                self._take_over()

    def __exit__(self, *_) -> None:
        """Gives them back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame) -> None:
        del frame
        if self.received:
            os._exit(128 + number)
        self.received = signal.Signals(number).name


@contextlib.contextmanager
def kept_from_threads():
    """Threads that begin within it never see signals, which leaves them to the main thread.

    Those that come meanwhile wait until its end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
