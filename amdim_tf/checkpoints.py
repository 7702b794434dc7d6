"""MODEL_DIR: its settings, its checkpoints, and the model that they make."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import pathlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from amdim_tf import checkpoint_files, config_file
from amdim_tf.checkpoint_files import Damaged
from amdim_tf.config import Config
from amdim_tf.errors import UserError, warn
from amdim_tf.model import AMDIM
from amdim_tf.setting_fields import shown

# Storage that fails for another reason than these may recover: seconds before each further attempt.
_FINAL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_RETRY_SECONDS = (1, 4, 16)
# How often a reader looks again when the checkpoint it reads is removed under its hands.
_READ_ATTEMPTS = 10
_LOOP_BYTES = 2**28


class Restored(NamedTuple):
    """What a checkpoint brought back beside weights and optimizer."""

    step: int
    loop: dict[str, np.ndarray]  # the training loop's own figures


class Checkpoints:
    """The checkpoints of a run: weights, optimizer, step, and the training loop's own figures.

    Args:
        model_dir: the run's directory.
        model: its weights are saved and restored, and its optimizer's state if it has one.
        kept: how many of the newest checkpoints stay.
        keep_every: checkpoints of steps that this divides stay as well; 0: none.
    """

    def __init__(self, model_dir, model: AMDIM, kept: int = 1, keep_every: int = 0):
        self._directory = config_file.checkpoints_in(model_dir)
        self._kept, self._keep_every = kept, keep_every
        # The paths of weights do not depend on how objects nest, nor on the version of Keras.
        self._variables = {"model": {v.path: v for v in model.variables}}
        if model.compiled:
            self._variables["optimizer"] = {v.path: v for v in model.optimizer.variables}
        architecture = {
            "image_size": model.image_size, "classes": model.classes,
            **dataclasses.asdict(model.settings),
        }  # fmt: skip
        self._architecture = {name: shown(value) for name, value in architecture.items()}
        self._writer = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")
        self._pending: concurrent.futures.Future | None = None

    def make_ready(self, step: int) -> None:
        """Clears the way for a run that goes on from `step`.

        What a killed process left half done is removed. Checkpoints of later steps, which were
        found damaged, are set aside, since these steps are about to be made again.
        """
        with _refusing(self._directory, "expected a directory of checkpoints"):
            checkpoint_files.remove_leftovers(self._directory)
            for later in checkpoint_files.steps_in(self._directory):
                if later > step:
                    checkpoint_files.set_aside(self._directory, later)

    def save(self, step: int) -> None:
        """Writes a checkpoint of this step, unless it is there already."""
        self.begin_to_save(step, {})
        self.wait()

    def begin_to_save(self, step: int, loop: Mapping[str, np.ndarray]) -> float:
        """Copies the variables and writes them on another thread; returns the seconds it took.

        A checkpoint that is still being written is waited for first.
        """
        began = time.monotonic()
        self.wait()
        groups: dict[str, Mapping[str, np.ndarray]] = {
            group: {name: variable.value.numpy() for name, variable in variables.items()}
            for group, variables in self._variables.items()
        }
        self._pending = self._writer.submit(self._write, step, {**groups, "loop": loop})
        return time.monotonic() - began

    def check(self) -> None:
        """Raises what has gone wrong in the background, without waiting for what has not."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the checkpoint that is being written, if any, is current."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    @property
    def newest(self) -> pathlib.Path | None:
        """Where the newest checkpoint is."""
        steps = checkpoint_files.steps_in(self._directory)
        return checkpoint_files.path_of(self._directory, steps[-1]) if steps else None

    def _write(self, step: int, groups: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        path = checkpoint_files.path_of(self._directory, step)
        hint = "; those before it are whole. Mend that, and run the same command again."
        with _refusing(path, "expected room and permission for a checkpoint", hint):
            if step not in checkpoint_files.steps_in(self._directory):
                facts = {"architecture": self._architecture}
                _retry(path, checkpoint_files.write, self._directory, step, groups, facts)
            checkpoint_files.keep(self._directory, self._kept, self._keep_every)

    def restore_latest(self, step: int | None = None) -> Restored | None:
        """Restores the newest checkpoint that is whole; None where there is none yet.

        Args:
            step: restore the checkpoint of this step, and no other.

        Raises:
            UserError: where all are damaged, or one is whole but of another model.
        """
        with _refusing(self._directory, "expected a directory of checkpoints"):
            removed = False
            for _ in range(_READ_ATTEMPTS):
                try:
                    restored = self._restore(step)
                except FileNotFoundError:  # removed to make room for a newer one
                    removed = True
                    continue
                # A list that is made while they come and go may have none of them.
                if restored is not None or not self._directory.is_dir():
                    return restored
            if not removed:
                return None
            raise UserError(
                f"{self._directory}: expected checkpoints that stay while they are read."
            )

    def _restore(self, only: int | None) -> Restored | None:
        damaged, there = [], checkpoint_files.steps_in(self._directory)
        if only is not None and there and only not in there:
            raise UserError(
                f"--step: expected a step of which there is a checkpoint: "
                f"{', '.join(map(str, there))}. Received: {only}."
            )
        for step in reversed(there if only is None else [only] * (only in there)):
            path = checkpoint_files.path_of(self._directory, step)
            try:
                arrays = self._read(step, path)
            except Damaged as error:
                damaged.append(f"{path}: {error}")
                continue
            for damage in damaged:
                warn(f"{damage}: this checkpoint is damaged; the one before is used.")
            for group, variables in self._variables.items():
                for name, variable in variables.items():
                    variable.assign(arrays[group][name])
            return Restored(step, arrays.get("loop", {}))
        if damaged:
            raise UserError(
                f"{self._directory}: expected a whole checkpoint. Received: damaged ones only "
                f"({damaged[0]}). Bring one back from a copy, or remove them to begin again."
            )
        return None

    def _read(self, step: int, path: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
        """Group -> name -> array of a checkpoint that fits the model."""
        manifest = checkpoint_files.read_manifest(self._directory, step)
        version = checkpoint_files.FORMAT_VERSION
        if manifest.get("format_version") != version:
            raise UserError(
                f"{path}: expected a checkpoint of format_version {version}. Received: "
                f"{manifest.get('format_version')}. Use the version of amdim_tf that wrote it."
            )
        _refuse_differences(path, "settings", self._architecture, manifest.get("architecture"))
        arrays = {}
        for group, variables in self._variables.items():
            most = sum(int(np.prod(v.shape)) * v.value.dtype.size for v in variables.values())
            arrays[group] = checkpoint_files.read_arrays(self._directory, manifest, group, most)
            _refuse_differences(
                path,
                "weights",
                {name: f"{v.dtype}{list(v.shape)}" for name, v in variables.items()},
                {name: f"{a.dtype}{list(a.shape)}" for name, a in arrays[group].items()},
            )
        _refuse_nonfinite(path, arrays["model"])
        if "optimizer" in self._variables:
            arrays["loop"] = checkpoint_files.read_arrays(
                self._directory, manifest, "loop", _LOOP_BYTES
            )
        return arrays


def _refuse_differences(path, what: str, expected: dict[str, str], received: Any) -> None:
    """Refuses a checkpoint of another model, naming the first fields that differ."""
    received = received if isinstance(received, dict) else {}
    different = [
        f"{name} {expected.get(name, 'nothing')} (there: {received.get(name, 'nothing')})"
        for name in dict.fromkeys([*expected, *received])
        if expected.get(name) != received.get(name)
    ]
    if different:
        more = f" and {len(different) - 4} more" if len(different) > 4 else ""
        raise UserError(
            f"{path}: expected a checkpoint of the model that config.json describes. "
            f"Received other {what}: {'; '.join(different[:4])}{more}."
        )


def _refuse_nonfinite(path, weights: dict[str, np.ndarray]) -> None:
    """Refuses weights of which a layer might make numbers that look like results."""
    for name, array in weights.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(
                f"{path}: expected finite weights. Received: others in {name}. Has training "
                "diverged? Remove this checkpoint to use the one before."
            )


def _retry(path, write, *arguments) -> None:
    """Calls `write`, and again a few times where storage fails in a way that may pass."""
    for seconds in _RETRY_SECONDS:
        try:
            return write(*arguments)
        except (OSError, Damaged) as error:
            if getattr(error, "errno", None) in _FINAL_ERRORS:
                raise
            warn(f"{path}: {_reason(error)}; trying again in {seconds} s.")
            time.sleep(seconds)
    return write(*arguments)


@contextlib.contextmanager
def _refusing(path, wanted: str, hint: str = "."):
    """Turns what goes wrong with files into one line that names the path."""
    try:
        yield
    except (OSError, Damaged) as error:
        raise UserError(f"{path}: {wanted}. Received: {_reason(error)}{hint}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def build_model(
    config: Config, classes: int, precision: str = "float32", compiled=False, islands=False
) -> AMDIM:
    """A model with fresh weights, a function of the settings and the seed.

    Args:
        config: the run's settings.
        classes: of the data set.
        precision: of its computations. Weights are float32 in any case, so that what was trained
            in another precision is used in this one.
        compiled, islands: as in AMDIM.
    """
    keras.utils.set_random_seed(config.training.seed)
    with _keras_settings(precision):
        return AMDIM(config, classes, compiled, islands)


@contextlib.contextmanager
def _keras_settings(precision: str):
    """What the layers are written for, whatever ~/.keras/keras.json says; then as it was."""
    before = (
        keras.config.image_data_format(), keras.config.floatx(), keras.config.dtype_policy(),
    )  # fmt: skip
    _set_keras("channels_last", "float32", precision)
    try:
        yield
    finally:
        _set_keras(*before)


def _set_keras(data_format: str, floatx: str, policy) -> None:
    keras.config.set_image_data_format(data_format)
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


def load_model(model_dir, step_wanted: bool = False, step: int | None = None):
    """The model of a training run, with the weights of its newest checkpoint.

    Args:
        model_dir: a directory that `amdim_tf.train` has written.
        step_wanted: return (model, step) instead of the model.
        step: take the checkpoint of this step, and no other.

    Returns:
        A keras.Model with `encode(images, training=False)`.
    """
    config, facts = config_file.load(config_file.path_in(model_dir))
    with _keras_settings("float32"):
        model = AMDIM(config, len(facts["classes"]))
    restored = Checkpoints(model_dir, model).restore_latest(step)
    if restored is None:
        raise UserError(
            f"{config_file.checkpoints_in(model_dir)}: expected a checkpoint; there is none. "
            "Train first, or check --model_dir."
        )
    return (model, restored.step) if step_wanted else model
