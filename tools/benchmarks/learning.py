"""What the same recipe learns by PyTorch and by amdim_tf, on the same views and by one probe."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from benchmarks import measuring, rivals

from amdim_tf.errors import UserError

_PROBED_AT_ONCE = 250  # images


def run(config) -> None:
    """Trains both from initial weights of their own; prints losses by epoch, and accuracies.

    Seconds are for orientation: the two do not take turns, and the first step is left out.
    """
    from amdim_tf import input_pipeline, linear_adam, sources

    reason = rivals.reason_against(config)
    if reason:
        raise UserError(
            f"learning: expected a run that PyTorch makes here too. It does not: {reason}."
        )
    devices = measuring.one_device(config)
    train, test = (sources.load(config.data, split) for split in ("labelled", "test"))
    classes = len(train.class_names)
    if classes < 2:
        raise UserError(f"--data_dir: expected images of 2 classes or more. Received: {classes}.")
    per_epoch = input_pipeline.steps_per_epoch(train, config.training.batch_size)
    total = config.training.total_steps(len(train))
    for name, learner in (("PyTorch", _pytorch), ("amdim_tf", _amdim_tf)):
        step, encode = learner(config, classes, per_epoch, devices)
        losses, began = [], 0.0
        for number, batch in enumerate(input_pipeline.training_batches(train, config, 0, total)):
            losses.append(step(number, batch))
            began = began or time.perf_counter()
        seconds = time.perf_counter() - began
        epochs = [losses[i : i + per_epoch] for i in range(0, total, per_epoch)]
        means = ", ".join(f"{statistics.mean(epoch):.2f}" for epoch in epochs)
        features = [_features(source, config, encode) for source in (train, test)]
        accuracy = linear_adam.linear_accuracy(*features, classes)
        print(
            f"{name:<9} seed {config.training.seed}, {total} steps in {seconds:.0f} s: losses by "
            f"epoch {means}; linear accuracy {100 * accuracy:.1f}%",
            flush=True,
        )


def _amdim_tf(config, classes: int, per_epoch: int, devices) -> tuple[Callable, Callable]:
    """A step (number, batch) -> loss, and a function from images to f1."""
    from amdim_tf import features, stepping, training_loop

    model = training_loop.compiled_model(config, classes, per_epoch, devices)
    make_step = stepping.step_function(model, devices)
    return lambda _, batch: float(make_step(batch, False)["loss"]), features.f1_of(model)


def _pytorch(config, classes: int, per_epoch: int, _) -> tuple[Callable, Callable]:
    """The same of PyTorch, channels-last, which computes the same numbers and is faster."""
    import torch

    from amdim_tf.optimizer import make_schedule

    torch.manual_seed(config.training.seed)
    model = rivals.model_of(config, torch.channels_last, classes)
    schedule = make_schedule(config.optimizer, per_epoch)

    def step(number, batch):
        model.train().set_learning_rate(float(schedule(number)))
        views = [rivals.to_torch(batch[name], torch.channels_last) for name in ("view1", "view2")]
        return model.train_step(*views, torch.from_numpy(batch["label"].numpy()).long())

    def encode(images):
        with torch.inference_mode():
            return model.encoder.eval()(rivals.to_torch(images, torch.channels_last))[2]

    return step, encode


def _features(source, config, encode: Callable):
    """f1 of all images of a source, for the probe that the authors' code was measured by."""
    from amdim_tf import input_pipeline
    from amdim_tf.feature_splits import Features

    values, labels = [], []
    for images, found in input_pipeline.evaluation_batches(source, config, _PROBED_AT_ONCE):
        values.append(encode(images).numpy())
        labels.append(found.numpy())
    source.skipped.check()
    return Features(np.concatenate(values), np.concatenate(labels))
