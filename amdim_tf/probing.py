"""What frozen features are worth: linear and MLP classifiers trained on them (paper section 4).

The settings of a classifier are chosen on a held-out part of the training images. Test images have
no part in anything but the last count: the functions that fit do not take them.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import tensorflow as tf

from amdim_tf.classifiers import MLPClassifier, classification_loss
from amdim_tf.errors import UserError
from amdim_tf.feature_splits import Features, blocks, check_split, held_out, standardization
from amdim_tf.optimizer import CoupledAdam, WarmupMilestones
from amdim_tf.progress import Progress
from amdim_tf.softmax_regression import SoftmaxRegression

# Weights of ‖W‖² / 2 beside the sum of the cross-entropies, that is 1 / C of scikit-learn. From
# strong to weak, each solution the start of the next.
_REGULARIZATIONS = (1e5, 1e4, 1e3, 1e2, 10.0, 1.0, 0.1, 0.01)
# Of the MLP. From 3e-4 to 1e-2, one of these two rates was the best on three sets of features.
_LEARNING_RATES = (1e-3, 3e-3)
_L2_WEIGHTS = (1e-5, 3e-4)
_MLP_EPOCHS = 30


@dataclasses.dataclass(frozen=True)
class LinearProbe:
    """A linear classifier on standardized features, and how its settings were chosen."""

    weights: np.ndarray  # [D, K]
    bias: np.ndarray  # [K]
    mean: np.ndarray  # [D]
    std: np.ndarray  # [D]
    settings: dict

    def logits(self, values: np.ndarray) -> np.ndarray:
        """Logits [N, K] of features [N, D]."""
        logits = np.empty([len(values), len(self.bias)], np.float32)
        for rows, block in blocks(values):
            logits[rows] = ((block - self.mean) / self.std) @ self.weights + self.bias
        return logits


@dataclasses.dataclass(frozen=True)
class MLPProbe:
    """An MLP on standardized features, and how its settings were chosen."""

    layer: MLPClassifier
    mean: np.ndarray  # [D]
    std: np.ndarray  # [D]
    settings: dict

    def logits(self, values: np.ndarray) -> np.ndarray:
        """Logits [N, K] of features [N, D]."""
        logits = np.empty([len(values), self.layer.classes], np.float32)
        for rows, block in blocks(values):
            logits[rows] = self.layer((block - self.mean) / self.std, training=False)
        return logits


def fit_linear(
    train: Features, classes: int, seed: int = 0, label: str = "linear probe"
) -> LinearProbe:
    """Softmax regression, the regularization chosen on held-out training images.

    Args:
        train: features and labels; −1 marks an image that does not count.
        classes: K.
        seed: of the draw of the held-out images.
        label: for the progress bar.
    """
    check_split(train, classes, "training")
    labelled = train.labels >= 0
    validation = held_out(train.labels, classes, seed)
    mean, std = standardization(train.values, labelled)
    problem = SoftmaxRegression(train.values, train.labels, classes, mean, std)
    solutions, start = {}, None
    with Progress(len(_REGULARIZATIONS) + 1, label, "setting") as progress:

        def solve(regularization, trained, start):
            def report(iteration):
                progress.show(f"regularization {regularization:g}, iteration {iteration}")
                progress.advance(0)

            solution = problem.solve(regularization, trained, start, report)
            progress.advance()
            return solution

        for regularization in _REGULARIZATIONS:
            solutions[regularization] = solve(regularization, labelled & ~validation, start)
            start = solutions[regularization].parameters
        grid = [
            {
                "regularization": regularization,
                "accuracy": solution.held_out_accuracy,
                "loss": solution.held_out_loss,
                "iterations": solution.iterations,
            }
            for regularization, solution in solutions.items()
        ]
        chosen = _best(grid)["regularization"]
        final = solve(chosen, labelled, solutions[chosen].parameters).parameters
    final = final.astype(np.float32)
    held_out_images = int(validation.sum())
    settings = {"regularization": chosen, "held_out_images": held_out_images, "grid": grid}
    return LinearProbe(final[:-1], final[-1], mean, std, settings)


def fit_mlp(train: Features, classes: int, seed: int = 0, label: str = "MLP probe") -> MLPProbe:
    """The reference's MLP, learning rate and L2 chosen on held-out training images.

    Args:
        train: features and labels; −1 marks an image that does not count.
        classes: K.
        seed: of the draw of the held-out images, the first weights, the order and the dropout.
        label: for the progress bar.
    """
    check_split(train, classes, "training")
    labelled = train.labels >= 0
    validation = held_out(train.labels, classes, seed)
    mean, std = standardization(train.values, labelled)
    candidates = list(itertools.product(_LEARNING_RATES, _L2_WEIGHTS))
    grid = []
    with Progress(_MLP_EPOCHS * (len(candidates) + 1), label, "epoch") as progress:

        def trained_on(rows, learning_rate, l2):
            progress.show(f"learning rate {learning_rate:g}, L2 {l2:g}")
            settings = {"learning_rate": learning_rate, "l2": l2}
            probe = MLPProbe(_new_mlp(train.values.shape[1], classes, seed), mean, std, settings)
            _train_mlp(probe, train, rows, seed, progress)
            return probe

        for learning_rate, l2 in candidates:
            probe = trained_on(np.flatnonzero(labelled & ~validation), learning_rate, l2)
            grid.append({**probe.settings, **_held_out_counts(probe, train, validation)})
        chosen = _best(grid)
        probe = trained_on(np.flatnonzero(labelled), chosen["learning_rate"], chosen["l2"])
    settings = {**probe.settings, "epochs": _MLP_EPOCHS, "held_out_images": int(validation.sum())}
    return dataclasses.replace(probe, settings={**settings, "grid": grid})


def _best(grid: list[dict]) -> dict:
    """The most accurate setting; the first of those with the lower loss where several are."""
    return max(grid, key=lambda row: (row["accuracy"], -row["loss"]))


def _held_out_counts(probe: MLPProbe, train: Features, validation) -> dict[str, float]:
    """Accuracy and mean cross-entropy of the rows marked in `validation`."""
    hits, loss = 0, 0.0
    for rows, block in blocks(train.values):
        labels = train.labels[rows][validation[rows]]
        logits = probe.logits(block[validation[rows]])  # [B, K]
        hits += int((logits.argmax(axis=1) == labels).sum())
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss += float(tf.reduce_sum(losses))
    count = int(validation.sum())
    return {"accuracy": hits / count, "loss": loss / count}


def _new_mlp(dimension: int, classes: int, seed: int) -> MLPClassifier:
    """The reference's MLP with weights that are a function of the seed."""
    layer = MLPClassifier(classes)
    layer.build((None, dimension))
    random = np.random.default_rng(seed)
    for dense, inputs in ((layer.dense1, dimension), (layer.dense2, layer.hidden)):
        for variable in dense.trainable_variables:
            variable.assign(random.uniform(-(inputs**-0.5), inputs**-0.5, variable.shape))
    return layer


def _train_mlp(probe: MLPProbe, train: Features, rows, seed: int, progress: Progress) -> None:
    """Trains the layer of `probe` in place on the given rows, with the reference's loss.

    The learning rate falls to a fifth after two thirds and again after 11/12, as in the
    reference's schedule (120 epochs; 80, 110).
    """
    layer = probe.layer
    batch = min(len(rows), 500, max(len(rows) // 20, 32))
    per_epoch = len(rows) // batch
    steps = _MLP_EPOCHS * per_epoch
    schedule = WarmupMilestones(
        probe.settings["learning_rate"], steps // 20, [steps * 2 // 3, steps * 11 // 12], 0.2
    )
    optimizer = CoupledAdam(schedule, l2=probe.settings["l2"])
    optimizer.build(layer.trainable_variables)

    @tf.function
    def step(values, labels, number):
        noise = tf.random.stateless_uniform(
            [batch, values.shape[1] + layer.hidden], seed=[seed, number]
        )
        with tf.GradientTape() as tape:
            logits = layer((values - probe.mean) / probe.std, noise=noise, training=True)
            loss, _, _ = classification_loss(logits, labels)
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    random = np.random.default_rng(seed)
    for epoch in range(_MLP_EPOCHS):
        order = random.permutation(rows)[: per_epoch * batch].reshape(per_epoch, batch)
        for place, drawn in enumerate(order):
            values = np.asarray(train.values[drawn], np.float32)
            labels = train.labels[drawn].astype(np.int32)
            step(values, labels, tf.constant(epoch * per_epoch + place))
        progress.advance()


def measure(logits: np.ndarray, labels: np.ndarray, classes: int) -> dict:
    """Counts on the images that have a label.

    Args:
        logits: [N, K].
        labels: int [N]; −1 marks an image that does not count.
        classes: K.

    Returns:
        accuracy; top5, the share of images whose class is among the five highest logits (all of
        them with five classes or fewer); per_class, the accuracy of each class, None without
        images; confusion, K lists (the true class) of K counts (the class with the highest logit).
        Of equal logits the first counts as higher.
    """
    counted = labels >= 0
    if not counted.any():
        raise UserError("test split: expected labelled images. Received: none.")
    logits, labels = logits[counted], labels[counted].astype(np.int64)
    predictions = logits.argmax(axis=1)
    own = logits[np.arange(len(labels)), labels][:, None]  # [N, 1]
    equal_before = (logits == own) & (np.arange(classes) < labels[:, None])  # [N, K]
    rank = (logits > own).sum(axis=1) + equal_before.sum(axis=1)  # [N]
    pairs = np.bincount(labels * classes + predictions, minlength=classes * classes)
    confusion = pairs.reshape(classes, classes)
    images = confusion.sum(axis=1)
    return {
        "accuracy": float((predictions == labels).mean()),
        "top5": float((rank < 5).mean()),
        "per_class": [
            float(confusion[k, k] / images[k]) if images[k] else None for k in range(classes)
        ],
        "confusion": confusion.tolist(),
    }
