"""train(config, model_dir): from settings to a trained model on disk."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable

import tensorflow as tf

from amdim_tf import (
    checkpoints,
    config_file,
    distribution,
    input_pipeline,
    policies,
    run_lock,
    run_record,
    sources,
    stepping,
    workers,
)
from amdim_tf.config import Config
from amdim_tf.distribution import Distribution
from amdim_tf.errors import UserError, warn
from amdim_tf.examples import ArraySource, Source
from amdim_tf.loop import Loop
from amdim_tf.model import AMDIM
from amdim_tf.optimizer import make_optimizer
from amdim_tf.setting_fields import shown
from amdim_tf.signals import StopSignals
from amdim_tf.summaries import MetricsLog


def train(config: Config, model_dir, stop: StopSignals | None = None) -> AMDIM:
    """Trains until the configured number of steps, from the newest checkpoint if there is one.

    Args:
        config: the run's settings.
        model_dir: directory for config.json, checkpoints/, logs/ and metrics.csv.
        stop: signals that are noted already; None to note those that come from now on.

    Returns:
        The trained model.
    """
    with contextlib.nullcontext(stop) if stop else StopSignals() as noted:
        return _train(config, model_dir, noted)


def _train(config: Config, model_dir, stop: StopSignals) -> AMDIM:
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    devices = distribution.resolve(config, stop)
    policy = _kept_policy(config.views.policy, model_dir)
    source = sources.load(config.data, "train")
    per_epoch = input_pipeline.steps_per_epoch(source, config.training.batch_size)
    total = config.training.total_steps(len(source))
    profiled = config.training.profile_steps
    if profiled and profiled[0] > total:
        raise UserError(
            f"--profile_steps: expected steps up to the run's last, {total}. Received: "
            f"{shown(profiled)}."
        )
    if devices.workers > 1:
        with workers.watched(devices):
            distribution.check_same_settings(devices, config, workers.facts(source, config, policy))
    with devices.strategy.scope(), workers.watched(devices):
        model = compiled_model(config, len(source.class_names), per_epoch, devices)
    # Nothing is written before all settings have been accepted, and by one worker only.
    try:
        with run_lock.held(model_dir) if devices.is_chief else contextlib.nullcontext():
            _train_in(model_dir, config, model, source, policy, total, devices, stop)
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
    model_dir, config: Config, model: AMDIM, source: Source, policy, total: int, devices, stop
) -> None:
    """Goes on with the run in model_dir, or begins one."""
    training = config.training
    run = config_file.run_in(model_dir)
    changes = config_file.changes(run[0], config, model_dir) if run else {}
    if run:
        _refuse_other_classes(run[1], source, model_dir)
    saved = checkpoints.Checkpoints(
        model_dir, model, training.checkpoints_kept, training.keep_every
    )
    restored = _restore(saved, model_dir, devices)
    if changes.get("profile_steps", ((), ()))[1] and training.profile_steps[0] <= restored.step:
        raise UserError(
            f"--profile_steps: expected steps after {restored.step}, at which the run stands. "
            f"Received: {shown(training.profile_steps)}."
        )
    if devices.is_chief:
        _write_config(config, model_dir, source, run[1] if run else {}, restored.step, changes)
        if policy is not None:
            policies.save(policy, policies.path_in(model_dir))
    else:
        workers.wait_for_config(model_dir, stop)
        print(
            f"Worker {devices.worker}, of {devices.workers} in all: training from step "
            f"{restored.step} to {total}. Worker 0 shows how it goes, and writes {model_dir}."
        )
    say = print if devices.is_chief else _say_nothing
    if restored.step >= total:
        say(f"{model_dir}: already trained for {restored.step} of {total} steps.")
        return
    for name, (before, after) in changes.items():
        say(f"--{name}: {shown(after)} from here on (before: {shown(before)}).")
    say(
        f"Training on {len(source)} images of {config.data.dataset}, steps {restored.step} to "
        f"{total} ({len(source) // training.batch_size} make an epoch); "
        f"{model.count_params():,} parameters, on {_shown_devices(devices)}."
    )
    check_data = functools.partial(_check_data, source, config, model_dir, devices.worker)
    check_data()
    batches = stepping.batches(source, config, devices, restored.step, total, policy)
    log = MetricsLog(model_dir, restored.step) if devices.is_chief else None
    try:
        loop = Loop(model, config, saved, log, restored, check_data, devices, stop)
        loop.run(_read(batches, check_data), total)
    finally:
        if log is not None:
            log.close()
    if not devices.is_chief:
        print(f"Worker {devices.worker}: trained to step {total}.")
    program = "evaluate" if source.class_names else "export"  # without labels, nothing to measure
    say(
        f"Trained. Files are in {model_dir}; next: python -m amdim_tf.{program} "
        f"--model_dir={model_dir}"
    )
    if source.skipped.names:
        say(f"{len(source.skipped.names)} images could not be decoded: see skipped_images.txt")


def _say_nothing(text: str) -> None:
    """What workers that do not write have to say."""


def _shown_devices(devices: Distribution) -> str:
    """What the steps run on, with the kind of device: without its libraries a GPU goes unseen."""
    if devices.one_device:
        return "the GPU" if tf.config.list_physical_devices("GPU") else "the CPU"
    kind = tf.DeviceSpec.from_string(devices.strategy.extended.worker_devices[0]).device_type
    workers = f" of {devices.workers} workers" if devices.workers > 1 else ""
    return f"{devices.replicas} {kind} replicas{workers}"


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
        steps = set(distribution.values_of_workers(devices.strategy, restored.step)[:, 0].tolist())
    if len(steps) > 1:
        raise UserError(
            f"--model_dir: expected a directory that all workers share. Received: {model_dir}, "
            f"which has checkpoints of the steps {', '.join(map(str, sorted(steps)))} on them."
        )
    return restored


def _kept_policy(name: str, model_dir) -> policies.Policy | None:
    """The run's policy: the copy in model_dir if there is one, which a file must still equal."""
    if not name:
        return None
    kept = policies.of_run(name, model_dir)
    policy = policies.load(kept)
    moved = name.endswith(".json") and not os.path.exists(name)
    if kept != name and not moved and policies.load(name) != policy:
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


def _refuse_other_classes(facts, source: Source, model_dir) -> None:
    """Refuses images of other classes than those of the run, whose `facts` config.json has."""
    if not facts.get("starts"):  # It was imported, and knows only how many classes it has.
        return
    began, classes = facts["classes"], list(source.class_names)
    if began == classes:
        return
    gone = [name for name in began if name not in classes]
    new = [name for name in classes if name not in began]
    differences = [f"without {_few(gone)}"] * bool(gone) + [f"with {_few(new)}"] * bool(new)
    raise UserError(
        f"--data_dir: expected the {len(began)} classes that the run began with, in "
        f"{config_file.path_in(model_dir)}. Received: {len(classes)}, "
        f"{' and '.join(differences) or 'in another order'}. Use another --model_dir for them."
    )


def _few(names: list[str]) -> str:
    """The first of some names, for an error."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(repr, names[:3])) + more


def _write_config(config: Config, model_dir, source: Source, facts, step: int, changes) -> None:
    """Writes config.json with a record of this start; `facts` are those of the run so far."""
    classes, images = list(source.class_names), len(source)
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
    # Others than the first may look before it has written its files.
    if worker == 0 and not config_file.path_in(model_dir).exists():
        raise UserError(
            f"--model_dir: expected {config_file.path_in(model_dir)}; it has vanished. What was "
            "trained cannot be kept without it: begin again, in another directory."
        )
    name = f"skipped_images_{worker}.txt" if worker else "skipped_images.txt"
    source.skipped.write(pathlib.Path(model_dir) / name)
    source.skipped.check()
