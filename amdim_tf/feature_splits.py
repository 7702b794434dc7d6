"""Features of a split: what is checked, measured and drawn before a classifier sees them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from amdim_tf.errors import UserError

_BLOCK = 4096
# The share of each class's training images that settings are chosen on.
_HELD_OUT_SHARE = 0.2


@dataclasses.dataclass(frozen=True)
class Features:
    """Features [N, D] and labels [N] of one split; every image of it, in order.

    A label of −1 marks an image without one.
    """

    values: np.ndarray
    labels: np.ndarray


def blocks(values: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """(rows, float32 features of these rows), so that nothing needs a second copy of all."""
    for start in range(0, len(values), _BLOCK):
        rows = slice(start, start + _BLOCK)
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, see `check`
            yield rows, np.asarray(values[rows], np.float32)


def check(train: Features, test: Features, class_names: Sequence[str]) -> None:
    """Raises a UserError unless classifiers can learn from `train` and be measured on `test`."""
    check_split(train, len(class_names), "training")
    check_split(test, len(class_names), "test")
    if train.values.shape[1] != test.values.shape[1]:
        raise UserError(
            f"test features: expected {train.values.shape[1]} numbers per image, as the training "
            f"features have. Received: {test.values.shape[1]}."
        )
    counts = [
        np.bincount(split.labels[split.labels >= 0], minlength=len(class_names))
        for split in (train, test)
    ]
    missing = np.flatnonzero((counts[0] == 0) & (counts[1] > 0))
    if len(missing):
        shown = ", ".join(f"{class_names[k]} ({counts[1][k]} images)" for k in missing[:3])
        more = f" and {len(missing) - 3} more classes" if len(missing) > 3 else ""
        raise UserError(
            "test split: expected the classes of the training split. Received images of classes "
            f"that it does not have: {shown}{more}. Add training images of them, or leave them out."
        )


def check_split(split: Features, classes: int, name: str) -> None:
    """Raises a UserError unless `split` has finite features and usable labels.

    Args:
        split: features and labels.
        classes: K.
        name: of the split, for the error.
    """
    values, labels = split.values, split.labels
    if values.ndim != 2 or len(values) != len(labels) or 0 in values.shape:
        raise UserError(
            f"{name} features: expected an array [images, numbers] with a label per image. "
            f"Received: features {list(values.shape)}, labels {list(labels.shape)}."
        )
    if labels.max() < 0:
        raise UserError(
            f"{name} split: expected labelled images, for a classifier. "
            f"Received: {len(labels)} images without a label."
        )
    if labels.max() >= classes or labels.min() < -1:
        raise UserError(
            f"{name} split: expected labels from 0 to {classes - 1}, or -1 for none. "
            f"Received: {labels.min()} to {labels.max()}."
        )
    bad = sum(int((~np.isfinite(block).all(axis=1)).sum()) for _, block in blocks(values))
    if bad:
        raise UserError(
            f"{name} features: expected finite numbers. Received: NaN or infinity in {bad} of "
            f"{len(values)} rows. Has training diverged? Try an earlier checkpoint."
        )


def standardization(values: np.ndarray, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation [D] of the counted rows, added up in float64.

    A feature that is constant, as far as float32 can tell, has a deviation of 1: it becomes 0
    instead of magnified rounding errors.

    Args:
        values: [N, D].
        counted: bool [N].
    """
    count = counted.sum()
    mean = sum(block[counted[rows]].sum(axis=0, dtype=np.float64) for rows, block in blocks(values))
    mean = mean / count
    squares = sum(
        np.square(block[counted[rows]] - mean).sum(axis=0) for rows, block in blocks(values)
    )
    std = np.sqrt(squares / count)
    std[std <= 1e-6 * np.abs(mean)] = 1
    return mean.astype(np.float32), std.astype(np.float32)


def rows_of_classes(labels: np.ndarray, classes: int) -> list[np.ndarray]:
    """For each class the rows that have its label, in order."""
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(classes + 1))
    return [order[first:last] for first, last in itertools.pairwise(bounds)]


def held_out(labels: np.ndarray, classes: int, seed: int) -> np.ndarray:
    """Marks the rows that settings are chosen on: a fifth of each class, drawn by the seed.

    Every class that has two images gives at least one and keeps at least one.

    Args:
        labels: int [N]; rows with −1 are never held out.
        classes: K.
        seed: of the draw.

    Returns:
        bool [N].
    """
    mask = np.zeros(len(labels), bool)
    random = np.random.default_rng(seed)
    by_class = [rows for rows in rows_of_classes(labels, classes) if len(rows)]
    if len(by_class) < 2:
        raise UserError(
            "training split: expected labelled images of at least 2 classes, for a classifier. "
            f"Received: {len(by_class)}."
        )
    for rows in by_class:
        if len(rows) > 1:
            mask[random.permutation(rows)[: max(1, round(_HELD_OUT_SHARE * len(rows)))]] = True
    if not mask.any():
        raise UserError(
            "training split: expected a class with 2 labelled images or more, of which some are "
            "held out to choose settings. Received: at most 1 image per class."
        )
    return mask
