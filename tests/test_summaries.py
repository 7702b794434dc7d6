"""metrics.csv, TensorBoard events, and the means that go into them."""

import csv
import glob
import math
import os

import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import plugin_event_accumulator

from amdim_tf.errors import UserError
from amdim_tf.summaries import MetricsLog, Window, average, image_grid, training_hours


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


def test_a_pipe_in_the_place_of_metrics_is_not_waited_for(tmp_path):
    log = MetricsLog(tmp_path, 0)
    log.write(1, {"loss": 1.0}, 1.0)
    (tmp_path / "metrics.csv").unlink()
    os.mkfifo(tmp_path / "metrics.csv")
    with pytest.raises(OSError):
        log.write(2, {"loss": 1.0}, 1.0)
    log.close()


def test_hours_of_training_until_a_step(tmp_path):
    assert training_hours(tmp_path, 5) is None
    log = MetricsLog(tmp_path, 0)
    log.write(10, {"loss": 1.0}, 3600)
    log.write(20, {"loss": 1.0}, 7200)
    log.close()
    assert [training_hours(tmp_path, step) for step in (5, 10, 15, 20, 40)] == [0.5, 1, 2, 3, 6]
    assert training_hours(tmp_path, 0) is None
    (tmp_path / "metrics.csv").write_text("nothing of ours")
    assert training_hours(tmp_path, 5) is None


def test_average_of_figures_and_counts():
    columns = {
        "loss": np.array([1.0, 3.0]),
        "mlp_correct": np.array([1.0, 6.0]),
        "labelled": np.array([2.0, 8.0]),
    }
    assert average(columns) == {"loss": 2.0, "mlp_accuracy": 0.7, "nonfinite_steps": 0}
    unlabelled = {"mlp_correct": np.zeros(1), "labelled": np.zeros(1)}
    assert math.isnan(average(unlabelled)["mlp_accuracy"])


def test_steps_that_are_not_finite_are_counted_and_left_out():
    columns = {"loss": np.array([1.0, np.nan, 2.0]), "nonfinite": np.array([0.0, 1.0, 0.0])}
    assert average(columns) == {"loss": 1.5, "nonfinite_steps": 1}
    columns = {"gradient_norm": np.array([1, np.inf]), "loss": np.array([3.0, 5.0])}
    withheld = average({**columns, "overflow": np.array([0.0, 1.0])})
    assert withheld == {"gradient_norm": 1, "loss": 4, "nonfinite_steps": 0, "overflow_steps": 1}
    none_left = average({"loss": np.array([np.inf]), "nonfinite": np.ones(1)})
    assert math.isnan(none_left["loss"]) and none_left["nonfinite_steps"] == 1


def test_a_window_goes_on_where_it_was_saved():
    steps = [{"loss": tf.constant(float(i)), "labelled": tf.constant(8.0)} for i in range(5)]
    whole, first = Window({}), Window({})
    for logs in steps:
        whole.add(logs)
    for logs in steps[:3]:
        first.add(logs)
    second = Window(first.arrays())
    for logs in steps[3:]:
        second.add(logs)
    for name, values in whole.arrays().items():
        np.testing.assert_array_equal(second.arrays()[name], values)


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


def test_tensorboard_forgets_steps_that_are_made_again(tmp_path):
    for step, values in ((0, (10, 20, 30)), (15, (20, 30))):
        log = MetricsLog(tmp_path, step)
        for value in values:
            log.write(value, {"loss": float(value + step)}, seconds=1.0)
        log.close()
    accumulator = plugin_event_accumulator.EventAccumulator(str(tmp_path / "logs"))
    accumulator.Reload()
    shown = [
        (event.step, float(tf.make_ndarray(event.tensor_proto)))
        for event in accumulator.Tensors("loss")
    ]
    assert shown == [(10, 10.0), (20, 35.0), (30, 45.0)]


def test_a_pipe_in_place_of_rows_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "metrics.csv")
    log = MetricsLog(tmp_path, 5)
    log.write(6, {"loss": 1.0}, seconds=1.0)
    log.close()
    assert [row["step"] for row in _rows(tmp_path)] == ["6"]


def test_damaged_rows_are_kept_each_time(tmp_path):
    for text in ("first", "second", "third"):
        (tmp_path / "metrics.csv").write_text(text)
        MetricsLog(tmp_path, 5).close()
    kept = {path.name: path.read_text() for path in tmp_path.glob("metrics.csv*")}
    assert kept == {
        "metrics.csv.damaged": "first",
        "metrics.csv.damaged-2": "second",
        "metrics.csv.damaged-3": "third",
    }


def test_links_are_not_written_through(tmp_path):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("step,seconds,loss\n1,1,1\n")
    run.mkdir()
    for name in ("metrics.csv", "metrics.csv.partial"):
        (run / name).symlink_to(victim)
    log = MetricsLog(run, 5)
    log.write(6, {"loss": 1.0}, seconds=1.0)
    log.close()
    assert victim.read_text() == "step,seconds,loss\n1,1,1\n"
    assert [row["step"] for row in _rows(run)] == ["1", "6"]
    assert {path.name for path in run.iterdir()} == {"metrics.csv", "logs"}


def test_a_file_in_place_of_the_logs(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(UserError, match="logs: expected a directory"):
        MetricsLog(tmp_path, 0)


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
