"""What a run writes for people: metrics.csv and TensorBoard logs."""

from __future__ import annotations

import csv
import math
import pathlib

import numpy as np
import tensorflow as tf


def average(window: list[dict[str, tf.Tensor]]) -> dict[str, float]:
    """Means of each logged figure over some steps.

    Counts of correct answers become accuracies: correct / labelled over all steps together, NaN
    where no image was labelled.
    """
    columns = {name: np.array([float(logs[name]) for logs in window]) for name in window[0]}
    labelled = columns.pop("labelled", np.zeros(1)).sum()
    means = {}
    for name, values in columns.items():
        if name.endswith("_correct"):
            accuracy = values.sum() / labelled if labelled else math.nan
            means[name.replace("_correct", "_accuracy")] = float(accuracy)
        else:
            means[name] = float(values.mean())
    return means


class MetricsLog:
    """Rows of metrics.csv and the same figures as TensorBoard scalars.

    Args:
        model_dir: the run's directory.
        step: where the run stands; rows of later steps, left by a run that stopped after its last
            checkpoint, are dropped, since these steps are about to be made again.
    """

    def __init__(self, model_dir, step: int):
        self._path = pathlib.Path(model_dir) / "metrics.csv"
        self._writer = tf.summary.create_file_writer(str(pathlib.Path(model_dir) / "logs"))
        self._names: list[str] = []
        self._seconds = 0.0
        if self._path.exists():
            self._keep_rows_up_to(step)

    def _keep_rows_up_to(self, step: int) -> None:
        with self._path.open(newline="", errors="replace") as file:
            rows = csv.DictReader(file)
            kept = [row for row in rows if _is_whole(row) and int(row["step"]) <= step]
            names = list(rows.fieldnames or [])
        if not {"step", "seconds"} <= set(names):
            # Not ours, or damaged: kept aside, and a new file begun.
            self._path.replace(self._path.with_name("metrics.csv.damaged"))
            return
        self._names = names
        aside = self._path.with_name("metrics.csv.partial")
        with aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(kept)
        aside.replace(self._path)
        if kept:
            self._seconds = float(kept[-1]["seconds"])

    def write(self, step: int, figures: dict[str, float], seconds: float) -> None:
        """Adds one row; `seconds` is the training time since the row before."""
        self._seconds += seconds
        figures = {"seconds": self._seconds, **figures}
        if not self._names:
            self._names = ["step", *figures]
            with self._path.open("w", newline="") as file:
                csv.DictWriter(file, self._names).writeheader()
        with self._path.open("a", newline="") as file:
            row = {name: f"{value:.6g}" for name, value in figures.items()}
            csv.DictWriter(file, self._names, extrasaction="ignore").writerow({"step": step, **row})
        with self._writer.as_default(step=step):
            for name, value in figures.items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def write_views(self, step: int, view1: np.ndarray, view2: np.ndarray) -> None:
        """Shows pairs of views as the model sees them: uint8 [n, S, S, 3] each, side by side."""
        pairs = np.concatenate([view1, view2], axis=2)  # [n, S, 2S, 3]
        with self._writer.as_default(step=step):
            tf.summary.image("views", image_grid(pairs)[None])
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the TensorBoard log."""
        self._writer.close()


def _is_whole(row: dict[str, str]) -> bool:
    """Whether a row has a step and a time, as one that was cut off may not."""
    try:
        return int(row["step"]) >= 0 and float(row["seconds"]) >= 0
    except (KeyError, TypeError, ValueError):
        return False


def image_grid(images: np.ndarray, columns: int = 4) -> np.ndarray:
    """Images [n, H, W, 3] in rows of `columns`, with a thin white line between: [H', W', 3]."""
    rows = -(-len(images) // columns)
    _, height, width, _ = images.shape
    grid = np.full([rows * columns, height + 2, width + 2, 3], 255, np.uint8)
    grid[: len(images), 1:-1, 1:-1] = images
    grid = grid.reshape(rows, columns, height + 2, width + 2, 3).swapaxes(1, 2)
    return grid.reshape(rows * (height + 2), columns * (width + 2), 3)
