"""Classifiers trained on augmented training images, the encoder frozen (paper section 4).

The paper's protocol, after Kolesnikov et al. 2019: every step encodes fresh views, in inference
mode, and trains a linear classifier and an MLP on f1. Encoding is nearly all of the cost, so
several learning rates are tried at once, each with classifiers of its own, and the best on held-out
training images is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from amdim_tf import features, input_pipeline
from amdim_tf.classifiers import LinearClassifier, MLPClassifier, classification_loss
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.examples import Source, subset
from amdim_tf.feature_splits import Features
from amdim_tf.model import AMDIM
from amdim_tf.optimizer import CoupledAdam, WarmupMilestones
from amdim_tf.probing import measure
from amdim_tf.progress import Progress

PROBES = ("linear", "mlp")
# Epochs, and those after which the learning rate drops, of the reference.
_SHORT, _LONG = (30.0, (15.0, 25.0)), (120.0, (80.0, 110.0))
_SCHEDULES = {"imagenet2012": _SHORT, "folder": _SHORT, "places205": (15.0, (7.0, 12.0))}
_LEARNING_RATES = (2e-4, 1e-3, 5e-3)
_WARMUP_STEPS = 100
_HELD_OUT_SHARE, _MOST_HELD_OUT = 0.05, 10_000


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A classifier in training."""

    name: str
    learning_rate: float
    layer: LinearClassifier | MLPClassifier
    optimizer: CoupledAdam


def schedule(dataset: str, epochs: float) -> tuple[float, list[float]]:
    """(epochs, milestones) of a data set; `epochs` above 0 stretches or shrinks the usual ones."""
    usual, milestones = _SCHEDULES.get(dataset, _LONG)
    epochs = epochs or usual
    return epochs, [milestone * epochs / usual for milestone in milestones]


def evaluate(
    model: AMDIM,
    train: Source,
    test: Features,
    config: Config,
    names: Sequence[str],
    epochs: float,
    seed: int,
) -> dict[str, dict]:
    """Trains the classifiers and counts on the test images' features.

    Args:
        model: its encoder is used, never changed.
        train: labelled training images; some are held out to choose the learning rate.
        test: f1 and labels of the test images, for the last count alone.
        config: views, with the run's own copy of its policy (policies.of_run), batch size, and the
            data set evaluated on.
        names: among PROBES.
        epochs: passes over the training images; 0: the reference's number for the data set.
        seed: of the held-out images, the views and the dropout.

    Returns:
        {name: what probing.measure gives, with "settings"}.
    """
    kept, held_out = _split(train, seed)
    config = dataclasses.replace(
        config,
        training=dataclasses.replace(
            config.training, seed=seed, batch_size=min(config.training.batch_size, len(kept))
        ),
    )
    classes = len(train.class_names)
    candidates = _train(model, kept, config, classes, names, epochs)
    held_out = _held_out_features(model, held_out, config)
    results = {}
    for name in names:
        tried = [candidate for candidate in candidates if candidate.name == name]
        grid = [
            {"learning_rate": one.learning_rate, "accuracy": _accuracy(one.layer, held_out)}
            for one in tried
        ]
        best = int(np.argmax([row["accuracy"] for row in grid]))
        logits = tried[best].layer(tf.constant(test.values)).numpy()
        settings = {
            "learning_rate": grid[best]["learning_rate"],
            "held_out_images": len(held_out.labels),
            "epochs": schedule(config.data.dataset, epochs)[0],
            "grid": grid,
        }
        results[name] = {**measure(logits, test.labels, classes), "settings": settings}
    return results


def _split(source: Source, seed: int) -> tuple[Source, Source]:
    """The source without some examples, drawn by the seed, and these."""
    count = len(source)
    held_out = max(1, min(round(_HELD_OUT_SHARE * count), _MOST_HELD_OUT))
    order = np.random.default_rng(seed).permutation(count)
    return subset(source, np.sort(order[held_out:])), subset(source, np.sort(order[:held_out]))


def _train(model: AMDIM, source: Source, config: Config, classes, names, epochs):
    """Candidates trained for the whole schedule."""
    per_epoch = input_pipeline.steps_per_epoch(source, config.training.batch_size)
    epochs, milestones = schedule(config.data.dataset, epochs)
    steps = max(1, round(epochs * per_epoch))
    drops = [round(milestone * per_epoch) for milestone in milestones]
    candidates = [
        _candidate(name, rate, classes, model.settings.n_rkhs, drops, config)
        for name in names
        for rate in _LEARNING_RATES
    ]

    encode = features.f1_of(model)

    @tf.function
    def train_step(batch):
        f1 = encode(tf.concat([batch["view1"], batch["view2"]], axis=0))  # [2B, D]
        labels = tf.tile(batch["label"], [2])  # [2B]
        return [_update(candidate, f1, labels, config.training.seed) for candidate in candidates]

    batches = input_pipeline.training_batches(source, config, 0, steps)
    with Progress(steps, "classifiers on augmented images", "step") as progress:
        for number, batch in enumerate(batches):
            losses = train_step(batch)
            if number % 20 == 0:
                progress.show(f"loss {min(float(loss) for loss in losses):.3f}")
            progress.advance()
    source.skipped.check()
    return candidates


def _candidate(name, rate, classes, dimension, drops, config: Config) -> _Candidate:
    """A new classifier with its optimizer; its weights are a function of the seed."""
    keras.utils.set_random_seed(config.training.seed)
    layer = LinearClassifier(classes) if name == "linear" else MLPClassifier(classes)
    layer.build((None, dimension))
    settings = config.optimizer
    rates = WarmupMilestones(rate, _WARMUP_STEPS, drops, settings.decay_factor)
    optimizer = CoupledAdam(rates, settings.beta_1, settings.beta_2, l2=settings.weight_decay)
    optimizer.build(layer.trainable_variables)
    return _Candidate(name, rate, layer, optimizer)


def _update(candidate: _Candidate, f1, labels, seed: int):
    """One step of one classifier on f1 [2B, D] and labels [2B]; returns its loss."""
    layer, optimizer = candidate.layer, candidate.optimizer
    with tf.GradientTape() as tape:
        if candidate.name == "linear":
            logits = layer(f1)
        else:
            key = tf.random.experimental.stateless_fold_in([seed, 0], optimizer.iterations.value)
            width = f1.shape[1] + layer.hidden
            noise = tf.random.stateless_uniform([f1.shape[0], width], key)
            logits = layer(f1, noise=noise, training=True)
        loss, _, _ = classification_loss(logits, labels)
    variables = layer.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return loss


def _held_out_features(model: AMDIM, source: Source, config: Config) -> Features:
    """f1 of the evaluation views of the held-out images."""
    function, parts, labels = features.f1_of(model), [], []
    for images, numbers in input_pipeline.evaluation_batches(source, config, 250):
        parts.append(function(images).numpy())
        labels.append(numbers.numpy())
    if not parts:
        raise UserError(
            "--probe_training=augmented: expected training images to hold out. Received: "
            f"{len(source)} that cannot be decoded. Remove them, or change --probe_seed."
        )
    return Features(np.concatenate(parts), np.concatenate(labels))


def _accuracy(layer, split: Features) -> float:
    """The share of images whose class has the highest logit."""
    logits = layer(tf.constant(split.values)).numpy()
    counted = split.labels >= 0
    return float((logits.argmax(axis=1) == split.labels)[counted].mean()) if counted.any() else 0.0
