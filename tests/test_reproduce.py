"""tools/reproduce.py: a suite of two small runs, done once, tabulated, and stopped by a failure."""

import json
import os
import pathlib

import pytest
from pictures import picture, write_tree

from amdim_tf.errors import UserError

TINY = """--dataset=folder
--image_size=32
--ndf=4
--n_rkhs=16
--n_depth=1
--batch_size=4
--train_steps=2
"""


@pytest.fixture
def reproduce(monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parent.parent / "tools"))
    import reproduce

    return reproduce


@pytest.fixture
def suite(reproduce, tmp_path):
    """A baseline and one change, on the first images of two classes."""
    files = {
        f"{split}/{name}/{number}.jpg": picture(32, 32, seed=number)
        for split in ("train", "test")
        for name in ("cat", "dog")
        for number in range(8)
    }
    write_tree(tmp_path / "images", files)
    (tmp_path / "tiny.cfg").write_text(TINY)
    settings = (
        reproduce.Setting("baseline", (), "the others are compared with it"),
        reproduce.Setting("no grayscale", ("--grayscale=0",), "lower"),
    )
    per_class = {"train": 6, "test": 5}
    return reproduce.Suite(str(tmp_path / "tiny.cfg"), per_class, (3,), settings)


def _run(reproduce, suite, tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    reproduce.run_suite(suite, tmp_path / "images", tmp_path / "runs", [cores[:1], cores[-1:]])
    return json.loads((tmp_path / "runs" / "table.json").read_text())


@pytest.mark.slow
def test_a_suite_is_run_once_and_tabulated(reproduce, suite, tmp_path, monkeypatch, capsys):
    rows = _run(reproduce, suite, tmp_path)
    assert [row["name"] for row in rows] == ["baseline", "no grayscale"]
    for row in rows:
        (accuracy,) = row["linear"]
        assert 0 <= accuracy <= 100 and row["mean"] == accuracy
    assert rows[1]["difference"] == pytest.approx(rows[1]["mean"] - rows[0]["mean"])
    config = json.loads((tmp_path / "runs" / "no_grayscale-seed3" / "config.json").read_text())
    assert '"grayscale": 0.0' in json.dumps(config) and '"seed": 3' in json.dumps(config)
    assert len(list((tmp_path / "runs" / "data").rglob("*.jpg"))) == 2 * (6 + 5)
    assert "| no grayscale |" in (tmp_path / "runs" / "table.md").read_text()

    monkeypatch.setattr(reproduce, "_Job", None)  # nothing is left to be started
    assert _run(reproduce, suite, tmp_path) == rows
    assert "2 of 2 runs are done" in capsys.readouterr().out
    (tmp_path / "tiny.cfg").write_text(TINY + "--epochs=0\n")
    with pytest.raises(UserError, match=r"--output_dir: .* other values of .*tiny.cfg"):
        _run(reproduce, suite, tmp_path)


@pytest.mark.slow
def test_a_run_that_fails_is_named(reproduce, suite, tmp_path):
    broken = suite.settings[1]._replace(flags=("--grayscale=7",))
    with pytest.raises(UserError, match="no_grayscale-seed3: expected the run to finish") as error:
        _run(reproduce, suite._replace(settings=(broken,)), tmp_path)
    assert "--grayscale" in str(error.value) and "\n" not in str(error.value)


def test_a_run_is_compared_with_the_baseline_of_its_own_seed(reproduce, suite, tmp_path):
    suite = suite._replace(seeds=(0, 1))
    runs = [reproduce.Run(setting, seed) for seed in (0, 1) for setting in suite.settings]
    for run, accuracy in zip(runs, (0.6, 0.65, 0.5), strict=False):  # one is not done yet
        results = {"linear": {"accuracy": accuracy}}
        write_tree(tmp_path, {f"{run.name}/evaluation/folder.json": json.dumps(results).encode()})
    reproduce._write_tables(suite, runs, tmp_path)
    base, change = json.loads((tmp_path / "table.json").read_text())
    assert base["linear"] == [60, 50] and base["mean"] == 55 and base["difference"] == 0
    assert change["linear"] == [65] and change["mean"] == 65 and change["difference"] == 5


@pytest.mark.parametrize("accuracy", ["NaN", "57.3", "-1", "true", '"0.6"', "[" * 100_000])
def test_figures_that_are_none_are_refused(reproduce, tmp_path, accuracy):
    contents = f'{{"linear": {{"accuracy": {accuracy}}}}}'.encode()
    write_tree(tmp_path, {"evaluation/folder.json": contents})
    with pytest.raises(UserError, match=r"folder.json: expected results of amdim_tf.evaluate"):
        reproduce._accuracy(tmp_path)


def test_too_few_images(reproduce, suite, tmp_path):
    suite = suite._replace(images_per_class={"train": 6, "test": 9})
    with pytest.raises(UserError, match=r"--data_dir: expected at least 9 images in .*test/cat"):
        _run(reproduce, suite, tmp_path)
    assert not list((tmp_path / "runs").iterdir())


def test_a_folder_without_classes(reproduce, suite, tmp_path):
    write_tree(tmp_path / "empty", {"train/cat/0.jpg": picture(32, 32)})
    with pytest.raises(UserError, match=r"--data_dir: expected .* with a directory of images"):
        reproduce.run_suite(suite, tmp_path / "empty", tmp_path / "runs", [[0]])
    assert not list((tmp_path / "runs").iterdir())  # so that another --data_dir can be given
