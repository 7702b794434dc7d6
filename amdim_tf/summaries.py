"""What a run writes for people: metrics.csv and TensorBoard logs."""

from __future__ import annotations

import csv
import io
import itertools
import math
import pathlib
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from amdim_tf import safe_files
from amdim_tf.errors import warn
from amdim_tf.event_file import EventFile

_MOST_BYTES = 2**30


class Window:
    """The figures of the steps since the last row. A checkpoint takes them along.

    Args:
        arrays: what `arrays` gave when the run was saved; empty for a new run.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._before = dict(arrays)
        self._logs: list[dict[str, tf.Tensor]] = []

    def add(self, logs: dict[str, tf.Tensor]) -> None:
        """Adds the named scalars of a step; they are not looked at until they are needed."""
        if set(self._before) != set(logs):
            self._before = {}
        self._logs.append(logs)

    def arrays(self) -> dict[str, np.ndarray]:
        """Name -> its value in each step, float64 [steps]."""
        if not self._logs:
            return self._before
        new = {name: [float(logs[name]) for logs in self._logs] for name in self._logs[0]}
        return {name: np.array([*self._before.get(name, ()), *new[name]]) for name in new}


def average(columns: dict[str, np.ndarray]) -> dict[str, float]:
    """Means of each logged figure over some steps, leaving out those that were not finite.

    Counts of correct answers become accuracies: correct / labelled over all steps together, NaN
    where no image was labelled. `nonfinite` becomes the number of steps that were not finite, and
    `overflow` that of steps whose gradient float16 could not hold.
    """
    columns = dict(columns)
    none = np.zeros(len(next(iter(columns.values()))))
    nonfinite, overflow = columns.pop("nonfinite", none), columns.pop("overflow", None)
    counts = {"nonfinite_steps": float(nonfinite.sum())}
    kept = dict.fromkeys(columns, nonfinite == 0)
    if overflow is not None:
        counts["overflow_steps"] = float(overflow.sum())
        kept["gradient_norm"] = (nonfinite == 0) & (overflow == 0)  # the loss was finite there
    columns = {name: values[kept[name]] for name, values in columns.items()}
    labelled = columns.pop("labelled", np.zeros(1)).sum()
    means = {}
    for name, values in columns.items():
        if name.endswith("_correct"):
            accuracy = values.sum() / labelled if labelled else math.nan
            means[name.replace("_correct", "_accuracy")] = float(accuracy)
        else:
            means[name] = float(values.mean()) if len(values) else math.nan
    return means | counts


class MetricsLog:
    """Rows of metrics.csv and the same figures as TensorBoard scalars.

    Args:
        model_dir: the run's directory.
        step: where the run stands; rows of later steps, left by a run that stopped after its last
            checkpoint, are dropped, since these steps are about to be made again.
    """

    def __init__(self, model_dir, step: int):
        self._path = pathlib.Path(model_dir) / "metrics.csv"
        self._names: list[str] = []
        self._seconds = 0.0
        if self._path.exists() or self._path.is_symlink():
            self._keep_rows_up_to(step)
        self.directory = pathlib.Path(model_dir) / "logs"
        self._events = EventFile(self.directory, step)

    def _keep_rows_up_to(self, step: int) -> None:
        try:
            names, rows = _read_metrics(self._path)
            kept = [row for row in rows if int(row["step"]) <= step]
        except (OSError, csv.Error):
            names = []
        if not {"step", "seconds"} <= set(names) or len(set(names)) != len(names):
            self._set_aside()
            return
        self._names = names
        rewritten = io.StringIO(newline="")
        writer = csv.DictWriter(rewritten, names)
        writer.writeheader()
        writer.writerows(kept)
        safe_files.write_whole(self._path, rewritten.getvalue().encode())
        if kept:
            self._seconds = float(kept[-1]["seconds"])

    def _set_aside(self) -> None:
        """Renames a file that is not ours, or damaged, without touching one that was before."""
        names = itertools.chain(
            ["metrics.csv.damaged"], (f"metrics.csv.damaged-{i}" for i in itertools.count(2))
        )
        free = (self._path.with_name(name) for name in names)
        aside = next(path for path in free if not path.exists() and not path.is_symlink())
        self._path.rename(aside)
        warn(f"{self._path}: expected rows of this run. What was there is now {aside}.")

    def write(self, step: int, figures: dict[str, float], seconds: float) -> None:
        """Adds one row; `seconds` is the training time since the row before."""
        self._seconds += seconds
        figures = {"seconds": self._seconds, **figures}
        row = {"step": step, **{name: f"{value:.6g}" for name, value in figures.items()}}
        if not self._names:
            self._names = list(row)
            safe_files.write_whole(self._path, (",".join(self._names) + "\r\n").encode())
        with safe_files.append(self._path) as file:
            csv.DictWriter(file, self._names, extrasaction="ignore").writerow(row)
        self._events.write(step, "scalars", figures)

    def write_views(self, step: int, view1: np.ndarray, view2: np.ndarray) -> None:
        """Shows pairs of views as the model sees them: uint8 [n, S, S, 3] each, side by side."""
        pairs = np.concatenate([view1, view2], axis=2)  # [n, S, 2S, 3]
        grid = image_grid(pairs)
        height, width, _ = grid.shape
        image = [str(width).encode(), str(height).encode(), tf.io.encode_png(grid).numpy()]
        self._events.write(step, "images", {"views": image})

    def close(self) -> None:
        """Closes the TensorBoard log."""
        self._events.close()


def _read_metrics(path: pathlib.Path) -> tuple[list[str], list[dict[str, str]]]:
    """Names of the columns of a metrics.csv, and its whole rows."""
    text = safe_files.read_limited(path, _MOST_BYTES).decode(errors="replace")
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return list(rows.fieldnames or []), [row for row in rows if _is_whole(row)]


def training_hours(model_dir, step: int) -> float | None:
    """How long a run has trained until a step, by its metrics.csv; None where that does not tell.

    Between two rows the time is shared out evenly, and after the last as it was before it.
    """
    try:
        _, rows = _read_metrics(pathlib.Path(model_dir) / "metrics.csv")
    except (OSError, csv.Error):
        return None
    points = [(0, 0.0), *((int(row["step"]), float(row["seconds"])) for row in rows)]
    if step < 1 or len(points) < 2 or points[-1][0] < 1:
        return None
    (last_step, last_seconds) = points[-1]
    if step > last_step:
        points.append((step, last_seconds * step / last_step))
    return float(np.interp(step, *zip(*points, strict=True))) / 3600


def _is_whole(row: dict[str, str]) -> bool:
    """Whether a row has every column and no more, as one that was cut off may not."""
    try:
        return (
            None not in row
            and None not in row.values()
            and int(row["step"]) >= 0
            and 0 <= float(row["seconds"]) < math.inf
        )
    except (KeyError, ValueError):
        return False


def image_grid(images: np.ndarray, columns: int = 4) -> np.ndarray:
    """Images [n, H, W, 3] in rows of `columns`, with a thin white line between: [H', W', 3]."""
    rows = -(-len(images) // columns)
    _, height, width, _ = images.shape
    grid = np.full([rows * columns, height + 2, width + 2, 3], 255, np.uint8)
    grid[: len(images), 1:-1, 1:-1] = images
    grid = grid.reshape(rows, columns, height + 2, width + 2, 3).swapaxes(1, 2)
    return grid.reshape(rows * (height + 2), columns * (width + 2), 3)
