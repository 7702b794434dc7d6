"""Makes some training steps on given devices, for test_distribution.py; a process of its own.

Usage: python distributed_steps.py OUTPUT_DIR ROWS, with ROWS as JSON: [{"name", "settings"}, ...].
Under TF_CONFIG it is one worker of several. Each row writes NAME.npz: weights and losses.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
import tensorflow as tf

from amdim_tf import config as config_lib
from amdim_tf import distribution, stepping, training_loop

BATCH, STEPS, CLASSES = 16, 3, 3
COMMON = {
    "ndf": 4, "n_rkhs": 32, "n_depth": 1, "batch_size": BATCH, "warmup_steps": 0,
    "learning_rate": 3e-4, "weight_decay": 0.05,
}  # fmt: skip


def make_batch(step):
    """The global batch of a step, some of its images unlabelled."""
    rng = np.random.default_rng(step)
    first = rng.standard_normal([BATCH, 32, 32, 3]).astype(np.float32)
    second = first + 0.3 * rng.standard_normal(first.shape).astype(np.float32)
    label = rng.integers(-1, CLASSES, BATCH).astype(np.int32)
    return {"view1": first, "view2": second, "label": label}


def make_weights_interesting(model):
    """Moves zero-initialized kernels away from zero, where much of the model is switched off."""
    for number, variable in enumerate(model.trainable_variables):
        if variable.path.endswith("conv2/kernel"):
            noise = np.random.default_rng(number).standard_normal(variable.shape)
            variable.assign(0.05 * noise.astype(np.float32))


def _strategy_once(make=tf.distribute.MirroredStrategy, made={}):  # noqa: B006
    """Lets all rows share a strategy: two in one process would mix up their collectives."""

    def strategy(devices):
        if tuple(devices) not in made:
            made[tuple(devices)] = make(devices)
        return made[tuple(devices)]

    return strategy


tf.distribute.MirroredStrategy = _strategy_once()


def run_steps(settings):
    """Weights and losses after some steps by the training loop's own step."""
    config = config_lib.make({**COMMON, **settings})
    devices = distribution.resolve(config)
    with devices.strategy.scope():
        model = training_loop.compiled_model(config, CLASSES, 10, devices.islands)
        make_weights_interesting(model)
    step = stepping.step_function(model, devices)
    share = BATCH // devices.replicas
    rows = []
    for number in range(STEPS):
        whole = make_batch(number)

        def part(context, whole=whole):
            begin = context.replica_id_in_sync_group * share
            return {name: tf.constant(v[begin : begin + share]) for name, v in whole.items()}

        batch = devices.strategy.experimental_distribute_values_from_function(part)
        rows.append({name: float(value) for name, value in step(batch, False).items()})
    losses = {f"log/{name}": [row[name] for row in rows] for name in rows[0]}
    weights = {variable.path: variable.numpy() for variable in model.variables}
    return {**losses, **weights}


def main():
    """Runs the rows one after the other."""
    directory, rows = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    most = max(row["settings"].get("replicas", 1) for row in rows)
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(most)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    for row in rows:
        np.savez(directory / f"{row['name']}.{worker}.npz", **run_steps(row["settings"]))


if __name__ == "__main__":
    main()
