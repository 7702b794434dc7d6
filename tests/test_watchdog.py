"""A library that never comes back and holds Python's lock, in real processes."""

import signal
import subprocess
import sys
import time

import pytest

CODE = """if True:
    import ctypes, signal
    from amdim_tf import signals, watchdog
    with signals.kept_from_threads():
        with watchdog.guarded("asking somebody", {seconds}, "--flag: expected an answer."):
            print("begun", flush=True)
            ctypes.PyDLL(None).sleep({sleep})  # no other thread runs meanwhile
    print("done", flush=True)
"""


def _start(seconds, sleep):
    process = subprocess.Popen(
        [sys.executable, "-c", CODE.format(seconds=seconds, sleep=sleep)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.mark.slow
def test_no_answer():
    out, errors = _start(seconds=12, sleep=100).communicate(timeout=50)
    assert not out
    warning, line = errors.splitlines()
    assert warning == "warning: still asking somebody, for 10 s so far."
    wanted = "error: --flag: expected an answer. Received: no answer in 12 s while asking somebody."
    assert line == wanted


@pytest.mark.slow
def test_a_signal_that_nobody_takes():
    process = _start(seconds=60, sleep=100)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=50)
    assert process.returncode == -signal.SIGKILL
    assert errors.splitlines()[-1] == "Stopped by SIGTERM while asking somebody."


def test_an_answer_in_time():
    process = _start(seconds=60, sleep=0)
    out, errors = process.communicate(timeout=30)
    assert (process.returncode, out, errors) == (0, "done\n", "")


def test_a_signal_in_between_is_not_lost():
    """It is seen as soon as the library comes back."""
    process = _start(seconds=60, sleep=1)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM and not out
