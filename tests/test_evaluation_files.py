"""What an evaluation leaves behind: files, and TensorBoard's events."""

import json

import pytest
import tensorflow as tf

from amdim_tf import evaluation_files

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
    assert evaluation_files.read_history(directory / "scenes_history.csv") == [
        {"step": 5, "linear": 0.4, "knn": 0.3}, {"step": 10, "linear": 0.5},
    ]  # fmt: skip
    assert json.loads((directory / "scenes.json").read_text())["step"] == 5
    names = {path.name for path in directory.iterdir()}
    assert names == {"scenes.json", "scenes_history.csv", "scenes_curve.png"}


def test_a_failure_to_write_leaves_the_file_before(tmp_path):
    evaluation_files.write(tmp_path, {**RESULTS, "step": 1, "linear": LINEAR})
    history = tmp_path / "evaluation" / "scenes_history.csv"
    history.unlink()
    history.mkdir()  # a rename onto it fails
    with pytest.raises(OSError):
        evaluation_files.write(tmp_path, {**RESULTS, "step": 2, "linear": LINEAR})
    assert not list(history.parent.glob("*.partial"))
