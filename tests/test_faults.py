"""What must not harm a run: kills, a full or read-only disk, a second process, bad numbers."""

import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tensorflow as tf
from test_model import make_batch, make_model

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import fault_test

from amdim_tf import config as config_lib
from amdim_tf import config_file, run_lock, training_loop
from amdim_tf.errors import UserError

# Views that need no compilation: a process starts sooner.
PLAIN = ("--augmentation=none", "--nouse_bn")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of pictures."""
    folder = tmp_path_factory.mktemp("faults") / "images"
    fault_test.make_images(folder)
    return folder


@pytest.mark.slow
def test_a_run_that_is_killed_ends_like_one_that_is_not(tmp_path, images):
    """The long form is `python tools/fault_test.py kill`."""
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    fault_test.finish(fault_test.command(alone, images, 40, *PLAIN))
    signals = [signal.SIGKILL, signal.SIGTERM]
    words = fault_test.command(stopped, images, 40, *PLAIN)
    fault_test.stop_often(words, stopped, signals, random.Random(0))
    assert fault_test.end_state(stopped) == fault_test.end_state(alone)


def _train(model_dir, images, **settings):
    config = config_lib.make(
        {
            "dataset": "folder", "data_dir": str(images), "image_size": 32, "ndf": 4, "n_rkhs": 16,
            "n_depth": 1, "batch_size": 8, "warmup_steps": 0, "augmentation": "none",
            "log_steps": 2, **settings,
        }
    )  # fmt: skip
    return training_loop.train(config, model_dir)


def test_a_step_that_is_not_finite_changes_nothing():
    model = make_model(warmup_steps=0)
    step, batch = tf.function(model.train_step), make_batch()
    variables = [*model.variables, *model.optimizer.variables]
    assert float(step(batch)["nonfinite"]) == 0

    def assert_step_is_withheld(batch):
        before = [variable.numpy() for variable in variables]
        assert float(step(batch)["nonfinite"]) == 1
        for value, variable in zip(before, variables, strict=True):
            counted = variable is model.optimizer.iterations
            np.testing.assert_array_equal(variable.numpy(), value + 1 if counted else value)

    view = tf.concat([batch["view1"][:1] * np.nan, batch["view1"][1:]], axis=0)
    assert_step_is_withheld({**batch, "view1": view})
    model.linear.trainable_variables[0].assign_add([[np.inf] * 3] * 32)
    assert_step_is_withheld(batch)


def test_divergence_is_reported_and_good_checkpoints_stay(tmp_path, images):
    with pytest.raises(UserError) as error:
        _train(tmp_path, images, learning_rate=1e30, train_steps=20, checkpoint_minutes=1e-9)
    line = str(error.value)
    assert "\n" not in line
    step = int(re.match(r"step (\d+): expected a finite loss", line)[1])
    assert "scores of 1to5: " in line and "gradient norm" in line
    newest = fault_test.newest_step(tmp_path)
    assert newest == step - 1 and f"step-{newest:08d}" in line
    # Left out instead, such steps are counted, also by a run that is started again.
    with pytest.raises(UserError, match=f"step {step + 3}: "):
        _train(
            tmp_path, images, learning_rate=1e30, train_steps=20, checkpoint_steps=1,
            nonfinite="skip", nonfinite_limit=3,
        )  # fmt: skip
    with pytest.raises(UserError, match=f"step {step + 5}: "):
        _train(
            tmp_path, images, learning_rate=1e30, train_steps=20, checkpoint_steps=1,
            nonfinite="skip", nonfinite_limit=5,
        )  # fmt: skip


def test_a_second_process_is_refused(tmp_path, images):
    with run_lock.held(tmp_path), pytest.raises(UserError) as error:
        _train(tmp_path, images, train_steps=2)
    assert f"process {os.getpid()}" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_a_crash_does_not_leave_the_lock_behind(tmp_path):
    code = (
        "import sys, time; from amdim_tf import run_lock\n"
        "with run_lock.held(sys.argv[1]): print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=fault_test.ROOT
    )
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"process {process.pid}"), run_lock.held(tmp_path):
        pass
    process.kill()
    process.communicate()
    with run_lock.held(tmp_path):
        pass


def test_a_second_signal_ends_at_once():
    code = (
        "import time; from amdim_tf.signals import StopSignals\n"
        "with StopSignals() as signals:\n"
        "    print('ready', flush=True)\n"
        "    while not signals.received: time.sleep(0.01)\n"
        "    print(signals.received, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=fault_test.ROOT
    )
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == b"SIGINT\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no program `mount`")
    if done.returncode:
        pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(small_disk, images):
    run, ballast = small_disk / "run", small_disk / "ballast"
    words = fault_test.command(run, images, 30, *PLAIN)
    process = fault_test.start(words)
    while process.poll() is None and fault_test.newest_step(run) < 6:
        time.sleep(0.01)
    with pytest.raises(OSError), open(ballast, "wb") as file:
        while True:
            file.write(b"0" * 4096)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2, errors
    lines = [line for line in errors.splitlines() if "No space left on device" in line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and "Traceback" not in errors, errors
    assert not list(run.rglob("*.partial"))
    stopped = fault_test.newest_step(run)
    assert 6 <= stopped < 30
    ballast.unlink()
    fault_test.finish(words)
    fault_test.end_state(run)
    assert fault_test.newest_step(run) == 30


def test_a_disk_that_cannot_be_written(small_disk, images):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"--model_dir.*Read-only file system"):
        _train(small_disk / "run", images, train_steps=2)


@contextlib.contextmanager
def _moved_while_training(path, run):
    """Renames a directory when a run has written its first row."""

    def take_away():
        while not (run / "metrics.csv").exists():
            time.sleep(0.01)
        path.rename(path.with_name("moved"))

    thief = threading.Thread(target=take_away, daemon=True)
    thief.start()
    yield
    thief.join()


def test_a_run_whose_directory_vanishes_does_not_say_that_it_is_saved(tmp_path, images):
    run, told = tmp_path / "run", r"vanished|metrics\.csv: expected to be written"
    with _moved_while_training(run, run), pytest.raises(UserError, match=told):
        _train(run, images, train_steps=10**6)
    assert not config_file.path_in(run).exists()


def test_images_that_vanish(tmp_path):
    """Large pictures stay on disk and are read as they are needed."""
    images, run = tmp_path / "images", tmp_path / "run"
    fault_test.make_images(images, side=200)
    told = r"--data_dir: expected .*; it has vanished"
    with _moved_while_training(images, run), pytest.raises(UserError, match=told):
        _train(run, images, train_steps=10**6)


def test_a_soak_too_short_to_be_seen_is_one_line():
    with pytest.raises(UserError, match="--soak_steps"):
        fault_test._medians([(20, (1.0, 1, 1))], 88, 98)
