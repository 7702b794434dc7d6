"""What the benchmarks share: clocks, memory, the machine's limit, batches, and how ratios read."""

import pathlib
import statistics
import time

from amdim_tf.errors import UserError

CLASSES = 10
_MATRIX_SIDE = 2048


def seconds_of(run) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def matmul_rates():
    """A function that repeats two 2048×2048 float32 matrix products for a second.

    Two, side by side, so that they fill two cores however many of them a product gets. It returns
    the GFLOP/s of the whole second and of the fastest pair.
    """
    import tensorflow as tf

    @tf.function
    def products(a, b):
        return tf.matmul(a, b)[0, 0], tf.matmul(b, a)[0, 0]  # numbers to wait for, soon copied

    matrices = [tf.random.stateless_normal([_MATRIX_SIDE] * 2, seed=[i, 0]) for i in range(2)]

    def compute():
        for product in products(*matrices):
            product.numpy()

    compute()

    def measure():
        times = []
        while sum(times) < 1.0:
            times.append(seconds_of(compute))
        gflop = 2 * 2 * _MATRIX_SIDE**3 / 1e9
        return gflop * len(times) / sum(times), gflop / min(times)

    return measure


def memory_mib(which: str) -> float:
    """Resident memory of this process: the most so far (VmHWM), or now (VmRSS)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which + ":"):
            return int(line.split()[1]) / 1024
    raise UserError(f"/proc/self/status: expected a line {which}; only Linux has it.")


def one_device(config):
    """The devices of a benchmark of the step, which is about one."""
    from amdim_tf import distribution

    devices = distribution.resolve(config)
    if not devices.one_device:
        raise UserError(
            f"--strategy: expected one device here. Received: {devices.replicas} replicas."
        )
    return devices


def random_batch(config):
    """A batch of noise for the configured training step."""
    import tensorflow as tf

    size, batch = config.data.image_size, config.training.batch_size
    shape = [batch, size, size, 3]
    return {
        "view1": tf.random.stateless_normal(shape, seed=[0, 1]),
        "view2": tf.random.stateless_normal(shape, seed=[0, 2]),
        "label": tf.random.stateless_uniform([batch], [0, 3], maxval=CLASSES, dtype=tf.int32),
    }


def print_ratios(ratios: list[float], width: int = 10) -> None:
    """The median of ratios that were measured in turns, and their range."""
    print(
        f"  {'ratio':<{width}} {statistics.median(ratios):8.3f} "
        f"(median of {len(ratios)}; {min(ratios):.3f} to {max(ratios):.3f})"
    )
