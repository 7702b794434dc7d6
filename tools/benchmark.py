"""Measures speed and memory on this machine, beside the machine's own limit.

Usage:
    python tools/benchmark.py train --ndf=128 --n_rkhs=1024 --n_depth=10 --batch_size=32
    python tools/benchmark.py input --dataset=folder --data_dir=PHOTOS --batch_size=64
    python tools/benchmark.py memory --batch_size=1008 --microbatch=32
    python tools/benchmark.py nce

train: the whole training step, online classifiers included, on images in memory. The limit is a
large matrix product, repeated for a second before and after every step, since the speed of a shared
machine changes from second to second: its sustained rate, which like a step's is a mean over the
machine's moods, and its best single run.

input: the training pipeline, from files (or memory, for small images) to batches of two normalized
views, on one core, beside the same work done image by image with Pillow in the same run, in turns.

memory: peak memory of a step in microbatches, beside that of a plain batch as large as one of them.

nce: the NCE and its gradient in blocks, beside the dense form: time at batch 512, in turns, and
memory at batch 4096. (step_peak and nce_peak are the parts of these that need a process each.)
"""

import functools
import itertools
import os
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import numpy as np
from absl import flags

from amdim_tf import cli_flags
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError

cli_flags.define_config_flags()
flags.adopt_module_key_flags(cli_flags)
flags.DEFINE_integer("steps", 8, "Timed steps, after two that warm up.", lower_bound=1)

flags.DEFINE_float("seconds", 3.0, "Seconds of each turn of `input`.", lower_bound=0.1)

_MATRIX_SIDE = 2048
_CLASSES = 10


def matmul_rates():
    """A function that repeats a 2048×2048 float32 matrix product for a second.

    It returns the GFLOP/s of the whole second and of the fastest product.
    """
    import tensorflow as tf

    @tf.function
    def product(a, b):
        return tf.matmul(a, b)

    matrices = [tf.random.stateless_normal([_MATRIX_SIDE] * 2, seed=[i, 0]) for i in range(2)]
    product(*matrices)

    def measure():
        times = []
        while sum(times) < 1.0:
            times.append(_seconds(lambda: product(*matrices).numpy()))
        gflop = 2 * _MATRIX_SIDE**3 / 1e9
        return gflop * len(times) / sum(times), gflop / min(times)

    return measure


def _seconds(run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def peak_memory_mib() -> float:
    """The most resident memory this process has had so far."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise UserError("/proc/self/status: expected a line VmHWM; memory is measured on Linux only.")


def make_data(config):
    """A batch of noise."""
    import tensorflow as tf

    size, batch = config.data.image_size, config.training.batch_size
    shape = [batch, size, size, 3]
    return {
        "view1": tf.random.stateless_normal(shape, seed=[0, 1]),
        "view2": tf.random.stateless_normal(shape, seed=[0, 2]),
        "label": tf.random.stateless_uniform([batch], [0, 3], maxval=_CLASSES, dtype=tf.int32),
    }


def benchmark_train() -> None:
    """Times the training step of the configured model."""
    config = config_lib.make(cli_flags.given_settings())
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import costs, distribution, stepping, training_loop

    size, batch = config.data.image_size, config.training.batch_size
    before = peak_memory_mib()
    devices = distribution.resolve(config)
    model = training_loop.compiled_model(config, _CLASSES, per_epoch=1000, devices=devices)
    data, step = make_data(config), stepping.step_function(model, devices)

    def run():
        step(data, False)["loss"].numpy()

    first = _seconds(run)
    run()
    memory = peak_memory_mib() - before
    measure = matmul_rates()
    times, rates = [], [measure()]
    for _ in range(cli_flags.FLAGS.steps):
        times.append(_seconds(run))
        rates.append(measure())
    gflop = costs.step_flops(model, batch) / 1e9
    model_settings = config.model
    print(
        f"train size {size} ({model_settings.ndf}, {model_settings.n_rkhs}, "
        f"{model_settings.n_depth}) batch {batch}, {model.count_params():,} parameters"
    )
    print(f"  first step            {first:8.1f} s")
    for name, summary in (("median", statistics.median), ("best", min)):
        seconds = summary(times)
        print(
            f"  step, {name:<15} {1000 * seconds:8.1f} ms {batch / seconds:8.1f} images/s "
            f"{gflop / seconds:7.1f} GFLOP/s"
        )
    neighbours = list(itertools.pairwise(rates))  # before and after each step
    limits = {
        "sustained": [(before[0] + after[0]) / 2 for before, after in neighbours],
        "best": [max(before[1], after[1]) for before, after in neighbours],
    }
    for name, values in limits.items():
        shares = [gflop / seconds / limit for seconds, limit in zip(times, values, strict=True)]
        print(
            f"  matmul, {name:<13} {min(values):8.1f} to {max(values):.1f} GFLOP/s; the step has "
            f"{100 * statistics.median(shares):.1f}% "
            f"(median; {100 * min(shares):.1f}% to {100 * max(shares):.1f}%)"
        )
    print(f"  arithmetic            {gflop / batch:8.2f} GFLOP per image pair")
    print(f"  peak memory           {memory:8.0f} MiB beyond {before:.0f} MiB after imports")


def benchmark_input() -> None:
    """Times the input pipeline beside Pillow, a few seconds each in turn, on one core."""
    config = config_lib.make(cli_flags.given_settings())
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cli_flags.import_tensorflow_quietly()
    import random

    import pillow_views
    import tensorflow as tf

    from amdim_tf import input_pipeline, policies, sources
    from amdim_tf.examples import ArraySource

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    source = sources.load(config.data, "train")
    policy = policies.load(config.views.policy) if config.views.policy else None
    batch = config.training.batch_size
    batches = input_pipeline.training_batches(source, config, 0, 10**9)
    in_memory = isinstance(source, ArraySource)
    examples = [
        source.images[i] if in_memory else source.read(tf.constant(i, tf.int64))[0].numpy()
        for i in range(min(len(source), 500))
    ]
    rng = random.Random(0)

    def pillow_batch():
        chosen = rng.choices(examples, k=batch)
        made = [pillow_views.two_views(contents, config, policy, rng) for contents in chosen]
        np.stack([np.stack(views) for views in made])

    def pace(run) -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < cli_flags.FLAGS.seconds:
            run()
            count += batch
        return count / (time.perf_counter() - began)

    def our_pace() -> float:
        # An iterator of its own, gone when Pillow's turn comes: it would work on in the background.
        iterator = iter(batches)
        for _ in range(4):  # past what is made ahead
            next(iterator)
        return pace(lambda: next(iterator))

    rates = [(our_pace(), pace(pillow_batch)) for _ in range(5)]
    ratios = [mine / theirs for mine, theirs in rates]
    place = "memory" if in_memory else "disk"
    print(
        f"input {config.data.dataset} from {place}, size {config.data.image_size}, batch {batch}, "
        f"augmentation {config.views.augmentation}, policy {config.views.policy or 'none'}"
    )
    for name, values in zip(("amdim_tf", "Pillow"), zip(*rates, strict=True), strict=True):
        print(
            f"  {name:<10} {statistics.median(values):8.0f} images/s (two views each) on one core"
        )
    print(
        f"  ratio      {statistics.median(ratios):8.2f} "
        f"(median of 5; {min(ratios):.2f} to {max(ratios):.2f})"
    )


def _memory_suite(suite: str) -> None:
    """The suites of memory_suites.py, and their parts."""
    import memory_suites

    config = config_lib.make(cli_flags.given_settings())
    if suite == "memory":
        if not config.distribution.microbatch:
            raise UserError("--microbatch: expected how many images at a time. Received: 0.")
        memory_suites.memory(config, [word for word in sys.argv[1:] if word.startswith("--")])
        return
    cli_flags.import_tensorflow_quietly()
    if suite == "step_peak":
        memory_suites.step_peak(config, make_data)
    elif suite == "nce_peak":
        memory_suites.nce_peak(config.distribution.nce_block, config.training.batch_size)
    else:
        memory_suites.nce()


_SUITES = {"train": benchmark_train, "input": benchmark_input}
_SUITES |= {
    name: functools.partial(_memory_suite, name)
    for name in ("memory", "nce", "step_peak", "nce_peak")
}


def main(suite: str) -> None:
    """Runs one suite."""
    if suite not in _SUITES:
        raise UserError(f"expected one of {', '.join(_SUITES)}. Received: {suite!r}.")
    _SUITES[suite]()


if __name__ == "__main__":
    cli_flags.run(main, words=1)
