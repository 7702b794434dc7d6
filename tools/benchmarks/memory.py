"""What large batches take: a step in microbatches, and the NCE in blocks.

Every peak is that of a process of its own, and counts from the moment before the work: what the
imports, the weights' initialization or the inputs took is not in it.
"""

from __future__ import annotations

import ctypes
import pathlib
import statistics
import subprocess
import sys
import time

from benchmarks import measuring

_NCE = {"batch": 512, "large": 4096, "locations": 49, "channels": 1024}


def peak_of(work) -> float:
    """MiB that `work` takes at its peak beyond what the process had before it."""
    # What was freed goes back to the system: else the work could use it without being seen.
    ctypes.CDLL(None).malloc_trim(0)
    before = measuring.memory_mib("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
    work()
    return measuring.memory_mib("VmHWM") - before


def in_own_process(*words: str) -> float:
    """The number that another call of tools/benchmark.py prints."""
    script = pathlib.Path(__file__).resolve().parent.parent / "benchmark.py"
    done = subprocess.run(
        [sys.executable, str(script), *words], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.split()[-1])


def step_peak(config) -> None:
    """Prints the peak of one training step, its first."""
    from amdim_tf import stepping, training_loop

    devices = measuring.one_device(config)
    model = training_loop.compiled_model(config, measuring.CLASSES, per_epoch=1000, devices=devices)
    data, step = measuring.random_batch(config), stepping.step_function(model, devices)
    print(peak_of(lambda: step(data, False)["loss"].numpy()))


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


def _nce_function(block: str, batch: int):
    import tensorflow as tf

    from amdim_tf import nce

    shapes = [batch, _NCE["channels"]], [batch, _NCE["locations"], _NCE["channels"]]
    inputs = [tf.random.stateless_normal(shape, [0, i]) for i, shape in enumerate(shapes)]

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

    return run


def nce_peak(block: str, batch: int) -> None:
    """Prints the peak of an NCE and its gradient beyond that gradient's own size."""
    run = _nce_function(block, batch)
    gradients = batch * (_NCE["locations"] + 1) * _NCE["channels"] * 4 / 2**20
    print(peak_of(run) - gradients)


def nce() -> None:
    """Dense and blocked: time in turns at one size, memory at two."""
    batch, large = _NCE["batch"], _NCE["large"]
    runs = [_nce_function(block, batch) for block in (str(batch), str(batch // 2))]
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
