"""What large batches take: a step in microbatches, and the NCE in blocks.

Every peak is that of a process of its own. It counts from the moment after the imports, less what
stays in use all the time: weights, optimizer and inputs. What it took to make these is in it where
TensorFlow has kept that memory, since the work then uses it without being seen.
"""

from __future__ import annotations

import ctypes
import math
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
from benchmarks import measuring

from amdim_tf.errors import UserError

_NCE = {"batch": 512, "large": 4096, "locations": 49, "channels": 1024}


def peak_of(prepare) -> float:
    """MiB that some work takes at its peak beyond its imports and what it is given.

    Args:
        prepare: makes what the work needs; returns the work and the arrays that it needs.
    """
    import tensorflow as tf

    tf.constant(0.0) + 1.0  # begins TensorFlow, whose own memory is not meant
    before = measuring.memory_mib("VmRSS")
    work, arrays = prepare()
    tf.constant(0.0) + 1.0  # lets go of NumPy arrays that were copied
    given = sum(math.prod(array.shape) * 4 for array in arrays) / 2**20
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    work()
    return measuring.memory_mib("VmHWM") - before - given


def in_own_process(*words: str) -> float:
    """The number that another call of tools/benchmark.py prints."""
    script = pathlib.Path(__file__).resolve().parent.parent / "benchmark.py"
    done = subprocess.run([sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UserError(
            f"{' '.join(words)}: expected to end well. Received: exit code {done.returncode}."
        )
    return float(done.stdout.split()[-1])


def step_peak(config) -> None:
    """Prints the peak of one training step, its first."""
    from amdim_tf import stepping, training_loop

    devices = measuring.one_device(config)

    def prepare():
        model = training_loop.compiled_model(
            config, measuring.CLASSES, per_epoch=1000, devices=devices
        )
        data, step = measuring.random_batch(config), stepping.step_function(model, devices)
        arrays = [*model.variables, *model.optimizer.variables, *data.values()]
        return lambda: step(data, False)["loss"].numpy(), arrays

    print(peak_of(prepare))


def memory(config, given: list[str]) -> None:
    """A batch in microbatches beside a plain batch as large as one microbatch."""
    size = config.distribution.microbatch
    whole = config.training.batch_size
    plain = in_own_process("step_peak", *given, f"--batch_size={size}", "--microbatch=0")
    pieces = in_own_process("step_peak", *given)
    scales = (1, 5, 7)
    embeddings = 2 * whole * sum(n * n for n in scales) * config.model.n_rkhs * 4 / 2**20
    beyond = pieces - 2 * embeddings
    print(f"memory of one step, size {config.data.image_size} "
          f"({config.model.ndf}, {config.model.n_rkhs}, {config.model.n_depth})")  # fmt: skip
    print(f"  batch {size:<6}                 {plain:8.0f} MiB")
    print(f"  batch {whole:<6} --microbatch={size:<4}{pieces:8.0f} MiB")
    print(f"  its embeddings, and gradient {2 * embeddings:8.0f} MiB")
    print(
        f"  the rest                     {beyond:8.0f} MiB, {beyond / plain:.2f} of the plain one"
    )


def _nce_function(nce, block: str, batch: int):
    """A function that computes an NCE and its gradient and tells the seconds; and its inputs."""
    import tensorflow as tf

    shapes = [batch, _NCE["channels"]], [batch, _NCE["locations"], _NCE["channels"]]
    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.standard_normal(shape, np.float32)) for shape in shapes]

    @tf.function
    def compute(antecedents, consequents):
        with tf.GradientTape() as tape:
            tape.watch([antecedents, consequents])
            total = sum(nce.nce_loss(antecedents, consequents, 20.0, 0.04, block=block))
        return total, tape.gradient(total, [antecedents, consequents])

    def run() -> float:
        began = time.perf_counter()
        compute(*inputs)[0].numpy()
        return time.perf_counter() - began

    return run, inputs


def nce_peak(block: str, batch: int) -> None:
    """Prints the peak of an NCE and its gradient beyond that gradient's own size."""
    from amdim_tf import nce

    gradients = batch * (_NCE["locations"] + 1) * _NCE["channels"] * 4 / 2**20
    print(peak_of(lambda: _nce_function(nce, block, batch)) - gradients)


def nce() -> None:
    """Dense and blocked: time in turns at one size, memory at two."""
    batch, large = _NCE["batch"], _NCE["large"]
    from amdim_tf import nce as nce_module

    runs = [_nce_function(nce_module, block, batch)[0] for block in (str(batch), str(batch // 2))]
    for run in runs:
        run()
    times = [[run() for run in runs] for _ in range(7)]
    ratios = [blocked / dense for dense, blocked in times]
    dense, blocked = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"nce, S {_NCE['locations']}, D {_NCE['channels']}")
    print(f"  batch {batch}, dense    {1000 * dense:8.0f} ms")
    print(f"  batch {batch}, halves   {1000 * blocked:8.0f} ms, {statistics.median(ratios):.2f} of "
          f"dense (median of 7 turns; {min(ratios):.2f} to {max(ratios):.2f})")  # fmt: skip
    small = in_own_process("nce_peak", f"--nce_block={batch}", f"--batch_size={batch}")
    most = in_own_process("nce_peak", f"--batch_size={large}")
    embeddings = large * (_NCE["locations"] + 1) * _NCE["channels"] * 4 / 2**20
    print(f"  batch {batch}, dense    {small:8.0f} MiB beyond embeddings and gradient, so "
          f"{small * (large / batch) ** 2 / 1024:.0f} GiB at {large}")  # fmt: skip
    print(f"  batch {large}, blocked {most:8.0f} MiB beyond embeddings and gradient, "
          f"{embeddings:.0f} MiB each")  # fmt: skip
