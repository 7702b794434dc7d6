"""Which devices a run has, and TensorFlow's strategy for them."""

from __future__ import annotations

import contextlib
import os
import zlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from amdim_tf import clusters, microbatches, watchdog
from amdim_tf.clusters import Cluster
from amdim_tf.config import Config, DistributionConfig, settings_of
from amdim_tf.errors import UserError
from amdim_tf.setting_fields import shown
from amdim_tf.signals import StopSignals, kept_from_threads

# How long TensorFlow may take to connect: workers that have met already, and a TPU, which may have
# to start.
_CONNECT_SECONDS, _TPU_SECONDS = 120.0, 600.0


class Distribution(NamedTuple):
    """The devices of a run.

    Attributes:
        strategy: TensorFlow's; for one device its default, which does nothing.
        worker, workers: this process among all processes of the run. Worker 0 writes the files.
        compiled: whether XLA compiles the step.
    """

    strategy: tf.distribute.Strategy
    worker: int = 0
    workers: int = 1
    compiled: bool = False

    @property
    def replicas(self) -> int:
        """Devices of all workers together."""
        return self.strategy.num_replicas_in_sync

    @property
    def one_device(self) -> bool:
        """Whether the step needs no strategy; that of a TPU compiles, with one core too."""
        return self.replicas == 1 and not _is_tpu(self.strategy)

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's files."""
        return self.worker == 0

    @property
    def islands(self) -> bool:
        """Whether parts of the step are compiled: there is no whole step with several replicas."""
        return self.compiled and self.replicas > 1 and not _is_tpu(self.strategy)

    @property
    def whole_step(self) -> bool:
        """Whether the step is compiled as a whole; a TPU's strategy does so by itself."""
        return self.compiled and self.one_device


def _is_tpu(strategy) -> bool:
    return isinstance(strategy, tf.distribute.TPUStrategy)


def resolve(config: Config, stop: StopSignals | None = None) -> Distribution:
    """Finds the devices, and checks that the batch can be divided among them.

    It has to come before the first operation: devices cannot be split, and workers cannot connect,
    once TensorFlow has begun.

    Args:
        config: the run's settings.
        stop: what ends the wait for other workers.
    """
    settings = config.distribution
    kind, cluster = _kind_of(settings), None
    if kind == "multi_worker":
        cluster = clusters.parse(os.environ.get("TF_CONFIG", ""))
    if kind == "tpu":
        strategy = _tpu_strategy(settings.tpu)
        check_batch(config, strategy.num_replicas_in_sync)
        return Distribution(strategy, compiled=True)
    if kind != "multi_worker" and os.environ.get("TF_CONFIG"):
        _check_alone(kind)
        del os.environ["TF_CONFIG"]  # which MirroredStrategy reads too
    devices = _local_devices(settings, kind)
    workers = len(cluster.addresses) if cluster else 1
    check_batch(config, workers * len(devices))
    compiled = settings.xla == "on" or (settings.xla == "auto" and "GPU" in devices[0])
    if settings.replicas > 1:
        _split_cpu(settings.replicas)
    if cluster and workers * len(devices) > 1:
        strategy = _multi_worker_strategy(
            settings.replicas, cluster, len(devices), stop or StopSignals()
        )
        return Distribution(strategy, cluster.worker, workers, compiled)
    if len(devices) > 1:
        return Distribution(tf.distribute.MirroredStrategy(devices), compiled=compiled)
    if devices == ["CPU:0"] and not compiled:
        _share_two_cores()
    return Distribution(tf.distribute.get_strategy(), compiled=compiled)


def _check_alone(kind: str) -> None:
    """Refuses to leave TF_CONFIG's other workers out: each would train for itself."""
    try:
        workers = len(clusters.parse(os.environ["TF_CONFIG"]).addresses)
    except UserError:  # of some other program's cluster
        return
    if workers > 1:
        raise UserError(
            f"--strategy: expected multi_worker, as TF_CONFIG names {workers} workers. Received: "
            f"{kind}. Give --strategy=multi_worker, or unset TF_CONFIG to train on one machine."
        )


def _kind_of(settings: DistributionConfig) -> str:
    """The kind of strategy: the one that is asked for, or what this machine has."""
    kind = settings.strategy
    if kind == "auto":
        if tf.config.list_physical_devices("TPU"):
            kind = "tpu"
        elif os.environ.get("TF_CONFIG"):
            kind = "multi_worker"
        elif settings.replicas > 1 or len(tf.config.list_physical_devices("GPU")) > 1:
            kind = "mirrored"
        else:
            kind = "one_device"
    if settings.replicas > 1 and kind in ("one_device", "tpu"):
        raise UserError(
            f"--replicas: expected 0 with --strategy={kind}; it splits the CPU for mirrored and "
            f"multi_worker. Received: {settings.replicas}."
        )
    return kind


def _local_devices(settings: DistributionConfig, kind: str) -> list[str]:
    """The devices of this process that train."""
    if settings.replicas > 1:
        return [f"CPU:{number}" for number in range(settings.replicas)]
    devices = [f"GPU:{number}" for number in range(len(tf.config.list_physical_devices("GPU")))]
    return (devices[:1] if kind == "one_device" else devices) or ["CPU:0"]


def check_batch(config: Config, replicas: int) -> None:
    """Refuses a batch that replicas, or their microbatches, cannot share equally."""
    batch = config.training.batch_size
    share = batch // replicas
    most = min(config.distribution.microbatch or share, share)
    unit, why = replicas, f"the {replicas} replicas"
    if batch % replicas == 0:
        at_a_time = microbatches.size_of(share, most)
        alone = at_a_time == 1 and config.distribution.batch_norm == "per_replica"
        if alone and most == 1:
            flag, value = ("microbatch", most) if share > 1 else ("batch_size", batch)
            other = "" if share > 1 else "; or --batch_norm=synchronized"
            raise UserError(
                f"--{flag}: expected at least 2 images of each replica at a time, for batch norm "
                f"to have statistics{other}. Received: {value} for {replicas} replicas and batches "
                f"of {batch}."
            )
        # Far smaller microbatches than asked for would be slow, and have poor statistics.
        if 2 * at_a_time >= most and not alone:
            return
        unit *= most
        why += f" times --microbatch={most}, or one with a divisor near it"
    nearest = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n > 1]
    raise UserError(
        f"--batch_size: expected a multiple of {unit}, {why}; the nearest: "
        f"{' and '.join(map(str, nearest))}. Received: {batch}."
    )


def _share_two_cores() -> None:
    """Of two cores, gives each operation one: a step computes both views side by side.

    Only there, as nothing is known of more cores. TF_NUM_INTRAOP_THREADS, or a process in which
    TensorFlow has begun already, is left as it is: the numbers are the same up to rounding.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores == 2 and not os.environ.get("TF_NUM_INTRAOP_THREADS"):
        with contextlib.suppress(RuntimeError):
            tf.config.threading.set_intra_op_parallelism_threads(1)


def _split_cpu(replicas: int) -> None:
    device = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    if len(tf.config.get_logical_device_configuration(device) or ()) >= replicas:
        return
    try:
        tf.config.set_logical_device_configuration(device, parts)
    except RuntimeError:
        raise UserError(
            f"--replicas: expected to be given before TensorFlow begins. Received: {replicas} in "
            "a process that uses it already."
        ) from None


def _tpu_strategy(name: str) -> tf.distribute.Strategy:
    advice = "--tpu: expected a TPU that answers, local or by name."
    try:
        with (
            kept_from_threads(),
            watchdog.guarded(f"connecting to the TPU {name}", _TPU_SECONDS, advice),
        ):
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
            tf.config.experimental_connect_to_cluster(resolver)
            tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as error:
        reason = str(error).strip().splitlines()[0].split(". ")[0][:300]
        raise UserError(
            f"--tpu: expected a TPU, local or by name, and the package tensorflow-tpu. "
            f"Received: {name} ({reason})."
        ) from None
    return tf.distribute.TPUStrategy(resolver)


def _multi_worker_strategy(
    replicas: int, cluster: Cluster, devices: int, stop: StopSignals
) -> tf.distribute.Strategy:
    """TensorFlow's engine for several machines; all of them have to be there.

    Args:
        replicas: into how many devices a CPU is divided, or fewer than 2.
        cluster: of this worker.
        devices: that this worker has.
        stop: what ends the wait for the others.
    """
    clusters.meet(cluster, devices, stop)
    others = f"connecting to the workers {', '.join(cluster.addresses)}"
    advice = "TF_CONFIG: expected workers that go on after they have met. Start all of them again."
    try:
        # TensorFlow takes SIGTERM when it connects, and cannot be interrupted.
        with (
            _cpu_devices(replicas),
            stop.held_back(),
            watchdog.guarded(others, _CONNECT_SECONDS, advice),
        ):
            return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.OpError as error:
        raise UserError(
            f"TF_CONFIG: expected to reach the workers {', '.join(cluster.addresses)}, as "
            f"{cluster.addresses[cluster.worker]}. Received: "
            f"{error.message.strip().splitlines()[0][:300]}. Start all workers again."
        ) from None


@contextlib.contextmanager
def _cpu_devices(replicas: int):
    """Lets a worker without GPUs have several devices, which TensorFlow has no way to ask for."""
    if replicas < 2:
        yield
        return
    from tensorflow.python.distribute import collective_all_reduce_strategy as engine

    before = engine.CollectiveAllReduceExtended._initialize_local_devices

    def devices(self, resolver, worker_device):
        del self, resolver
        return tuple(f"{worker_device}/device:CPU:{number}" for number in range(replicas)), "CPU"

    engine.CollectiveAllReduceExtended._initialize_local_devices = devices
    try:
        yield
    finally:
        engine.CollectiveAllReduceExtended._initialize_local_devices = before


def values_of_workers(strategy: tf.distribute.Strategy, *values: int) -> np.ndarray:
    """Some ints of each replica, [replicas, n], in order; all workers wait for each other here."""

    def gather():
        return tf.distribute.get_replica_context().all_gather(tf.constant([values]), axis=0)

    everything = tf.function(lambda: strategy.run(gather))()
    return strategy.experimental_local_results(everything)[0].numpy()


# What workers may have different values of: images can lie elsewhere on each machine.
_OWN_SETTINGS = frozenset({"data_dir", "max_bad_images", "tpu", "profile_steps"})


def check_same_settings(devices: Distribution, config: Config, facts: list[str]) -> None:
    """Refuses workers whose settings or images differ: each would train another model.

    Args:
        devices: of the run.
        config: this worker's settings.
        facts: what else all have to agree on, in words.
    """
    settings = settings_of(config)
    shared = {name: shown(settings[name]) for name in settings.keys() - _OWN_SETTINGS}
    given = [f"--{name}={shared[name]}" for name in sorted(shared)] + facts
    digests = [zlib.crc32(text.encode()) // 2 for text in given]  # that int32 has
    found = values_of_workers(devices.strategy, *digests)  # [replicas, n]
    different = [text for text, column in zip(given, found.T, strict=True) if len(set(column)) > 1]
    if different:
        raise UserError(
            f"TF_CONFIG: expected all {devices.workers} workers to have the same settings. "
            f"Received on worker {devices.worker}: {', '.join(different)}; on others: what their "
            "own lines say. Start all of them with the same flags."
        )
