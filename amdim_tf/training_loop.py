"""train(config, model_dir): from settings to a trained model on disk."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from amdim_tf import (
    checkpoints,
    config_file,
    diagnosis,
    distribution,
    input_pipeline,
    policies,
    profiling,
    run_lock,
    run_record,
    sources,
    stepping,
    views,
    workers,
)
from amdim_tf.config import Config, shown
from amdim_tf.distribution import Distribution
from amdim_tf.errors import Interrupted, UserError, warn
from amdim_tf.examples import ArraySource, Source
from amdim_tf.mixture_watch import MixtureWatch
from amdim_tf.model import AMDIM
from amdim_tf.optimizer import make_optimizer
from amdim_tf.progress import Progress, Silence
from amdim_tf.signals import StopSignals
from amdim_tf.summaries import MetricsLog, Window, average

_SHOWN_PAIRS = 16
_WINDOW = "window/"


def train(config: Config, model_dir) -> AMDIM:
    """Trains until the configured number of steps, from the newest checkpoint if there is one.

    Args:
        config: the run's settings.
        model_dir: directory for config.json, checkpoints/, logs/ and metrics.csv.

    Returns:
        The trained model.
    """
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    devices = distribution.resolve(config)
    policy = _kept_policy(config.views.policy, model_dir)
    source = sources.load(config.data, "train")
    per_epoch = input_pipeline.steps_per_epoch(source, config.training.batch_size)
    total = config.training.train_steps or math.ceil(config.training.epochs * per_epoch)
    with devices.strategy.scope():
        model = compiled_model(config, len(source.class_names), per_epoch, devices)
    # Nothing is written before all settings have been accepted, and by one worker only.
    try:
        with run_lock.held(model_dir) if devices.is_chief else contextlib.nullcontext():
            _train_in(model_dir, config, model, source, policy, total, devices)
    except BrokenPipeError:  # of standard output
        raise
    except OSError as error:
        raise UserError(
            f"{error.filename or model_dir}: expected to be written "
            f"({error.strerror or error}). Checkpoints are whole; make room, and run the same "
            "command again."
        ) from None
    return model


def _train_in(
    model_dir, config: Config, model: AMDIM, source: Source, policy, total: int, devices
) -> None:
    """Goes on with the run in model_dir, or begins one."""
    training = config.training
    run = config_file.run_in(model_dir)
    changes = config_file.changes(run[0], config, model_dir) if run else {}
    saved = checkpoints.Checkpoints(
        model_dir, model, training.checkpoints_kept, training.keep_every
    )
    restored = _restore(saved, model_dir, devices)
    if devices.is_chief:
        _write_config(config, model_dir, source, run[1] if run else {}, restored.step, changes)
        if policy is not None:
            policies.save(policy, _policy_path(model_dir))
    say = print if devices.is_chief else _say_nothing
    if restored.step >= total:
        say(f"{model_dir}: already trained for {restored.step} of {total} steps.")
        return
    for name, (before, after) in changes.items():
        say(f"--{name}: {shown(after)} from here on (before: {shown(before)}).")
    say(
        f"Training on {len(source)} images of {config.data.dataset}, steps {restored.step} to "
        f"{total} ({len(source) // training.batch_size} make an epoch); "
        f"{model.count_params():,} parameters{_shown_devices(devices)}."
    )
    check_data = functools.partial(_check_data, source, config, model_dir, devices.worker)
    check_data()
    batches = stepping.batches(source, config, devices, restored.step, total, policy)
    log = MetricsLog(model_dir, restored.step) if devices.is_chief else None
    try:
        loop = _Loop(model, config, saved, log, restored, check_data, devices)
        loop.run(_read(batches, check_data), total)
    finally:
        if log is not None:
            log.close()
    say(
        f"Trained. Files are in {model_dir}; next: python -m amdim_tf.evaluate "
        f"--model_dir={model_dir}"
    )
    if source.skipped.names:
        say(f"{len(source.skipped.names)} images could not be decoded: see skipped_images.txt")


def _say_nothing(text: str) -> None:
    """What workers that do not write have to say."""


def _shown_devices(devices: Distribution) -> str:
    if devices.replicas == 1:
        return ""
    workers = f" of {devices.workers} workers" if devices.workers > 1 else ""
    return f", on {devices.replicas} replicas{workers}"


def _restore(saved: checkpoints.Checkpoints, model_dir, devices) -> checkpoints.Restored:
    """Where the run stands. The first worker clears up before the others look."""
    none = checkpoints.Restored(0, {})
    if devices.is_chief:
        restored = saved.restore_latest() or none
        saved.make_ready(restored.step)
    if devices.workers == 1:
        return restored
    with workers.watched(devices):
        distribution.values_of_workers(devices.strategy, 0)
        if not devices.is_chief:
            restored = saved.restore_latest() or none
        steps = set(distribution.values_of_workers(devices.strategy, restored.step).tolist())
    if len(steps) > 1:
        raise UserError(
            f"--model_dir: expected a directory that all workers share. Received: {model_dir}, "
            f"which has checkpoints of the steps {', '.join(map(str, sorted(steps)))} on them."
        )
    return restored


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


def compiled_model(
    config: Config, classes: int, per_epoch: int, devices: Distribution | None = None
) -> AMDIM:
    """A fresh model with its optimizer, every variable of both in place, for the given devices."""
    xla = (devices.compiled, devices.islands) if devices else (False, False)
    precision = config.distribution.precision
    model = checkpoints.build_model(config, classes, precision, *xla)
    scales_loss = precision == "mixed_float16"
    optimizer = make_optimizer(config.optimizer, per_epoch, scales_loss)
    optimizer.build(model.trained_variables())
    model.compile(optimizer=optimizer, jit_compile=False, auto_scale_loss=False)
    return model


def _write_config(config: Config, model_dir, source: Source, facts, step: int, changes) -> None:
    """Writes config.json with a record of this start; `facts` are those of the run so far."""
    classes, images = list(source.class_names), len(source)
    # A run that was imported has not been started here, and knows only how many classes it has.
    if facts.get("starts") and facts["classes"] != classes:
        raise UserError(
            f"--data_dir: expected the classes that the run began with, {len(facts['classes'])} in "
            f"{config_file.path_in(model_dir)}. Received: others."
        )
    if facts.get("images", images) != images:
        warn(
            f"--data_dir: {images} images ({facts['images']} when the run began): from here on "
            "their order is another."
        )
    starts = facts.get("starts", [])
    record = {**run_record.make(config.training.seed, step), "changes": changes}
    starts = [*starts[:1], *starts[1:][-config_file.MOST_STARTS + 2 :], record]
    path = config_file.path_in(model_dir)
    config_file.save(config, path, {"classes": classes, "images": images, "starts": starts})


class _Loop:
    """Steps, with rows of figures and checkpoints in between.

    Args:
        model, config: what is trained, and how.
        saved: the run's checkpoints.
        log: where the figures go.
        restored: where the run stands.
        check_data: called now and then; raises where the images cannot be used.
        devices: what the steps run on. A worker that is not the chief writes nothing.
    """

    def __init__(self, model: AMDIM, config: Config, saved, log, restored, check_data, devices):
        self._model, self._config, self._training = model, config, config.training
        self._saved, self._log, self._check_data = saved, log, check_data
        self._mixture_watch = MixtureWatch(config.model.mixture_components, warn)
        self._step, self._devices = restored.step, devices
        self._nonfinite = int(restored.loop.get("nonfinite_steps", 0))
        self._window = Window(
            {
                name.removeprefix(_WINDOW): values
                for name, values in restored.loop.items()
                if name.startswith(_WINDOW)
            }
        )
        self._row_began = self._save_began = time.monotonic()
        self._steps_since_row, self._pause = 0, 0.0

    def run(self, batches: Iterator[dict[str, tf.Tensor]], total: int) -> None:
        """Makes a step of each batch, up to step `total`."""
        train_step = stepping.step_function(self._model, self._devices)
        profile = profiling.Profile(self._training.profile_steps, self._log)
        with self._progress(total) as progress, StopSignals() as stop, profile:
            for number, batch in enumerate(batches):
                if number == 0:
                    self._show_views(batch)
                profile.before(self._step + 1)
                with workers.watched(self._devices, self._saved):
                    logs = train_step(batch, bool(stop.received))
                    stopped = float(logs.pop("stop", bool(stop.received)))
                self._step += 1
                self._steps_since_row += 1
                self._window.add(logs)
                if float(logs["nonfinite"]):
                    self._note_nonfinite(batch, logs)
                progress.advance()
                last = self._step == total
                if self._step % self._training.log_steps == 0 or last:
                    progress.show(_figures_line(self._write_row()))
                    self._check_data()
                if self._is_save_due() or last or stopped:
                    self._begin_to_save()
                self._saved.check()
                if stopped and not last:
                    self._finish()
                    raise Interrupted(
                        f"Stopped by {stop.received or 'another worker'} after step {self._step} "
                        f"of {total}, which is saved. The same command goes on from here."
                    )
            self._finish()

    def _progress(self, total: int):
        if not self._devices.is_chief:
            return contextlib.nullcontext(Silence())
        return Progress(total, "train", "step", start=self._step)

    def _finish(self) -> None:
        """Waits for the last checkpoint, and for all workers: who leaves early seems lost."""
        self._saved.wait()
        if self._devices.workers > 1:
            with workers.watched(self._devices, self._saved):
                distribution.values_of_workers(self._devices.strategy, 0)

    def _show_views(self, batch) -> None:
        if self._log is None:
            return
        batch = stepping.of_this_worker(batch, self._devices)
        pairs = [batch[view][:_SHOWN_PAIRS] for view in ("view1", "view2")]
        shown_pairs = [views.denormalize(self._config.views, pair).numpy() for pair in pairs]
        self._log.write_views(self._step + 1, *shown_pairs)

    def _write_row(self) -> dict[str, float]:
        """Writes the means since the last row, and returns them."""
        seconds = time.monotonic() - self._row_began
        images = self._steps_since_row * self._training.batch_size
        figures = average(self._window.arrays())
        figures |= {"images_per_second": images / seconds, "checkpoint_seconds": self._pause}
        if self._log is not None:
            self._log.write(self._step, figures, seconds)
            self._mixture_watch.look(self._step, figures)
        self._window, self._row_began = Window({}), time.monotonic()
        self._steps_since_row, self._pause = 0, 0.0
        return figures

    def _is_save_due(self) -> bool:
        training = self._training
        intervals = (training.checkpoint_steps, training.keep_every)
        minutes = (time.monotonic() - self._save_began) / 60
        return any(interval and self._step % interval == 0 for interval in intervals) or bool(
            training.checkpoint_minutes and minutes >= training.checkpoint_minutes
        )

    def _begin_to_save(self) -> None:
        self._save_began = time.monotonic()
        if not self._devices.is_chief:
            return
        window = {_WINDOW + name: values for name, values in self._window.arrays().items()}
        loop = {"nonfinite_steps": np.array(self._nonfinite), **window}
        self._pause += self._saved.begin_to_save(self._step, loop)

    def _note_nonfinite(self, batch, logs) -> None:
        """Counts a step that changed nothing, and ends the run where that is not allowed."""
        self._nonfinite += 1
        limit = self._training.nonfinite_limit
        if self._training.nonfinite == "skip" and self._nonfinite <= limit:
            return
        self._saved.wait()
        batch = stepping.of_this_worker(batch, self._devices)
        found = diagnosis.describe_step(self._model, batch, logs, self._step - 1)
        raise UserError(
            f"step {self._step}: expected a finite loss and gradient. Received: {found}. Last good "
            f"checkpoint: {self._saved.newest or 'none yet'}. Go on from it with --nonfinite=skip "
            f"(--nonfinite_limit={limit} such steps), or begin again with a lower --learning_rate."
        )


def _read(batches: tf.data.Dataset, check_data: Callable[[], None]):
    """The batches; what goes wrong while they are made is told in one line."""
    iterator = iter(batches)
    while True:
        try:
            batch = next(iterator, None)
        except tf.errors.OpError as error:
            check_data()
            raise UserError(
                f"--data_dir: expected images that can be read. Received: "
                f"{error.message.strip().splitlines()[0][:300]}. Checkpoints are whole; mend that, "
                "and run the same command again."
            ) from None
        if batch is None:
            return
        yield batch


def _check_data(source: Source, config: Config, model_dir, worker: int) -> None:
    """Lists the images that could not be decoded, and stops the run where they are too many."""
    directory = config.data.data_dir
    if directory and not isinstance(source, ArraySource) and not os.path.exists(directory):
        raise UserError(
            f"--data_dir: expected {directory}; it has vanished. Checkpoints are whole; bring it "
            "back, and run the same command again."
        )
    name = f"skipped_images_{worker}.txt" if worker else "skipped_images.txt"
    source.skipped.write(pathlib.Path(model_dir) / name)
    source.skipped.check()


def _figures_line(figures: dict[str, float]) -> str:
    """Loss per task, online accuracies and speed, in few characters."""
    parts = [f"{name[5:]} {figures[name]:.2f}" for name in figures if name.startswith("loss_")]
    for name in ("linear", "mlp"):
        if not math.isnan(figures.get(f"{name}_accuracy", math.nan)):
            parts.append(f"{name} {100 * figures[f'{name}_accuracy']:.0f}%")
    return " ".join([*parts, f"{figures['images_per_second']:.0f} images/s"])
