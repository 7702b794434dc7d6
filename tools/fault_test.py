"""Kills a training run again and again, or lets one run long, and checks what comes of it.

Usage:
    python tools/fault_test.py kill --kills=20
    python tools/fault_test.py soak --soak_steps=5000

kill: a small run is stopped by SIGKILL or SIGTERM at random moments, while it starts, trains, saves
or logs, and started again with the same command. Its end has to equal, bit for bit, that of a run
that was left alone: weights, optimizer, rows of metrics.csv; and nothing may be left lying around.

soak: a small run of many steps. After its warm-up, resident memory, open files and threads must not
grow.
"""

from __future__ import annotations

import csv
import json
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from absl import flags

from amdim_tf import checkpoint_files, cli_flags, config_file
from amdim_tf.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Columns that tell the time, and differ from run to run.
TIMES = ("seconds", "images_per_second", "checkpoint_seconds")
_SAVED_EVERY = 3
_FILES = {"manifest.json", "model.npz", "optimizer.npz", "loop.npz"}


def make_images(folder: pathlib.Path, side: int = 40) -> None:
    """Writes two classes of 24 random pictures each, side × side pixels."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / "train" / name).mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(0, 256, [side, side, 3], dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "train" / name / f"{number}.png")


def command(model_dir: pathlib.Path, data_dir: pathlib.Path, steps: int, *more: str) -> list[str]:
    """A run that saves and logs all the time."""
    return [
        sys.executable, "-m", "amdim_tf.train", f"--model_dir={model_dir}", "--dataset=folder",
        f"--data_dir={data_dir}", "--image_size=32", "--ndf=4", "--n_rkhs=16", "--n_depth=1",
        "--use_bn", "--batch_size=8", "--warmup_steps=20", "--log_steps=5",
        f"--checkpoint_steps={_SAVED_EVERY}", f"--train_steps={steps}", "--deterministic", *more,
    ]  # fmt: skip


def start(words: list[str], errors: int | IO[str] = subprocess.PIPE) -> subprocess.Popen:
    """Starts a command with its messages caught, in a file if nobody is to read them meanwhile."""
    return subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.DEVNULL, stderr=errors)


def finish(words: list[str]) -> None:
    """Runs a command to its end."""
    process = start(words)
    _, errors = process.communicate()
    if process.returncode:
        raise UserError(f"expected the run to finish. Received: {errors}")


def newest_step(model_dir: pathlib.Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max(checkpoint_files.steps_in(config_file.checkpoints_in(model_dir)), default=0)


def stop_often(
    words: list[str], model_dir: pathlib.Path, signals: Sequence[signal.Signals], rng: random.Random
) -> int:
    """Runs a command, stopping it by each signal in turn, then to its end.

    Returns:
        How many of the stops left a checkpoint half written, which shows that they hit a save.
    """
    hits = 0
    for number, sent in enumerate(signals):
        process = start(words)
        if number % 4 == 3:  # while it starts
            time.sleep(rng.uniform(0, 6))
        else:
            wanted = newest_step(model_dir) + rng.randrange(1, 8 * _SAVED_EVERY)
            while process.poll() is None and newest_step(model_dir) < wanted:
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
        process.send_signal(sent)
        _, errors = process.communicate()
        allowed = {-sent, 75} if sent == signal.SIGTERM else {-sent}
        if process.returncode not in allowed:
            raise UserError(f"expected an end by {sent.name}. Received: {errors}")
        hits += any(config_file.checkpoints_in(model_dir).glob("*.partial"))
    finish(words)
    return hits


def end_state(model_dir: pathlib.Path):
    """What two equal runs have in common: digests of the last checkpoint, and rows without times.

    Raises:
        UserError: where files lie around that a run that was left alone does not have.
    """
    names = {path.name for path in model_dir.iterdir()}
    folders = list(config_file.checkpoints_in(model_dir).iterdir())
    orphans = names - {"checkpoints", "config.json", "lock", "logs", "metrics.csv"}
    orphans |= {f.name for f in folders if {path.name for path in f.iterdir()} != _FILES}
    if orphans or len(folders) > 3:
        raise UserError(f"{model_dir}: expected no files left behind. Received: {orphans}.")
    path = checkpoint_files.path_of(config_file.checkpoints_in(model_dir), newest_step(model_dir))
    manifest = json.loads((path / "manifest.json").read_text())
    with open(model_dir / "metrics.csv", newline="") as file:
        rows = [{n: v for n, v in row.items() if n not in TIMES} for row in csv.DictReader(file)]
    return manifest, rows


def kill(folder: pathlib.Path) -> None:
    """Compares a run with many stops with one that has none."""
    make_images(folder / "images")
    kills = cli_flags.FLAGS.kills
    rng = random.Random(cli_flags.FLAGS.fault_seed)
    steps = kills * 6 * _SAVED_EVERY
    alone, stopped = folder / "alone", folder / "stopped"
    began = time.monotonic()
    finish(command(alone, folder / "images", steps))
    signals = [rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)) for _ in range(kills)]
    hits = stop_often(command(stopped, folder / "images", steps), stopped, signals, rng)
    if end_state(stopped) != end_state(alone):
        raise UserError("expected equal runs. Received: another checkpoint, or other rows.")
    print(
        f"{signals.count(signal.SIGKILL)} SIGKILL and {signals.count(signal.SIGTERM)} SIGTERM, "
        f"{hits} of them during a save: after {steps} steps weights, optimizer and metrics equal "
        f"those of a run that was left alone, bit for bit; {time.monotonic() - began:.0f} s."
    )


def _usage(process: subprocess.Popen) -> tuple[float, int, int]:
    """Resident MiB, open files and threads of a process."""
    proc = pathlib.Path(f"/proc/{process.pid}")
    fields = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    resident = int(fields["VmRSS"].split()[0]) / 1024
    return resident, len(list((proc / "fd").iterdir())), int(fields["Threads"])


def _medians(samples, first: float, last: float) -> list[float]:
    """The medians of each resource over the steps first..last."""
    chosen = [usage for step, usage in samples if first <= step < last]
    if not chosen:
        raise UserError(
            f"--soak_steps: expected a run long enough to be seen between its steps {first:.0f} "
            f"and {last:.0f}. Received: a shorter one. Raise it."
        )
    return [statistics.median(column) for column in zip(*chosen, strict=True)]


def soak(folder: pathlib.Path) -> None:
    """Compares a run's resources after a fifth of its steps with those at its end."""
    make_images(folder / "images")
    steps = cli_flags.FLAGS.soak_steps
    words = command(folder / "run", folder / "images", steps, "--checkpoint_steps=20")
    samples: list[tuple[int, tuple[float, int, int]]] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = start(words, errors)
        while process.poll() is None:
            step = newest_step(folder / "run")
            if step and step < 0.98 * steps:
                samples.append((step, _usage(process)))
            time.sleep(0.5)
        errors.seek(0)
        if process.returncode:
            raise UserError(f"expected the run to finish. Received: {errors.read()}")
    early, late = (_medians(samples, share * steps, (share + 0.1) * steps) for share in (0.2, 0.88))
    growth = late[0] / early[0] - 1
    print(
        f"{steps} steps: memory {early[0]:.1f} -> {late[0]:.1f} MiB ({100 * growth:+.2f}%), open "
        f"files {early[1]:.0f} -> {late[1]:.0f}, threads {early[2]:.0f} -> {late[2]:.0f}."
    )
    if growth > 0.02 or late[1] > early[1] or late[2] > early[2]:
        raise UserError("expected less than 2% more memory, and no more open files or threads.")


_TESTS = {"kill": kill, "soak": soak}


def main(name: str) -> None:
    """Runs one test in a temporary directory."""
    if name not in _TESTS:
        raise UserError(f"expected one of {', '.join(_TESTS)}. Received: {name!r}.")
    with tempfile.TemporaryDirectory() as folder:
        _TESTS[name](pathlib.Path(folder))


if __name__ == "__main__":
    flags.DEFINE_integer("kills", 20, "How often `kill` stops the run.", lower_bound=1)
    flags.DEFINE_integer("fault_seed", 0, "Seed of the moments at which `kill` does.")
    flags.DEFINE_integer("soak_steps", 5000, "Steps of `soak`.", lower_bound=100)
    cli_flags.run(main, words=1)
