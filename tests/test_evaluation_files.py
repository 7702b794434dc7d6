"""What an evaluation leaves behind: files, and TensorBoard's events."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf

from amdim_tf import evaluation_files
from amdim_tf.errors import UserError

LINEAR = {"accuracy": 0.7, "confusion": [[3, 1], [2, 4]]}
RESULTS = {"dataset": "scenes", "classes": ["a", "b"], "baselines": {}}


def _logged(model_dir):
    """{(tag, step)} of all events."""
    found = set()
    for path in (model_dir / "logs" / "evaluation").glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
            event = tf.compat.v1.Event.FromString(record)
            found |= {(value.tag, event.step) for value in event.summary.value}
    return found


def test_a_confusion_matrix_is_logged_at_its_own_step_only(tmp_path):
    evaluation_files.write(tmp_path, {**RESULTS, "step": 1, "linear": LINEAR})
    evaluation_files.write(tmp_path, {**RESULTS, "step": 2, "knn": {"accuracy": 0.6}})
    assert _logged(tmp_path) == {
        ("scenes/linear", 1), ("scenes/confusion", 1), ("scenes/knn", 2),
    }  # fmt: skip


def test_a_history_grows_and_nothing_is_left_aside(tmp_path):
    for step, accuracy in ((10, 0.5), (5, 0.4)):
        linear = {"linear": {"accuracy": accuracy}}
        evaluation_files.write(tmp_path, {**RESULTS, "step": step, **linear})
    evaluation_files.write(tmp_path, {**RESULTS, "step": 5, "knn": {"accuracy": 0.3}})
    directory = tmp_path / "evaluation"
    history = evaluation_files.read_history(directory / "scenes_history.csv")
    assert evaluation_files.comparable(history, RESULTS) == [
        {"step": 5, "linear": 0.4, "knn": 0.3}, {"step": 10, "linear": 0.5},
    ]  # fmt: skip
    assert json.loads((directory / "scenes.json").read_text())["step"] == 5
    names = {path.name for path in directory.iterdir()}
    assert names == {"scenes.json", "scenes_history.csv", "scenes_curve.png"}


def test_a_failure_to_write_leaves_the_file_before(tmp_path):
    evaluation_files.write(tmp_path, {**RESULTS, "step": 1, "linear": LINEAR})
    history = tmp_path / "evaluation" / "scenes_history.csv"
    history.unlink()
    history.mkdir()
    with pytest.raises(UserError, match=r"history\.csv: expected rows of numbers"):
        evaluation_files.write(tmp_path, {**RESULTS, "step": 2, "linear": LINEAR})
    assert not list(history.parent.glob("*.partial"))


def test_what_is_in_the_way_of_a_file_is_named(tmp_path):
    (tmp_path / "evaluation" / "scenes.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught:
        evaluation_files.write(tmp_path, {**RESULTS, "step": 1, "linear": LINEAR})
    assert caught.value.filename == str(tmp_path / "evaluation" / "scenes.json")
    assert not list((tmp_path / "evaluation").glob("*.partial"))


COMPLETE = {
    **RESULTS, "step": 3, "weights_sha256": "w", "seed": 0, "command": "a", "linear": LINEAR,
    "images_sha256": ["a", "b"],
}  # fmt: skip


def test_results_of_the_same_weights_are_put_together(tmp_path):
    segmented = {"7x7": {}, "upsampled": {}}
    pixels = {"pixels": {"knn": {"accuracy": 0.2}}}
    for results in (
        COMPLETE,
        {**COMPLETE, "command": "b", "linear": {"accuracy": 0.8}, "baselines": pixels},
        {**RESULTS, "step": 3, "weights_sha256": "w", "seed": 0, "command": "c", "classes": [],
         "segmentation": segmented},
    ):  # fmt: skip
        evaluation_files.write(tmp_path, results)
    path = tmp_path / "evaluation" / "scenes.json"
    found = json.loads(path.read_text())
    assert found["linear"] == {"accuracy": 0.8}
    assert (found["segmentation"], found["baselines"]) == (segmented, pixels)
    assert (found["command"], found["earlier_commands"]) == ("c", ["a", "b"])
    assert found["classes"] == ["a", "b"]
    others = {
        "weights_sha256": "v", "seed": 1, "classes": ["a", "c"], "data_dir": "/elsewhere",
        "probe_epochs": 2.0, "recalibrated_on": 250, "images_sha256": ["c", "d"],
    }  # fmt: skip
    for name, value in others.items():
        path.write_text(json.dumps(COMPLETE))
        other = {**COMPLETE, "knn": {"accuracy": 0.6}, name: value}
        del other["linear"]
        evaluation_files.write(tmp_path, other)
        assert "linear" not in json.loads(path.read_text()), name
    for damaged in ("[1]", "[" * 10_000, json.dumps({**COMPLETE, "earlier_commands": [[]]})):
        path.write_text(damaged)
        evaluation_files.write(tmp_path, COMPLETE)
        assert json.loads(path.read_text()) == COMPLETE


def test_evaluations_that_end_at_once_lose_nothing(tmp_path):
    # Without charts and events, which take most of the time, they often write at the same moment.
    program = (
        "import sys; from amdim_tf import evaluation_files as files\n"
        "files.charts.learning_curve = files._log = lambda *_: None\n"
        "for step in range(int(sys.argv[2]), 80, 2):\n"
        "    results = {'dataset': 'd', 'step': step, 'knn': {'accuracy': 0.5}}\n"
        "    files.write(sys.argv[1], {**results, 'baselines': {}})\n"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path), first])
        for first in ("0", "1")
    ]
    assert [run.wait() for run in runs] == [0, 0]
    history = evaluation_files.read_history(tmp_path / "evaluation" / "d_history.csv")
    assert [row["step"] for row in history] == list(range(80))


@pytest.mark.parametrize(
    "contents", [b"\x00\xff,\x81\n1,2\n", b"step,linear\n1,0.5\nx,1\n", b"no table"]
)
def test_a_damaged_history_is_kept_aside(tmp_path, contents, capsys):
    directory = tmp_path / "evaluation"
    directory.mkdir()
    (directory / "scenes_history.csv").write_bytes(contents)
    evaluation_files.write(tmp_path, COMPLETE)
    assert "expected a head and rows of numbers" in capsys.readouterr().err
    assert (directory / "scenes_history.csv.damaged").read_bytes() == contents
    evaluation_files.write(tmp_path, {**COMPLETE, "step": 4})
    assert not capsys.readouterr().err
    assert (directory / "scenes_history.csv.damaged").read_bytes() == contents


def test_a_file_in_the_place_of_the_logs_gets_one_line(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "evaluation").write_text("no directory")
    with pytest.raises(UserError, match="logs/evaluation: expected a directory") as caught:
        evaluation_files.write(tmp_path, {**RESULTS, "step": 1, "linear": LINEAR})
    assert len(str(caught.value).splitlines()) == 1
    assert "[Op" not in str(caught.value)
    assert (tmp_path / "evaluation" / "scenes.json").exists()


def test_a_damaged_history_loses_its_odd_rows_only(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("step,linear\n1,0.5\nx,1\n2,nan\n3,inf\n4,1e300\n5\n6,0.6,7,8\n7,0.7\n")
    rows = evaluation_files.comparable(evaluation_files.read_history(path), {"probe_training": ""})
    assert rows == [{"step": 1, "linear": 0.5}, {"step": 5}, {"step": 7, "linear": 0.7}]
    path.write_text("step,linear\n1," + "9" * 200_000)
    with pytest.raises(UserError, match=r"history\.csv: expected rows of numbers"):
        evaluation_files.read_history(path)


def test_results_of_other_images_or_protocols_are_not_mixed(tmp_path):
    one = {**RESULTS, "step": 1, "data_dir": "/a", "linear": {"accuracy": 0.9}}
    other = {**RESULTS, "step": 1, "data_dir": "/b", "knn": {"accuracy": 0.2}}
    augmented = {**one, "probe_training": "augmented", "linear": {"accuracy": 0.8}}
    for results in (one, other, augmented):
        evaluation_files.write(tmp_path, results)
    history = evaluation_files.read_history(tmp_path / "evaluation" / "scenes_history.csv")
    for results, row in (
        (one, {"linear": 0.9}),
        (other, {"knn": 0.2}),
        (augmented, {"linear": 0.8}),
    ):
        assert evaluation_files.comparable(history, results) == [{"step": 1, **row}]


def test_a_pipe_in_the_place_of_a_table_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.csv")
    with pytest.raises(UserError, match=r"metrics\.csv: expected rows of numbers.*regular file"):
        evaluation_files.read_table(tmp_path / "metrics.csv")
