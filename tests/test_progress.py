"""Progress without a terminal: lines with the time that is left."""

import re

from amdim_tf import progress
from amdim_tf.progress import Progress


class _Clock:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def _left(capsys) -> list[str]:
    return re.findall(r"(\S+) left", capsys.readouterr().err)


def test_the_first_piece_of_work_is_no_measure_of_the_pace(monkeypatch, capsys):
    clock = _Clock(monkeypatch)
    bar = Progress(101, "train", "step", line_seconds=10)
    clock.now += 50  # compiling
    bar.advance()
    clock.now += 10
    bar.advance(10)
    # 100 times the 50 s of the first would be far off.
    assert _left(capsys) == ["01:30"]


def test_work_that_goes_on_counts_from_where_it_was(monkeypatch, capsys):
    clock = _Clock(monkeypatch)
    bar = Progress(200, "extract", "image", start=100, line_seconds=10)
    for _ in range(2):
        clock.now += 10
        bar.advance(25)
    assert _left(capsys) == ["00:20"]


def test_what_is_done_at_once_has_nothing_left(monkeypatch, capsys):
    clock = _Clock(monkeypatch)
    bar = Progress(5, "read", "image", line_seconds=10)
    clock.now += 10
    bar.advance(5)
    assert _left(capsys) == ["00:00"]


def test_nothing_done_prints_nothing(capsys):
    with Progress(5, "read", "image"):
        pass
    assert capsys.readouterr().err == ""
