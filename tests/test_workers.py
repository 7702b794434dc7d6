"""Several workers as real processes: one is stopped or killed, and all are started again."""

import csv
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from test_distribution import environments

from amdim_tf import checkpoint_files, config_file

ROOT = pathlib.Path(__file__).parent.parent
FLAGS = [
    "--dataset=scenes", "--ndf=4", "--n_rkhs=16", "--n_depth=1", "--batch_size=8", "--log_steps=5",
    "--augmentation=none", "--checkpoint_steps=5", "--tasks=1to5",
]  # fmt: skip


def _start(model_dir, steps, second=()):
    """Two workers, the second with some more flags."""
    words = [sys.executable, "-m", "amdim_tf.train", f"--model_dir={model_dir}", *FLAGS]
    return [
        subprocess.Popen(
            [*words, f"--train_steps={steps}", *more], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for environment, more in zip(environments(2), ((), second), strict=True)
    ]  # fmt: skip


def _newest(model_dir):
    return max(checkpoint_files.steps_in(config_file.checkpoints_in(model_dir)), default=0)


def _wait_for_checkpoint(model_dir, processes):
    before = _newest(model_dir)
    while _newest(model_dir) == before:
        for process in processes:
            assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
def test_workers_stop_together_and_go_on(tmp_path):
    """SIGKILL of one, SIGTERM to one, then to the end."""
    processes = _start(tmp_path, 10**6)
    _wait_for_checkpoint(tmp_path, processes)
    processes[1].kill()
    began = time.monotonic()
    _, errors = processes[0].communicate(timeout=60)
    assert processes[0].returncode == 2 and time.monotonic() - began < 60
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "TF_CONFIG: expected all 2 workers to go on" in line and "Start all workers" in line
    processes[1].communicate()

    killed = _newest(tmp_path)
    processes = _start(tmp_path, 10**6)
    _wait_for_checkpoint(tmp_path, processes)
    processes[1].send_signal(signal.SIGTERM)
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [75, 75], ends
    assert "Stopped by another worker" in ends[0][1] and "Stopped by SIGTERM" in ends[1][1]
    assert f"steps {killed} to" in ends[0][0]
    assert ends[1][0].startswith(f"Worker 1, of 2 in all: training from step {killed} to")
    assert "parameters, on 2 CPU replicas of 2 workers.\n" in ends[0][0]

    stopped = _newest(tmp_path)
    assert stopped > killed
    processes = _start(tmp_path, stopped + 7)
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    assert _newest(tmp_path) == stopped + 7
    assert f"Worker 1: trained to step {stopped + 7}." in ends[1][0]
    with open(tmp_path / "metrics.csv", newline="") as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    assert steps == sorted(set(steps)) and steps[-1] == stopped + 7
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoints", "config.json", "lock", "logs", "metrics.csv",
    }  # fmt: skip


@pytest.mark.slow
def test_workers_with_other_devices_are_refused(tmp_path):
    processes = _start(tmp_path / "run", 10, ["--replicas=2"])
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [2, 2], ends
    for _, errors in ends:
        (line,) = errors.splitlines()
        assert "--replicas" in line and "with 1 devices" in line and "with 2 devices" in line


@pytest.mark.slow
def test_workers_with_other_settings_are_refused(tmp_path):
    processes = _start(tmp_path / "run", 10, ["--learning_rate=0.1", "--seed=3"])
    ends = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [2, 2], ends
    (line,) = [line for line in ends[1][1].splitlines() if line.startswith("error: ")]
    assert "Received on worker 1: --learning_rate=0.1, --seed=3; on others" in line
    assert not (tmp_path / "run").exists()
