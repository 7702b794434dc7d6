"""Each suite of tools/benchmark.py runs; what it measures is for people to read."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ("--ndf=4", "--n_rkhs=16", "--n_depth=1", "--batch_size=4")


def _run(*words):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "benchmark.py", *words],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, expected",
    [
        (("train", *TINY, "--steps=1"), "peak memory"),
        (("input", *TINY, "--seconds=0.1"), "ratio"),
    ],
)
def test_suites(words, expected):
    done = _run(*words)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_the_step_s_benchmark_is_of_one_device():
    done = _run("train", *TINY, "--replicas=2")
    assert done.returncode == 2 and "--strategy: expected one device here" in done.stderr


def test_an_unknown_suite():
    done = _run("speed")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "expected one of train, input" in done.stderr
