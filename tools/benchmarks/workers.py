"""What dividing a run between processes costs: one with two cores, and two with one each."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import measuring

from amdim_tf.errors import UserError

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_STEPS, _ROW, _TURNS = 100, 10, 3
# Rows of metrics.csv that are left out: the first steps trace the graph and fill the pipeline.
_WARM_UP_ROWS = 2


def run(given: list[str]) -> None:
    """Times real runs of the training program in turns, with the given flags."""
    cores = sorted(os.sched_getaffinity(0))[:2] if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise UserError("workers: expected Linux and two cores. Received: less.")
    pairs = []
    for _ in range(_TURNS):
        together = _images_per_second(given, [set(cores)])
        pairs.append((together, _images_per_second(given, [{core} for core in cores])))
    print(f"images/s of steps {_ROW * _WARM_UP_ROWS} to {_STEPS}")
    names = "one process, two cores", "two workers, one core each"
    for name, rates in zip(names, zip(*pairs, strict=True), strict=True):
        print(f"  {name:<26} {statistics.median(rates):8.1f}")
    measuring.print_ratios([parted / together for together, parted in pairs], 26)


def _images_per_second(given: list[str], affinities: list[set[int]]) -> float:
    """The rate of a run by one process for each set of cores, read from its metrics.csv."""
    with tempfile.TemporaryDirectory() as model_dir, tempfile.TemporaryFile("w+") as errors:
        words = [
            sys.executable, "-m", "amdim_tf.train", "--dataset=scenes", *given,
            f"--model_dir={model_dir}", "--epochs=0", f"--train_steps={_STEPS}",
            f"--log_steps={_ROW}",
        ]  # fmt: skip
        processes = [
            subprocess.Popen(
                words, cwd=_ROOT, env={**os.environ, **environment}, stderr=errors,
                stdout=subprocess.DEVNULL,
                preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores),
            )
            for cores, environment in zip(affinities, environments(len(affinities)), strict=True)
        ]  # fmt: skip
        while None in (codes := [process.poll() for process in processes]):
            if any(codes):  # the others would wait for it
                for process in processes:
                    process.terminate()
            time.sleep(0.1)
        if any(codes):
            errors.seek(0)
            raise UserError(f"expected training to end well. Received: {errors.read()[-500:]}")
        with open(pathlib.Path(model_dir) / "metrics.csv", newline="") as file:
            rates = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    return statistics.harmonic_mean(rates[_WARM_UP_ROWS:])


def free_ports(count: int) -> list[int]:
    """Below those that systems give to connections, which might take one before it is used."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("localhost", port))
            ports.append(port)
    return ports


def environments(workers: int) -> list[dict[str, str]]:
    """TF_CONFIG of each worker on this machine; none for one process alone."""
    if workers == 1:
        return [{}]
    addresses = [f"localhost:{port}" for port in free_ports(workers)]
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": number}}
            )
        }
        for number in range(workers)
    ]
