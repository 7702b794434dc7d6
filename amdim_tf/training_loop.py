"""train(config, model_dir): from settings to a trained model on disk."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import time

import tensorflow as tf

from amdim_tf import checkpoints, input_pipeline, policies, sources, views
from amdim_tf import config as config_lib
from amdim_tf.config import Config
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.examples import Source
from amdim_tf.model import AMDIM
from amdim_tf.optimizer import make_optimizer
from amdim_tf.progress import Progress
from amdim_tf.signals import StopSignals
from amdim_tf.summaries import MetricsLog, average

_SHOWN_PAIRS = 16


def train(config: Config, model_dir) -> AMDIM:
    """Trains until the configured number of steps, from the newest checkpoint if there is one.

    Args:
        config: the run's settings.
        model_dir: directory for config.json, checkpoints/, logs/ and metrics.csv.

    Returns:
        The trained model.
    """
    policy = _kept_policy(config.views.policy, model_dir)
    source = sources.load(config.data, "train")
    per_epoch = input_pipeline.steps_per_epoch(source, config.training.batch_size)
    total = config.training.train_steps or math.ceil(config.training.epochs * per_epoch)
    model = compiled_model(config, len(source.class_names), per_epoch)
    saved = checkpoints.Checkpoints(model_dir, model, config.training.checkpoints_kept)
    step = saved.restore_latest() or 0
    # Nothing is written before all settings have been accepted.
    _write_config(config, model_dir, source)
    if policy is not None:
        policies.save(policy, _policy_path(model_dir))
    if step >= total:
        print(f"{model_dir}: already trained for {step} of {total} steps.")
        return model
    print(
        f"Training on {len(source)} images of {config.data.dataset}, steps {step} to {total} "
        f"({per_epoch} make an epoch); {model.count_params():,} parameters."
    )
    report_skipped = functools.partial(_report_skipped, source, model_dir)
    report_skipped()
    batches = input_pipeline.training_batches(source, config, step, total, policy=policy)
    log = MetricsLog(model_dir, step)
    try:
        _run_steps(model, batches, config, saved, log, step, total, report_skipped)
    except tf.errors.OpError:
        report_skipped()  # an input pipeline that found too many bad images says so here
        raise
    except OSError as error:
        raise UserError(
            f"{error.filename or model_dir}: expected to be written ({error.strerror}). The newest "
            "checkpoint is whole; make room, and run the same command again."
        ) from None
    finally:
        log.close()
    print(
        f"Trained. Files are in {model_dir}; next: python -m amdim_tf.evaluate "
        f"--model_dir={model_dir}"
    )
    if source.skipped.names:
        print(f"{len(source.skipped.names)} images could not be decoded: see skipped_images.txt")
    return model


def _policy_path(model_dir) -> pathlib.Path:
    return pathlib.Path(model_dir) / "policy.json"


def _kept_policy(name: str, model_dir) -> policies.Policy | None:
    """The run's policy: the copy in model_dir if there is one, which a file must still equal."""
    if not name:
        return None
    kept = _policy_path(model_dir)
    if not kept.exists():
        return policies.load(name)
    policy = policies.load(kept)
    if not (name.endswith(".json") and not os.path.exists(name)) and policies.load(name) != policy:
        raise UserError(
            f"--policy: expected the policy that the run began with, {kept}. Received: {name}, "
            "which has changed. Use another --model_dir for it."
        )
    return policy


def compiled_model(config: Config, classes: int, per_epoch: int) -> AMDIM:
    """A fresh model with its optimizer, every variable of both in place."""
    model = checkpoints.build_model(config, classes)
    optimizer = make_optimizer(config.optimizer, per_epoch)
    optimizer.build(model.trained_variables())
    model.compile(optimizer=optimizer, jit_compile=False)
    return model


def _write_config(config: Config, model_dir, source: Source) -> None:
    path = config_lib.path_in(model_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        config_lib.save(config, path, {"classes": list(source.class_names)})
    except OSError as error:
        raise UserError(
            f"--model_dir: expected a directory that can be written. Received: {model_dir} "
            f"({error.strerror})."
        ) from None


def _run_steps(model, batches, config, saved, log, first_step, total, report_skipped) -> None:
    """Steps, with rows of figures and checkpoints in between."""
    train_step = tf.function(model.train_step)
    training = config.training
    window, window_began = [], time.monotonic()
    progress = Progress(total, "train", "step", start=first_step)
    with progress, StopSignals() as signals:
        for step, batch in enumerate(batches, start=first_step + 1):
            if step == first_step + 1:
                shown = [
                    views.denormalize(config.views, batch[view][:_SHOWN_PAIRS]).numpy()
                    for view in ("view1", "view2")
                ]
                log.write_views(step, *shown)
            window.append(train_step(batch))
            progress.advance()
            if step % training.log_steps == 0 or step == total:
                figures = average(window)
                seconds = time.monotonic() - window_began
                figures["images_per_second"] = len(window) * training.batch_size / seconds
                log.write(step, figures, seconds)
                progress.show(_figures_line(figures))
                report_skipped()
                window, window_began = [], time.monotonic()
            if step % training.checkpoint_steps == 0 or step == total or signals.received:
                saved.save(step)
            if signals.received and step < total:
                raise Interrupted(
                    f"Stopped by {signals.received} after step {step} of {total}, which is saved. "
                    "The same command goes on from here."
                )


def _report_skipped(source: Source, model_dir) -> None:
    """Lists the images that could not be decoded, and stops the run where they are too many."""
    source.skipped.write(pathlib.Path(model_dir) / "skipped_images.txt")
    source.skipped.check()


def _figures_line(figures: dict[str, float]) -> str:
    """Loss per task, online accuracies and speed, in few characters."""
    parts = [f"{name[5:]} {figures[name]:.2f}" for name in figures if name.startswith("loss_")]
    for name in ("linear", "mlp"):
        if not math.isnan(figures.get(f"{name}_accuracy", math.nan)):
            parts.append(f"{name} {100 * figures[f'{name}_accuracy']:.0f}%")
    return " ".join([*parts, f"{figures['images_per_second']:.0f} images/s"])
