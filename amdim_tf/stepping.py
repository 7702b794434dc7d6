"""One training step on all devices, and the batches that it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import tensorflow as tf

from amdim_tf import input_pipeline, replicas
from amdim_tf.config import Config
from amdim_tf.distribution import Distribution
from amdim_tf.examples import Source
from amdim_tf.model import AMDIM

# Iterators over several devices, kept for good: the parts that TensorFlow adds for each device are
# tuned in any case, and to be destroyed they may wait for it. A program ends by os._exit.
_ENDLESS: list = []


def step_function(model: AMDIM, devices: Distribution) -> Callable:
    """(batch, stop) -> logs: one step on all devices.

    With several workers, the log `stop` is how many replicas' workers were asked to stop: all see
    the same number after the same step, and so they stop together.
    """
    strategy = devices.strategy
    if devices.one_device:
        return _one_device_step(model, devices.whole_step)

    def replica_step(batch, stop):
        logs = model.train_step(batch)
        if devices.workers > 1:
            # The copy is on the replica's device; an argument is on none, which cannot be summed.
            logs["stop"] = replicas.summed(tf.identity(stop))
        return logs

    # Without AutoGraph, which nothing here needs and which doubles the time of tracing.
    @tf.function(autograph=False)
    def step(batch, stop):
        logs = strategy.run(replica_step, args=(batch, stop))
        return {name: strategy.experimental_local_results(v)[0] for name, v in logs.items()}

    return lambda batch, stop: step(batch, tf.constant(float(stop)))


def _one_device_step(model: AMDIM, compiled: bool) -> Callable:
    if not compiled:
        step = tf.function(model.train_step, autograph=False)
        return lambda batch, stop: step(batch)
    compiled_step = tf.function(model.training_step, jit_compile=True, autograph=False)

    @tf.function(autograph=False)
    def step(batch):
        return compiled_step(batch, model.training_step.draw(batch["view1"].shape[0]))

    return lambda batch, stop: step(batch)


def batches(
    source: Source, config: Config, devices: Distribution, first_step: int, last_step: int, policy
):
    """The training batches, each on the devices that need it.

    A worker reads its own share of a batch; its replicas get equal parts of it, in order.
    """

    def of_worker():
        return input_pipeline.training_batches(
            source, config, first_step, last_step, devices.worker, devices.workers, policy
        )

    if devices.one_device:
        gpus = tf.config.list_logical_devices("GPU")
        to_device = tf.data.experimental.prefetch_to_device
        return of_worker().apply(to_device(gpus[0].name)) if gpus else of_worker()
    local = devices.replicas // devices.workers

    def part(batch):
        return {
            name: tf.reshape(value, [local, value.shape[0] // local, *value.shape[1:]])
            for name, value in batch.items()
        }

    # TensorFlow waits for the thread that tunes a distributed data set, up to a minute, at its end.
    untuned = tf.data.Options()
    untuned.autotune.enabled = False
    # A replica takes one element after the other; TensorFlow copies them to its device ahead. Of
    # batches without end, since workers would else ask each other before every one whether it is
    # the last.
    endless = devices.strategy.distribute_datasets_from_function(
        lambda context: (
            of_worker().map(part).unbatch().prefetch(2 * local).repeat().with_options(untuned)
        )
    )
    _ENDLESS.append(iter(endless))
    return itertools.islice(_ENDLESS[-1], last_step - first_step)


def of_this_worker(batch, devices: Distribution) -> dict[str, tf.Tensor]:
    """The images of a batch that this worker's replicas have, as one batch."""
    if devices.one_device:
        return batch
    local = devices.strategy.experimental_local_results
    return {name: tf.concat(local(value), axis=0) for name, value in batch.items()}
