"""The training program as a user runs it: real processes, flag files, mistakes, resume."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf
from pictures import picture, write_tree

from amdim_tf import config as config_lib
from amdim_tf import config_file, training_loop
from amdim_tf.errors import UserError

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.cfg"))
TINY = [
    "--dataset=scenes",
    "--ndf=4",
    "--n_rkhs=16",
    "--n_depth=1",
    "--batch_size=8",
    "--log_steps=2",
]


def run(program, *flags, code=0):
    """Runs python -m amdim_tf.PROGRAM and checks its exit code."""
    done = subprocess.run(
        [sys.executable, "-m", f"amdim_tf.{program}", *flags],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def refused(program, *flags):
    """Runs a program that must refuse its flags; returns its one line of error."""
    done = run(program, *flags, code=2)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_flag_file_makes_a_config(path):
    code = (
        "import json, sys; from amdim_tf import cli_flags, config;"
        "cli_flags.define_config_flags(); cli_flags.FLAGS(sys.argv);"
        "print(json.dumps(config.settings_of(config.make(cli_flags.given_settings()))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"--flagfile={path}"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)
    assert settings["dataset"] in path.read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_flag_file_opens_with_what_it_is(path):
    lines = path.read_text().splitlines()
    header = " ".join(line for line in lines if line.startswith("#"))
    assert lines[0].startswith("# ")
    assert "amdim_tf.train --flagfile=configs/" in header.replace("# ", "")
    assert "hour" in header or "minute" in header or "days" in header
    assert "aper" in header or path.stem == "quickstart"


def test_the_configs_are_all_there():
    names = {str(path.relative_to(ROOT / "configs")) for path in CONFIGS}
    expected = "quickstart cifar10 cifar10_small cifar100 stl10 imagenet imagenet_large places205"
    ablations = (
        "local_dim single_scale no_color_jitter no_grayscale no_random_crop no_stabilization "
        "strong_augmentation"
    )
    assert {f"{name}.cfg" for name in expected.split()} <= names
    assert {f"ablations/{name}.cfg" for name in ablations.split()} <= names


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--model_dir"),
        (["--batch_size=many"], "--batch_size: expected a whole number. Received: many."),
        (["--learning_rate="], "--learning_rate: expected a number. Received: nothing."),
        (["--use_bn=3"], "--use_bn: expected true or false. Received: 3."),
        (["--nouse_bn=3"], "--nouse_bn=3"),
        (["--flagfile=tests/data/reference_32.npz"], "tests/data/reference_32.npz"),
        (["--flagfile=configs/cifar10.cfg", "--train_steps=5"], "--epochs=0 or --train_steps=0"),
        (["--model_dir=gs://bucket/run"], "--model_dir: expected a directory of this machine"),
        (["--model_dir=" + 300 * "a"], "File name too long"),
        (["--model_dir=a\udcff"], "--model_dir: expected a name in UTF-8"),
        (["--batch_size=1"], "--batch_size"),
        (["--no_such_flag=1"], "no_such_flag"),
        (["--dataset=mnist"], "--dataset: expected one of scenes"),
        (["--image_size=48"], "--image_size: expected one of 32, 64, 128. Received: 48."),
        (["--tasks=1to9"], "--tasks"),
        (["--nce_block=" + 5000 * "9"], "--nce_block: expected auto, or a number"),
        (["--crop_scale=a,b"], "--crop_scale: expected numbers with commas between them"),
        (["--flagfile=configs/none.cfg"], "--flagfile: expected a file of flags. Received: "),
        (["--policy=none.json"], "none.json"),
        (["--dataset=folder"], "--data_dir"),
        (["--model_dir=runs/a*"], "--model_dir"),
        (["--model_dir=runs/run[1]"], "--model_dir"),
        (["stray"], "stray"),
    ],
)
def test_mistakes_get_one_line(flags, named, tmp_path):
    model_dir = [f"--model_dir={tmp_path / 'run'}", "--dataset=scenes"] if flags else []
    assert named in refused("train", *model_dir, *flags)
    assert not (tmp_path / "run").exists()


def test_a_batch_larger_than_the_data(tmp_path):
    line = refused("train", f"--model_dir={tmp_path / 'run'}", *TINY, "--batch_size=30000")
    assert "--batch_size: expected at most 20000" in line and "30000" in line
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    line = refused("train", f"--model_dir={tmp_path / 'file' / 'run'}", *TINY)
    assert "--model_dir" in line and str(tmp_path / "file" / "run") in line


@pytest.mark.slow
def test_train_resume_and_contradict(tmp_path, monkeypatch):
    model_dir, temporary = tmp_path / "run", tmp_path / "temporary"
    flags = [f"--model_dir={model_dir}", *TINY, "--checkpoint_steps=2"]
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    run("train", *flags, "--train_steps=4")
    assert not list(temporary.iterdir())  # where AutoGraph writes
    assert {path.name for path in model_dir.iterdir()} == {
        "checkpoints", "config.json", "lock", "logs", "metrics.csv",
    }  # fmt: skip
    first_rows = (model_dir / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in first_rows] == ["step", "2", "4"]
    header = first_rows[0].split(",")
    for name in ("loss_1to5", "loss_1to7", "loss_5to5", "linear_accuracy", "mlp_accuracy",
                 "learning_rate", "gradient_norm", "images_per_second"):  # fmt: skip
        assert name in header

    done = run("train", *flags, "--train_steps=4")
    assert "already trained for 4 of 4 steps" in done.stdout

    # Nothing but the directory and what changes has to be said again.
    done = run("train", f"--model_dir={model_dir}", "--train_steps=6")
    assert "steps 4 to 6" in done.stdout and "parameters, on the CPU.\n" in done.stdout
    assert "--train_steps: 6 from here on (before: 4)." in done.stdout
    rows = (model_dir / "metrics.csv").read_text().splitlines()
    assert rows[:3] == first_rows
    assert [row.split(",")[0] for row in rows[3:]] == ["6"]
    document = json.loads((model_dir / "config.json").read_text())
    assert document["training"]["train_steps"] == 6
    assert [start["step"] for start in document["starts"]] == [0, 4, 4]
    assert document["starts"][2]["changes"] == {"train_steps": [4, 6]}
    assert "--train_steps=6" in document["starts"][2]["command"]
    assert document["starts"][0]["versions"]["tensorflow"] == tf.__version__
    assert document["starts"][0]["seed"] == 0

    before = sorted(path.name for path in (model_dir / "checkpoints").iterdir())
    line = refused("train", f"--model_dir={model_dir}", "--ndf=2", "--n_rkhs=8")
    assert "--ndf=2 (there: 4)" in line and "--n_rkhs=8 (there: 16)" in line
    # Also where the flag contradicts what the run has.
    assert "--ndf=64 (there: 4)" in refused("train", f"--model_dir={model_dir}", "--ndf=64")
    assert sorted(path.name for path in (model_dir / "checkpoints").iterdir()) == before


def test_a_new_run_needs_a_data_set(tmp_path):
    assert "--dataset" in refused("train", f"--model_dir={tmp_path / 'typo'}")


def _stopped_by(number, model_dir, *flags):
    """Starts a run, sends it a signal after its next row; returns where it began and stopped."""
    command = [sys.executable, "-m", "amdim_tf.train", f"--model_dir={model_dir}", *flags]
    metrics = model_dir / "metrics.csv"
    before = metrics.stat().st_size if metrics.exists() else 0
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size > before):
        time.sleep(0.1)
    process.send_signal(number)
    told, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    began = int(re.search(r"steps (\d+) to 100000", told)[1])
    return began, int(re.search(rf"Stopped by {number.name} after step (\d+)", errors)[1])


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path):
    flags = [*TINY, "--train_steps=100000"]
    _, interrupted = _stopped_by(signal.SIGINT, tmp_path, *flags)
    began, stopped = _stopped_by(signal.SIGTERM, tmp_path, *flags)
    assert began == interrupted < stopped
    assert (tmp_path / "checkpoints" / f"step-{stopped:08d}" / "manifest.json").exists()


@pytest.mark.slow
def test_a_signal_while_tensorflow_is_imported_waits_for_the_first_step(tmp_path):
    command = [sys.executable, "-m", "amdim_tf.train", f"--model_dir={tmp_path}", *TINY]
    process = subprocess.Popen(
        [*command, "--train_steps=100000"], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    # The mask of signals that have a handler; TensorFlow's import, seconds long, comes after it.
    status, handled = pathlib.Path(f"/proc/{process.pid}/status"), 0
    while not handled >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.01)
        handled = int(re.search(r"SigCgt:\s*(\w+)", status.read_text())[1], 16)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "Stopped by SIGTERM after step 1" in errors
    assert (tmp_path / "checkpoints" / "step-00000001").exists()


def test_a_run_goes_on_with_its_classes_only(tmp_path):
    numbers = [(name, index) for name in "abc" for index in (1, 2)]
    settings = {
        "dataset": "folder", "image_size": 32, "evaluation_resize": 32, "ndf": 4, "n_rkhs": 16,
        "n_depth": 1, "batch_size": 2, "train_steps": 1,
    }  # fmt: skip

    def train(name):
        config = config_lib.make({**settings, "data_dir": str(tmp_path / name)})
        training_loop.train(config, tmp_path / "run")

    for directory, folder in {
        "first": "train/{}", "renamed": "train/x{}", "fewer": "train/a", "unlabelled": "."
    }.items():  # fmt: skip
        files = {
            f"{folder.format(name)}/{name}{index}.png": picture(32, 32, index)
            for name, index in numbers
        }
        write_tree(tmp_path / directory, files)
    train("first")
    expected = "expected the 3 classes that the run began with"
    for name, received in (
        ("renamed", "3, without 'a', 'b', 'c' and with 'xa', 'xb', 'xc'"),
        ("fewer", "1, without 'b', 'c'"),
        ("unlabelled", "0, without 'a', 'b', 'c'"),
    ):
        with pytest.raises(UserError, match=f"{expected}.*Received: {received}"):
            train(name)


def test_a_run_without_checkpoint_can_begin_again(tmp_path):
    (tmp_path / "config.json").write_text("left behind")
    run("train", f"--model_dir={tmp_path}", *TINY, "--train_steps=1")
    assert (tmp_path / "checkpoints" / "step-00000001").exists()


def _config_of(model_dir, *flags):
    """The settings that `train` would use, without training."""
    code = (
        "import json, sys; from amdim_tf import cli_flags, config, train;"
        "cli_flags.FLAGS(sys.argv);"
        "model_dir = cli_flags.require_model_dir('a directory');"
        "print(json.dumps(config.settings_of(cli_flags.training_config(model_dir))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, f"--model_dir={model_dir}", *flags],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "HOME": "/home/somebody"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_that_has_no_checkpoint_yet_keeps_its_settings(tmp_path):
    config = config_lib.make({"dataset": "scenes", "ndf": 8, "train_steps": 100})
    config_file.save(config, config_file.path_in(tmp_path), {"classes": []})
    settings = _config_of(tmp_path)
    assert (settings["ndf"], settings["train_steps"]) == (8, 100)


def test_epochs_win_over_steps_that_were_saved(tmp_path):
    config = config_lib.make({"dataset": "scenes", "train_steps": 100})
    config_file.save(config, config_file.path_in(tmp_path), {"classes": []})
    (config_file.checkpoints_in(tmp_path) / "step-00000100").mkdir(parents=True)
    assert _config_of(tmp_path)["train_steps"] == 100
    settings = _config_of(tmp_path, "--epochs=3")
    assert (settings["epochs"], settings["train_steps"]) == (3.0, 0)


def test_steps_in_the_place_of_a_flag_files_epochs(tmp_path):
    settings = _config_of(
        tmp_path, f"--flagfile={ROOT / 'configs' / 'cifar10.cfg'}", "--train_steps=5", "--epochs=0"
    )
    assert settings["train_steps"] == 5


def test_a_tilde_is_the_home_directory(tmp_path):
    settings = _config_of(tmp_path, "--dataset=folder", "--data_dir=~/images")
    assert settings["data_dir"] == "/home/somebody/images"


@pytest.mark.parametrize("program", ["evaluate", "export", "visualize"])
def test_the_flag_file_of_a_run_may_be_given_again(program, tmp_path):
    """Every program takes it; what contradicts the run's model is refused."""
    config = config_lib.make({"dataset": "scenes", "ndf": 8, "n_rkhs": 256, "n_depth": 3})
    config_file.save(config, config_file.path_in(tmp_path), {"classes": []})
    flags = [f"--flagfile={ROOT / 'configs' / 'quickstart.cfg'}", f"--model_dir={tmp_path}"]
    if program != "evaluate":
        flags.append(f"--output_dir={tmp_path / 'out'}")
    if program == "visualize":
        flags.append("--figures=embedding")
    assert "--ndf=32 (there: 8)" in refused(program, *flags)
    assert "expected a checkpoint" in refused(program, *flags, "--ndf=8")


def test_output_that_cannot_be_printed(tmp_path):
    """To a full disk, and to a reader who has left: one line, or none, and no traceback."""
    code = "from amdim_tf import cli_flags; cli_flags.run(lambda: print('x' * 100000))"
    full = (
        "error: a file, or standard output: No space left on device. Make room, and run the same "
        "command again.\n"
    )
    for shell, line, status in (
        (">&-", "", 0),
        ("2>&-", "", 0),
        ("> /dev/full", full, 2),
        ("| true", "", 141),
    ):
        words = f'set -o pipefail; "$0" -c "$1" {shell}'
        done = subprocess.run(
            ["bash", "-c", words, sys.executable, code], capture_output=True, text=True, cwd=ROOT
        )
        assert (done.stderr, done.returncode) == (line, status)


def test_keras_settings_of_the_user_do_not_matter(tmp_path):
    (tmp_path / "keras.json").write_text(
        '{"image_data_format": "channels_first", "floatx": "float16", "backend": "jax"}'
    )
    code = (
        "import numpy as np; from amdim_tf import checkpoints, config;"
        "model = checkpoints.build_model(config.make({'ndf': 2, 'n_rkhs': 8, 'n_depth': 1}), 0);"
        "print(model.encode(np.zeros([1, 32, 32, 3], np.float32))['f7'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "KERAS_HOME": str(tmp_path)},
    )  # fmt: skip
    assert "shape=(1, 7, 7, 8), dtype=float32" in done.stdout, done.stderr


def test_help_lists_the_settings():
    text = run("train", "--help").stdout
    for name in ("--dataset", "--tasks", "--crop_scale", "--model_dir"):
        assert name in text
