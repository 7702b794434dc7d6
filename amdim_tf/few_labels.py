"""How far a few labels go: ridge regression on features, from 1 label per class to 10% of them.

Ridge has a closed form, and so has its error on each image that it is not shown: nothing is
trained, and one eigendecomposition per draw serves every regularization.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from amdim_tf.errors import UserError, warn
from amdim_tf.feature_splits import Features, blocks, check, rows_of_classes, standardization
from amdim_tf.progress import Progress

# Labels per class (int), or a share of each class's labels (float).
SETTINGS = (1, 5, 10, 0.01, 0.1)
# Regularization per labelled image: the diagonal of the standardized features' covariance is 1.
_REGULARIZATIONS = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 7))
# With one image per class, an image left out leaves its class without any, so that leaving one out
# tells nothing. This was within 0.5 points of the best on each of four sets of features.
_ONE_PER_CLASS = 10.0


def evaluate(
    train: Features,
    test: Features,
    class_names: Sequence[str],
    settings: Sequence[int | float] = SETTINGS,
    draws: int = 5,
    seed: int = 0,
    label: str = "few labels",
) -> dict[str, dict]:
    """Test accuracy with the labels of a few training images, over several draws of them.

    Features are standardized by all training images, whose labels that does not need.

    Args:
        train, test: features and labels; −1 marks an image that does not count.
        class_names: of the K classes.
        settings: labels per class (int) or share of each class's labels (float); more than the
            smallest class has are left out, with a warning.
        draws: how many sets of labelled images, at least 1.
        seed: of the draws.
        label: for the progress bar.

    Returns:
        {"5 per class": {"mean", "std", "accuracies", "regularizations", "images"}, "1%": …}. std
        is that of the sample of draws; a regularization is per labelled image.
    """
    check(train, test, class_names)
    if draws < 1:
        raise UserError(f"few labels: expected at least 1 draw. Received: {draws}.")
    settings = _possible(settings, train.labels, class_names)
    mean, std = standardization(train.values, np.ones(len(train.labels), bool))
    results = {}
    with Progress(len(settings) * draws, label, "draw") as progress:
        for setting in settings:
            accuracies, chosen = [], []
            for number in range(draws):
                rows = draw(train.labels, len(class_names), setting, seed, number)
                values = (train.values[rows].astype(np.float64) - mean) / std  # [n, D]
                classifier, regularization = fit(values, train.labels[rows], len(class_names))
                accuracies.append(_accuracy(classifier, test, mean, std))
                chosen.append(regularization)
                progress.show(f"{name_of(setting)}: {100 * np.mean(accuracies):.1f}%")
                progress.advance()
            results[name_of(setting)] = {
                "mean": float(np.mean(accuracies)),
                "std": float(np.std(accuracies, ddof=1)) if draws > 1 else 0.0,
                "accuracies": accuracies,
                "regularizations": chosen,
                "images": len(rows),
            }
    return results


def _possible(settings, labels: np.ndarray, class_names: Sequence[str]) -> list[int | float]:
    """The settings for which every class that has training images has enough of them."""
    by_class = zip(rows_of_classes(labels, len(class_names)), class_names, strict=True)
    fewest, name = min((len(rows), name) for rows, name in by_class if len(rows))
    too_many = [setting for setting in settings if isinstance(setting, int) and setting > fewest]
    if too_many:
        warn(
            f"few labels: {', '.join(map(name_of, too_many))} left out: expected as many labelled "
            f"training images of every class. Received: {fewest} of {name}."
        )
    return [setting for setting in settings if setting not in too_many]


def name_of(setting: int | float) -> str:
    """A setting in words: 5 is "5 per class", 0.01 is "1%"."""
    return f"{setting} per class" if isinstance(setting, int) else f"{100 * setting:g}%"


def draw(
    labels: np.ndarray, classes: int, setting: int | float, seed: int, number: int
) -> np.ndarray:
    """Rows to learn from, a function of (seed, number of the draw), the same share of each class.

    Draws are nested: the images of "5 per class" are among those of "10 per class". A share gives
    at least one image of each class. A class that has fewer images gives all of them.
    """
    random = np.random.default_rng([seed, number])
    drawn = []
    for rows in rows_of_classes(labels, classes):
        count = setting if isinstance(setting, int) else max(1, round(setting * len(rows)))
        drawn.append(random.permutation(rows)[:count])
    return np.sort(np.concatenate(drawn))


def fit(values: np.ndarray, labels: np.ndarray, classes: int):
    """Ridge regression on one-hot targets, the regularization chosen by leaving one out.

    Args:
        values: float64 [n, D].
        labels: int [n].
        classes: K.

    Returns:
        ((weights [D, K], intercept [K]), regularization per image).
    """
    targets = np.eye(classes)[labels]  # [n, K]
    system = Ridge(values, targets)
    if np.bincount(labels).max() == 1:
        regularization = _ONE_PER_CLASS
    else:
        scores = [system.left_out_agreement(len(labels) * r) for r in _REGULARIZATIONS]
        regularization = _REGULARIZATIONS[int(np.argmax(scores))]
    return system.solve(len(labels) * regularization), regularization


class Ridge:
    """min ‖X W + b − Y‖² + r ‖W‖² for any r, after one eigendecomposition.

    The intercept b is free, which centring X and Y accounts for. With X = P S Vᵀ all that is needed
    are Z = X V and S²: from X Xᵀ [n, n] where images are fewer than features, else from XᵀX [D, D].

    Args:
        values: X, float64 [n, D].
        targets: Y, float64 [n, K].
    """

    def __init__(self, values: np.ndarray, targets: np.ndarray):
        self._mean, self._target_mean = values.mean(axis=0), targets.mean(axis=0)
        centred, self._targets = values - self._mean, targets - self._target_mean
        count, dimension = values.shape
        if count <= dimension:
            squares, left = np.linalg.eigh(centred @ centred.T)
            # Zero but for rounding, as at least one is after centring: no direction at all.
            kept = squares > 1e-12 * max(squares[-1], 1e-300)
            self._squares = squares[kept]
            roots = np.sqrt(self._squares)
            self._rotated = left[:, kept] * roots  # Z: [n, rank]
            self._directions = centred.T @ (left[:, kept] / roots)  # V: [D, rank]
        else:
            squares, self._directions = np.linalg.eigh(centred.T @ centred)
            self._squares = np.maximum(squares, 0)
            self._rotated = centred @ self._directions

    def solve(self, regularization: float) -> tuple[np.ndarray, np.ndarray]:
        """(weights [D, K], intercept [K])."""
        weights = self._directions @ self._coefficients(regularization)
        return weights, self._target_mean - self._mean @ weights

    def left_out_agreement(self, regularization: float) -> float:
        """Correlation of the targets with what is predicted of each image without its label.

        The prediction for image i, fitted to all others, is y_i − (y_i − f_i) / (1 − h_i), where f
        is the fit to all and h the diagonal of the hat matrix. Correlation, not squared error:
        only the order of the predictions matters for a class, while the squared error prefers to
        shrink them all. And the share of its class that image i takes along when it leaves, 1 / n
        of it, is given back: draws have fixed shares.
        """
        count = len(self._targets)
        fitted = self._rotated @ self._coefficients(regularization)  # [n, K]
        hat = 1 / count + np.square(self._rotated) @ (1 / (self._squares + regularization))  # [n]
        errors = (self._targets - fitted) / np.maximum(1 - hat, 1e-9)[:, None]
        predicted = self._targets - errors + self._targets / (count - 1)
        return np.vdot(self._targets, predicted) / max(np.linalg.norm(predicted), 1e-300)

    def _coefficients(self, regularization):
        """Weights along the directions: [rank, K]."""
        projected = self._rotated.T @ self._targets
        return projected / (self._squares + regularization)[:, None]


def _accuracy(classifier, test: Features, mean, std) -> float:
    """The share of labelled test images whose class has the highest value."""
    weights, intercept = classifier
    hits = 0
    for rows, block in blocks(test.values):
        outputs = ((block - mean) / std) @ weights.astype(np.float32) + intercept  # [B, K]
        hits += int((outputs.argmax(axis=1) == test.labels[rows]).sum())
    return hits / int((test.labels >= 0).sum())
