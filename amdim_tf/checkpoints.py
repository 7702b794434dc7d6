"""MODEL_DIR: its settings, its checkpoints, and the model that they make."""

from __future__ import annotations

import contextlib

import keras
import tensorflow as tf

from amdim_tf import config as config_lib
from amdim_tf.config import Config
from amdim_tf.errors import UserError
from amdim_tf.model import AMDIM


def _by_name(variables) -> dict[str, tf.Variable]:
    """TensorFlow variables by path: names in a checkpoint do not depend on how objects nest."""
    return {variable.path: variable.value for variable in variables}


class Checkpoints:
    """The checkpoints of a run: weights, optimizer and step.

    Args:
        model_dir: the run's directory.
        model: its weights are saved and restored.
        kept: how many of the newest checkpoints stay.
    """

    def __init__(self, model_dir, model: AMDIM, kept: int = 1):
        self._model = model
        self._directory = config_lib.checkpoints_in(model_dir)
        contents = {"model": _by_name(model.variables)}
        if model.compiled:
            contents["optimizer"] = _by_name(model.optimizer.variables)
        self._checkpoint = tf.train.Checkpoint(**contents)
        with _refusing(self._directory, "expected checkpoints"):
            self._manager = tf.train.CheckpointManager(
                self._checkpoint, str(self._directory), max_to_keep=kept, checkpoint_name="step"
            )

    def save(self, step: int) -> None:
        """Writes a checkpoint of this step, unless it is there already."""
        if self._manager.latest_checkpoint == str(self._directory / f"step-{step}"):
            return
        wanted = f"expected room and permission for a checkpoint of step {step}"
        with _refusing(self._directory, wanted):
            self._manager.save(checkpoint_number=step)

    def restore_latest(self) -> int | None:
        """Restores the newest checkpoint and returns its step; None where there is none yet."""
        latest = self._manager.latest_checkpoint
        if latest is None:
            return None
        self._check_shapes(latest)
        # A model without optimizer, as evaluation has it, leaves that part of the file unused.
        with _refusing(latest, "expected a whole checkpoint step-N"):
            self._checkpoint.restore(latest).expect_partial().assert_existing_objects_matched()
            return int(latest.rpartition("-")[2])

    def _check_shapes(self, path: str) -> None:
        """Refuses a file whose weights are not the model's, naming the first that differ."""
        with _refusing(path, "expected a readable checkpoint"):
            found = tf.train.load_checkpoint(path).get_variable_to_shape_map()
        different = []
        for variable in self._model.variables:
            shape, key = list(variable.shape), _key_in_file(variable)
            if found.get(key) != shape:
                different.append(f"{variable.path} {shape} (there: {found.get(key, 'nothing')})")
        if different:
            more = f" and {len(different) - 3} more" if len(different) > 3 else ""
            raise UserError(
                f"{path}: expected a checkpoint of the model that config.json describes. "
                f"Received other weights: {'; '.join(different[:3])}{more}."
            )


@contextlib.contextmanager
def _refusing(path, wanted: str):
    """Turns what TensorFlow raises for bad files into one line that names the path."""
    try:
        yield
    except (OSError, IndexError, ValueError, AssertionError, tf.errors.OpError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: {wanted}. Received: {reason}") from None


def _key_in_file(variable: keras.Variable) -> str:
    """The name under which tf.train.Checkpoint keeps a weight."""
    name = variable.path.replace(".", "..").replace("/", ".S")
    return f"model/{name}/.ATTRIBUTES/VARIABLE_VALUE"


def build_model(config: Config, classes: int) -> AMDIM:
    """A model with fresh weights, a function of the settings and the seed."""
    keras.utils.set_random_seed(config.training.seed)
    return AMDIM(config, classes)


def load_model(model_dir, step_wanted: bool = False):
    """The model of a training run, with the weights of its newest checkpoint.

    Args:
        model_dir: a directory that `amdim_tf.train` has written.
        step_wanted: return (model, step) instead of the model.

    Returns:
        A keras.Model with `encode(images, training=False)`.
    """
    config, facts = config_lib.load(config_lib.path_in(model_dir))
    model = build_model(config, len(facts["classes"]))
    step = Checkpoints(model_dir, model).restore_latest()
    if step is None:
        raise UserError(
            f"{config_lib.checkpoints_in(model_dir)}: expected a checkpoint; there is none. "
            "Train first, or check --model_dir."
        )
    return (model, step) if step_wanted else model
