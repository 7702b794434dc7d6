"""Ends a process that is stuck in a library which neither comes back nor lets Python run.

TensorFlow holds Python's lock while it connects, so that no thread could watch it: a process does,
which runs this file by itself. Hence it imports nothing of amdim_tf.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
# Seconds between looks, until the first warning, and from a signal to the end.
_LOOK, _FIRST_WARNING, _GRACE = 0.5, 10.0, 10.0


@contextlib.contextmanager
def guarded(work: str, seconds: float, advice: str):
    """What runs within it is told of when it takes long, and killed when it takes too long.

    Signals should wait until its end. Where one still waits after some seconds the process is
    killed too: nothing is under way yet that could be lost.

    Args:
        work: what is done, as in "is still …".
        seconds: how long it may take.
        advice: the flag or variable that it depends on, and what to do.
    """
    words = [str(os.getpid()), str(seconds), work, advice]
    watcher = subprocess.Popen([sys.executable, "-I", __file__, *words], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        watcher.stdin.close()  # which ends it
        watcher.wait()


def _watch(process: int, seconds: float, work: str, advice: str) -> None:
    """Looks at a process until standard input ends."""
    began, told, asked = time.monotonic(), _FIRST_WARNING, None
    while not select.select([sys.stdin], [], [], _LOOK)[0]:
        waited = time.monotonic() - began
        waiting = _signals_waiting(process)
        asked = waited if waiting and asked is None else asked
        if waiting and waited - asked >= _GRACE:
            _kill(process, f"Stopped by {waiting[0]} while {work}.")
        if waited >= seconds:
            _kill(process, f"error: {advice} Received: no answer in {seconds:.0f} s while {work}.")
        if waited >= told:
            print(f"warning: still {work}, for {waited:.0f} s so far.", file=sys.stderr, flush=True)
            told *= 2


def _signals_waiting(process: int) -> list[str]:
    """Names of the signals that the process was sent and has not seen; where Linux tells."""
    try:
        with open(f"/proc/{process}/status") as file:
            masks = re.findall(r"(?:SigPnd|ShdPnd):\s*([0-9a-f]+)", file.read())
    except OSError:
        return []
    return [one.name for one in _NUMBERS if any(int(mask, 16) >> (one - 1) & 1 for mask in masks)]


def _kill(process: int, line: str) -> None:
    print(line, file=sys.stderr, flush=True)
    os.kill(process, signal.SIGKILL)  # nothing else reaches it
    sys.exit()


if __name__ == "__main__":
    _watch(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
