"""The probes on features of the size that CIFAR-10 and the paper's small model have."""

import time

import numpy as np

_TRAINED, _TESTED, _DIMENSION, _CLASSES = 50_000, 10_000, 1024, 10
_LIMITS = {"linear": 180, "knn": 30}


def run() -> None:
    """Times each probe with its choice of settings, and prints the process's peak memory."""
    from benchmarks import measuring

    from amdim_tf import neighbours, probing
    from amdim_tf.feature_splits import Features

    rng = np.random.default_rng(0)
    centres = rng.normal(size=[_CLASSES, _DIMENSION]).astype(np.float32)

    def features(count):
        labels = rng.integers(0, _CLASSES, count)
        values = rng.normal(size=[count, _DIMENSION], scale=12.0).astype(np.float32)
        return Features(values + centres[labels], labels)

    train, test = features(_TRAINED), features(_TESTED)

    def linear():
        return probing.fit_linear(train, _CLASSES).logits(test.values).argmax(axis=1)

    def knn():
        return neighbours.evaluate(train, test, [str(i) for i in range(_CLASSES)])

    print(f"probes on {_TRAINED:,} features of {_DIMENSION} numbers, {_TESTED:,} queries")
    for name, probe in (("linear", linear), ("knn", knn)):
        began = time.perf_counter()
        probe()
        seconds = time.perf_counter() - began
        print(f"  {name:<10} {seconds:8.1f} s (aim: below {_LIMITS[name]} s)", flush=True)
    print(f"  {'memory':<10} {measuring.memory_mib('VmHWM'):8.0f} MiB at most (aim: below 3,000)")
