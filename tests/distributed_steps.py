"""Makes some training steps on given devices, for test_distribution.py; a process of its own.

Usage: python distributed_steps.py OUTPUT_DIR ROWS, with ROWS as JSON: [{"name", "settings"}, ...].
A row with "parts" is what others are compared with, one with "zero" has embeddings of zero, and one
with "scale" begins with that loss scale. Under TF_CONFIG it is one worker of several. Each row
writes NAME.WORKER.npz: weights and logs.
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
import tensorflow as tf

from amdim_tf import batch_norm, classifiers, distribution, nce, stepping, training_loop, winograd
from amdim_tf import config as config_lib

BATCH, STEPS, CLASSES = 16, 3, 3
# Adam moves a weight by the sign of its gradient at first, even where that is mere rounding: the
# steps are large beside the tolerance of the comparison, 1e-5, but not so large that rounding is.
COMMON = {
    "ndf": 4, "n_rkhs": 32, "n_depth": 1, "batch_size": BATCH, "warmup_steps": 0,
    "learning_rate": 1e-4, "weight_decay": 0.05, "tasks": ["1to7", "5to5"],
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


def _once(make):
    """Lets all rows share a strategy: two in one process would mix up their collectives."""
    made = {}

    def strategy(devices, *others):
        if str(devices) not in made:
            made[str(devices)] = make(devices, *others)
        return made[str(devices)]

    return strategy


tf.distribute.MirroredStrategy = _once(tf.distribute.MirroredStrategy)
distribution._multi_worker_strategy = _once(distribution._multi_worker_strategy)


def run_steps(settings, zero=False, scale=None):
    """Weights and losses after some steps by the training loop's own step."""
    config = config_lib.make({**COMMON, **settings})
    devices = distribution.resolve(config)
    with devices.strategy.scope():
        model = training_loop.compiled_model(config, CLASSES, 10, devices)
        make_weights_interesting(model)
        if zero:
            for layer in model.norms().values():
                layer.gamma.assign(tf.zeros_like(layer.gamma))
        if scale:
            model.optimizer.scale.assign(scale)
    first = {f"first/{variable.path}": variable.numpy() for variable in model.variables}
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
    return {**first, **losses, **weights}


def run_plain_steps(settings, parts):
    """The same by plain differentiation of the global loss, on one device.

    Batch norm sees the batch in `parts` parts; everything else sees it whole.
    """
    config = config_lib.make({**COMMON, **settings})
    model = training_loop.compiled_model(config, CLASSES, 10)
    make_weights_interesting(model)
    step = tf.function(lambda batch: plain_step(model, batch, parts), autograph=False)
    rows = [step({n: tf.constant(v) for n, v in make_batch(i).items()}) for i in range(STEPS)]
    losses = {f"log/{name}": [float(row[name]) for row in rows] for name in rows[0]}
    return {**losses, **{variable.path: variable.numpy() for variable in model.variables}}


def plain_step(model, batch, parts):
    """One step without any of the step's own machinery but the model's layers and the NCE."""
    step, settings, size = model.optimizer.iterations.value, model.settings, BATCH // parts
    locations = model.draw_locations(BATCH, step)
    noise = model.draw([2 * BATCH, settings.n_rkhs + model.mlp.hidden], step, key=2)
    noise = tf.reshape(noise, [2, BATCH, -1])
    views, components, logits, moments = ([], []), ([], []), [], []
    with tf.GradientTape() as tape:
        for begin in range(0, BATCH, size):
            rows = slice(begin, begin + size)
            with batch_norm.collected(synchronized=False) as collector:
                images = tf.concat([batch["view1"][rows], batch["view2"][rows]], 0)
                features = model.encoder(images, training=True, groups=2)
                embedded = model.embed(features, model.scales, training=True, groups=2)
                kept = tf.concat([noise[0, rows], noise[1, rows]], 0)
                logits.append(model.classify(features["f1"], kept, training=True))
            moments.append(collector.moments)
            for view in (0, 1):
                views[view].append({n: tf.split(v, 2)[view] for n, v in embedded.items()})
                if model.mixture is not None:
                    components[view].append(model.mixture(tf.split(features["f1"], 2)[view]))
        whole = [
            {n: tf.concat([part[n] for part in of_view], 0) for n in model.scales}
            for of_view in views
        ]
        drawn = [{n: both[view] for n, both in locations.items()} for view in (0, 1)]
        tasks = nce.multiscale_losses(
            settings.tasks, *whole, *drawn, settings.score_clip, settings.score_regularization,
            mixtures=[tf.concat(of_view, 0) for of_view in components if of_view],
            temperature=settings.mixture_temperature,
        )  # fmt: skip
        order = [rows for b in range(0, BATCH, size) for rows in 2 * [batch["label"][b : b + size]]]
        losses = {
            name: classifiers.classification_loss(
                tf.concat([part[name] for part in logits], 0), tf.concat(order, 0)
            )[0]
            for name in ("linear", "mlp")
        }
        loss = tf.add_n([task.loss for task in tasks.values()])
        total = loss + tf.add_n([task.regularizer for task in tasks.values()])
        total += losses["linear"] + losses["mlp"]
    trained = model.trained_variables()
    gradients = tape.gradient(total, [variable.value for variable in trained])
    model.optimizer.apply_gradients(zip(gradients, trained, strict=True))
    for name, layer in model.norms().items():
        layer.move(*tf.unstack(tf.reduce_mean([part[name] for part in moments], axis=0)))
    if model.mixture is not None:
        local = nce.flat_locations(whole[1][7])
        model.mixture.negatives.assign(model.mixture.choose_negatives(local, BATCH, 0))
    logs = {f"loss_{name}": task.loss for name, task in tasks.items()}
    return {**logs, "loss": loss, "linear_loss": losses["linear"], "mlp_loss": losses["mlp"]}


def main():
    """Runs the rows one after the other."""
    # Steps multiply less as those of large models and batches do; what they are compared with does
    # not.
    winograd._FEWEST_IMAGES = winograd._FEWEST_CHANNELS = 1
    directory, rows = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    worker = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": 0}}'))["task"]["index"]
    most = max(row["settings"].get("replicas", 1) for row in rows)
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(most)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    for row in rows:
        name = row.pop("name")
        made = run_plain_steps(**row) if "parts" in row else run_steps(**row)
        np.savez(directory / f"{name}.{worker}.npz", **made)


if __name__ == "__main__":
    main()
