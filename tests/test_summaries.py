"""metrics.csv, TensorBoard events, and the means that go into them."""

import csv
import glob
import math

import numpy as np
import pytest
import tensorflow as tf

from amdim_tf.summaries import MetricsLog, average, image_grid


def _events(directory):
    """Tag -> list of (step, tensor) of all event files."""
    found = {}
    for path in sorted(glob.glob(f"{directory}/logs/*")):
        for record in tf.data.TFRecordDataset(path):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.tensor))
    return found


def _rows(directory):
    with open(directory / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_average_of_figures_and_counts():
    window = [
        {"loss": tf.constant(1.0), "mlp_correct": tf.constant(1.0), "labelled": tf.constant(2.0)},
        {"loss": tf.constant(3.0), "mlp_correct": tf.constant(6.0), "labelled": tf.constant(8.0)},
    ]
    assert average(window) == {"loss": 2.0, "mlp_accuracy": 0.7}
    unlabelled = [{"mlp_correct": tf.constant(0.0), "labelled": tf.constant(0.0)}]
    assert math.isnan(average(unlabelled)["mlp_accuracy"])


def test_rows_and_scalars(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(10, {"loss": 2.5}, seconds=4.0)
    log.write(20, {"loss": 1.5}, seconds=3.0)
    log.close()
    rows = _rows(tmp_path)
    assert [(row["step"], row["loss"], row["seconds"]) for row in rows] == [
        ("10", "2.5", "4"), ("20", "1.5", "7"),
    ]  # fmt: skip
    events = _events(tmp_path)
    values = [(step, float(tf.make_ndarray(value))) for step, value in events["loss"]]
    assert values == [(10, 2.5), (20, 1.5)]


def test_rows_of_steps_made_again_are_dropped(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (10, 20, 30):
        log.write(step, {"loss": float(step)}, seconds=1.0)
    log.close()
    log = MetricsLog(tmp_path, 20)
    log.write(30, {"loss": 99.0}, seconds=1.0)
    log.close()
    assert [(row["step"], row["loss"], row["seconds"]) for row in _rows(tmp_path)] == [
        ("10", "10", "1"), ("20", "20", "2"), ("30", "99", "3"),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "step", "garbage\n1,2\n", "step,seconds\n1,x\n", "\x00\n"])
def test_damaged_rows_do_not_stop_a_run(tmp_path, text):
    (tmp_path / "metrics.csv").write_text(text)
    log = MetricsLog(tmp_path, 5)
    log.write(6, {"loss": 1.0}, seconds=1.0)
    log.close()
    assert [row["step"] for row in _rows(tmp_path)][-1] == "6"


def test_views_are_shown_side_by_side(tmp_path):
    log = MetricsLog(tmp_path, 0)
    view1, view2 = np.full([4, 8, 8, 3], 10, np.uint8), np.full([4, 8, 8, 3], 200, np.uint8)
    log.write_views(1, view1, view2)
    log.close()
    width, height, encoded = tf.make_ndarray(_events(tmp_path)["views"][0][1])[:3]
    image = tf.io.decode_png(encoded).numpy()
    assert image.shape == (10, 72, 3) == (int(height), int(width), 3)
    assert (image[5, 4] == 10).all() and (image[5, 12] == 200).all() and (image[0] == 255).all()


def test_image_grid_fills_the_last_row_with_white():
    grid = image_grid(np.zeros([3, 2, 2, 3], np.uint8), columns=2)
    assert grid.shape == (8, 8, 3)
    assert (grid[4:, 4:] == 255).all() and (grid[5, 1] == 0).all()
