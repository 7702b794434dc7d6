"""Charts: they are written whole, and the same numbers give the same bytes."""

import resource

import numpy as np
import pytest
from PIL import Image

from amdim_tf import charts

HISTORY = [{"step": 10, "linear": 0.3}, {"step": 20, "linear": 0.5, "knn": 0.4}]


def test_confusion_matrix_of_few_and_of_many_classes(tmp_path):
    for classes in (2, 60):
        path = tmp_path / f"{classes}.png"
        counts = np.eye(classes, dtype=int) * 5
        names = [f"class {k}" for k in range(classes)]
        charts.confusion_matrix(counts.tolist(), names, "title", path)
        assert np.asarray(Image.open(path).convert("RGB")).std() > 10


@pytest.mark.parametrize("name", ["$\\frac$", "a$_$b", "not Unicode \udc80"])
def test_odd_names_are_drawn(tmp_path, name):
    charts.confusion_matrix([[1, 0], [0, 1]], [name, "b"], name, tmp_path / "confusion.png")
    charts.lines({name: [(1, 2)]}, "x", "y", name, tmp_path / "lines.png")
    charts.neighbours(np.zeros([8, 8, 3], np.uint8), [(name, None)], tmp_path / "found.png")
    assert len(list(tmp_path.iterdir())) == 3


def test_learning_curve_is_the_same_for_the_same_numbers(tmp_path):
    first, second = tmp_path / "first.png", tmp_path / "second.png"
    for path in (first, second):
        charts.learning_curve(HISTORY, path)
    assert first.read_bytes() == second.read_bytes()
    charts.learning_curve(HISTORY[:1], second)
    assert first.read_bytes() != second.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.png", "second.png"]


def test_learning_curve_has_hours_where_they_are_known(tmp_path):
    charts.learning_curve(HISTORY, tmp_path / "steps.png")
    with_hours = [{**row, "hours": row["step"] / 60} for row in HISTORY]
    charts.learning_curve(with_hours, tmp_path / "hours.png")
    charts.learning_curve([with_hours[0], HISTORY[1]], tmp_path / "mixed.png")
    steps, hours, mixed = (
        (tmp_path / f"{name}.png").read_bytes() for name in ("steps", "hours", "mixed")
    )
    assert steps != hours and steps == mixed


def test_a_full_disk_leaves_the_chart_before(tmp_path):
    path = tmp_path / "curve.png"
    charts.learning_curve(HISTORY, path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            charts.learning_curve(HISTORY[:1], path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
