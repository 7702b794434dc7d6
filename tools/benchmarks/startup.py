"""How long a user waits: for an import, and from the training command to its first step."""

from __future__ import annotations

import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import measuring

from amdim_tf.errors import UserError

_ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
_TENSORFLOW = "import tensorflow"
# The last one loads all that the library's own function needs, Keras and the model too.
_IMPORTS = (_TENSORFLOW, "import amdim_tf", "from amdim_tf import load_model")


def run(given: list[str], turns: int) -> None:
    """Times new processes in turns: imports, and training with the given flags up to a step."""
    programs = {code: lambda code=code: _import(code) for code in _IMPORTS}
    programs["train, to the first step"] = lambda: _first_step(given)
    times: dict[str, list[float]] = {name: [] for name in programs}
    _first_step(given)  # reads all files from the disk
    for _ in range(turns):
        for name, program in programs.items():
            times[name].append(program())
    print(f"seconds, medians of {turns} turns with their range")
    for name, values in times.items():
        between = f"({min(values):.2f} to {max(values):.2f})"
        line = f"  {name:<34} {statistics.median(values):6.2f} {between}"
        if name in _IMPORTS and name != _TENSORFLOW:
            more = [a - b for a, b in zip(values, times[_TENSORFLOW], strict=True)]
            line += f", {statistics.median(more):+.2f} beside {_TENSORFLOW!r}"
        print(line)


def _import(code: str) -> float:
    command = [sys.executable, "-c", code]
    return measuring.seconds_of(
        lambda: subprocess.run(command, cwd=_ROOT, check=True, capture_output=True)
    )


def _first_step(given: list[str]) -> float:
    """Until metrics.csv has its first row, which is written after the first step."""
    with tempfile.TemporaryDirectory() as model_dir, tempfile.TemporaryFile("w+") as errors:
        metrics, began = pathlib.Path(model_dir) / "metrics.csv", time.perf_counter()
        process = subprocess.Popen(
            [
                sys.executable, "-m", "amdim_tf.train", "--dataset=scenes", *given,
                f"--model_dir={model_dir}", "--epochs=0", "--train_steps=2", "--log_steps=1",
            ],
            cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
        found = None
        while process.poll() is None:
            if found is None and metrics.exists() and metrics.read_text().count("\n") > 1:
                found = time.perf_counter() - began
            time.sleep(0.02)
        if process.returncode or found is None:
            errors.seek(0)
            raise UserError(f"expected training to end well. Received: {errors.read()[-500:]}")
        return found
