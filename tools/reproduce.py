"""Runs a suite of trainings and evaluations, and puts what came of them into one table.

Usage:
    python tools/reproduce.py --suite=ablations_small --data_dir=CIFAR10 --output_dir=runs/ablations

CIFAR10 is a folder with train/CLASS/*.jpg and test/CLASS/*.jpg. Every run is a model_dir of its own
below --output_dir, with a log beside it. Runs that are finished are not repeated, and one that was
stopped goes on from its checkpoint: the same command, given again, does what is missing. After each
run, table.md and table.json are written anew.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags

from amdim_tf import cli_flags, safe_files
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.signals import StopSignals

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SPLITS = ("train", "test")


class Setting(NamedTuple):
    """One row of a table: the suite's flag file with some flags changed."""

    name: str
    flags: tuple[str, ...]
    paper: str  # what the paper found


class Suite(NamedTuple):
    """Settings, each run with every seed; the first is what the others are compared with."""

    flagfile: str
    images_per_class: dict[str, int]
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]


class Run(NamedTuple):
    """A setting with a seed."""

    setting: Setting
    seed: int

    @property
    def name(self) -> str:
        """Of its model_dir."""
        return f"{self.setting.name.replace(' ', '_')}-seed{self.seed}"


SUITES = {
    "ablations_small": Suite(
        "configs/ablations_small.cfg",
        {"train": 1000, "test": 1000},
        (0, 1),
        (
            Setting("baseline", (), "what the others are compared with"),
            Setting("local DIM", ("--tasks=1to7", "--augmentation=none"), "where it starts: lower"),
            Setting("single scale", ("--tasks=1to7",), "lower, less than without augmentation"),
            Setting("no jitter", ("--jitter=0,0,0,0",), "lower, the strongest effect"),
            Setting("no grayscale", ("--grayscale=0",), "lower"),
            Setting(
                "no stabilization",
                ("--score_clip=0", "--score_regularization=0"),
                "lower, the second strongest effect",
            ),
            Setting(
                "strong augmentation",
                ("--augmentation=strong", "--policy=autoaugment_cifar10"),
                "higher",
            ),
            Setting("mixture", ("--mixture_components=4",), "about 1 point higher"),
            Setting("resized crops", ("--crop_scale=0.3,1",), "not tried on CIFAR"),
        ),
    )
}


def define_flags() -> None:
    """In a function, so that the module can be imported beside other programs' flags."""
    flags.DEFINE_enum("suite", None, sorted(SUITES), "What to run.")
    flags.DEFINE(cli_flags.PATH, "data_dir", None, "Folder with train/CLASS and test/CLASS.")
    flags.DEFINE(cli_flags.PATH, "output_dir", None, "Directory for runs and tables.")
    flags.DEFINE_integer(
        "jobs", 2, "Runs at a time, each with its share of the cores.", lower_bound=1
    )


def main() -> None:
    """Reads the flags and runs the suite."""
    suite = SUITES[cli_flags.require("suite", f"one of {', '.join(sorted(SUITES))}")]
    data_dir = pathlib.Path(cli_flags.require("data_dir", "a folder with train/ and test/"))
    output = pathlib.Path(cli_flags.require("output_dir", "a directory for runs and tables"))
    cores = sorted(os.sched_getaffinity(0))
    jobs = min(cli_flags.FLAGS.jobs, len(cores))
    run_suite(suite, data_dir, output, [cores[job::jobs] for job in range(jobs)])
    print((output / "table.md").read_text())


def run_suite(suite: Suite, data_dir, output: pathlib.Path, shares: list[list[int]]) -> None:
    """Does what is missing of a suite, with a run on each share of the cores at a time."""
    output.mkdir(parents=True, exist_ok=True)
    noted, subset = output / "suite.json", output / "data"
    facts = _facts_of_runs(suite, data_dir, noted)
    if not subset.exists():
        _take_subset(data_dir, subset, suite.images_per_class)
    # Only now: a --data_dir that was refused is to be mended by giving another.
    safe_files.write_whole(noted, (json.dumps(facts, indent=1) + "\n").encode())
    with StopSignals() as stop:
        _run_all(suite, subset, output, shares, stop)


def _facts_of_runs(suite: Suite, data_dir: pathlib.Path, path: pathlib.Path) -> dict:
    """What the runs have in common; refuses where those noted in `path` were of something else."""
    facts = {
        "data_dir": str(data_dir.absolute()),
        "images_per_class": suite.images_per_class,
        suite.flagfile: (_ROOT / suite.flagfile).read_text(),
        **{f"the setting {one.name}": list(one.flags) for one in suite.settings},
    }
    kept = {}
    if path.exists():
        try:
            kept = dict(json.loads(safe_files.read_limited(path, 10**7)))
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}: expected what this program writes. Received: {error}. Choose another "
                "--output_dir."
            ) from None
    others = [name for name, value in kept.items() if name in facts and facts[name] != value]
    if others:
        raise UserError(
            f"--output_dir: expected runs of the same suite. Received: {path.parent}, made with "
            f"other values of {', '.join(others)}. Choose another directory."
        )
    return kept | facts


def _take_subset(data_dir: pathlib.Path, subset: pathlib.Path, per_class: dict[str, int]) -> None:
    """Copies the first images of each class, by name, to a folder of their own."""
    found = {
        split: sorted(path for path in (data_dir / split).glob("*") if path.is_dir())
        for split in _SPLITS
    }
    for split, classes in found.items():
        if not classes:
            raise UserError(
                f"--data_dir: expected {data_dir / split} with a directory of images for each "
                "class. Received: none."
            )
    chosen = {}
    for split, classes in found.items():
        for one in classes:
            images = sorted(path for path in one.iterdir() if path.is_file())
            if len(images) < per_class[split]:
                raise UserError(
                    f"--data_dir: expected at least {per_class[split]} images in {one}. Received: "
                    f"{len(images)}."
                )
            chosen[pathlib.Path(split, one.name)] = images[: per_class[split]]
    aside = subset.with_name("data.partial")
    shutil.rmtree(aside, ignore_errors=True)
    for place, images in chosen.items():
        (aside / place).mkdir(parents=True)
        for image in images:
            shutil.copyfile(image, aside / place / image.name)
    aside.rename(subset)


class _Job:
    """A run under way on some cores: it is trained, then evaluated."""

    def __init__(self, suite: Suite, run: Run, subset, output: pathlib.Path, cores: list[int]):
        self.run, self.cores = run, cores
        self.log, self.began = output / f"{run.name}.log", time.monotonic()
        model_dir = f"--model_dir={(output / run.name).absolute()}"
        self._commands = [
            ["train", f"--flagfile={suite.flagfile}", *run.setting.flags, f"--seed={run.seed}",
             f"--data_dir={subset.absolute()}", model_dir],
            ["evaluate", model_dir],
        ]  # fmt: skip
        self._asked = False
        self._start()

    def _start(self) -> None:
        program, *given = self._commands.pop(0)
        # A session of its own, so that Ctrl-C reaches it through us, once.
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"amdim_tf.{program}", *given], cwd=_ROOT,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                preexec_fn=lambda: os.sched_setaffinity(0, self.cores),
            )  # fmt: skip

    def poll(self) -> int | None:
        """The exit code once it has ended; starts the evaluation after the training."""
        code = self._process.poll()
        if code == 0 and self._commands and not self._asked:
            self._start()
            return None
        return code

    def stop(self) -> None:
        """Asks it to save and end."""
        if not self._asked:
            self._process.terminate()
        self._asked = True

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait()


def _run_all(suite: Suite, subset, output: pathlib.Path, shares: list[list[int]], stop) -> None:
    """Does all runs that are not done, as many at a time as there are shares of the cores."""
    runs = [Run(setting, seed) for seed in suite.seeds for setting in suite.settings]
    waiting = [run for run in runs if _accuracy(output / run.name) is None]
    _write_tables(suite, runs, output)
    print(f"{len(runs) - len(waiting)} of {len(runs)} runs are done.", flush=True)
    free, jobs = list(shares), []
    try:
        while (waiting or jobs) and not stop.received:
            while waiting and free:
                jobs.append(_Job(suite, waiting.pop(0), subset, output, free.pop(0)))
            time.sleep(0.2)
            for job in [job for job in jobs if job.poll() is not None]:
                jobs.remove(job)
                free.append(job.cores)
                _check_end(job, output)
                _write_tables(suite, runs, output)
    finally:
        for job in jobs:
            job.stop()
        for job in jobs:
            job.wait()
    if stop.received:
        raise Interrupted("Stopped. The same command goes on from here.")


def _check_end(job: _Job, output: pathlib.Path) -> None:
    accuracy, code = _accuracy(output / job.run.name), job.poll()
    if code or accuracy is None:
        lines = job.log.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "no message")
        raise UserError(
            f"{job.run.name}: expected the run to finish. Received: exit code {code}, "
            f"{last[:300]}. See {job.log}; the same command goes on from here."
        )
    minutes = (time.monotonic() - job.began) / 60
    print(f"{job.run.name}: {100 * accuracy:.1f}% in {minutes:.1f} min", flush=True)


def _accuracy(model_dir: pathlib.Path) -> float | None:
    """Linear accuracy of a run that has been evaluated; else None."""
    path = model_dir / "evaluation" / "folder.json"
    try:
        accuracy = json.loads(safe_files.read_limited(path, 10**7))["linear"]["accuracy"]
        if type(accuracy) not in (int, float) or not 0 <= accuracy <= 1:
            raise ValueError(f"the accuracy {accuracy!r:.80}")
        return accuracy
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path}: expected results of amdim_tf.evaluate ({error}). Remove the directory "
            f"{model_dir} to run it again."
        ) from None


def _write_tables(suite: Suite, runs: list[Run], output: pathlib.Path) -> None:
    """table.json and table.md, from what is done so far."""
    found = {run: _accuracy(output / run.name) for run in runs}
    rows = []
    for setting in suite.settings:
        values = {seed: found[Run(setting, seed)] for seed in suite.seeds}
        done = {seed: 100 * value for seed, value in values.items() if value is not None}
        # Seeds differ by more than settings: each is compared with the baseline's own.
        bases = {seed: found[Run(suite.settings[0], seed)] for seed in done}
        changes = [done[seed] - 100 * base for seed, base in bases.items() if base is not None]
        rows.append(
            {
                "name": setting.name,
                "flags": list(setting.flags),
                "linear": [round(value, 2) for value in done.values()],
                "mean": round(statistics.mean(done.values()), 2) if done else None,
                "difference": round(statistics.mean(changes), 2) if changes else None,
                "paper": setting.paper,
            }
        )
    safe_files.write_whole(output / "table.json", (json.dumps(rows, indent=1) + "\n").encode())
    lines = ["| setting | linear %, by seed | mean | difference | the paper |", "|" + " --- |" * 5]
    for row in rows:
        each = ", ".join(f"{value:.1f}" for value in row["linear"])
        mean = "" if row["mean"] is None else f"{row['mean']:.1f}"
        change = "" if row["difference"] is None else f"{row['difference']:+.1f}"
        lines.append(f"| {row['name']} | {each} | {mean} | {change} | {row['paper']} |")
    safe_files.write_whole(output / "table.md", ("\n".join(lines) + "\n").encode())


if __name__ == "__main__":
    define_flags()
    cli_flags.run(main)
