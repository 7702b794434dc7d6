"""The probes on features of the size that CIFAR-10 and the paper's small model have."""

import time

import numpy as np

_TRAINED, _TESTED, _DIMENSION, _HIDDEN, _CLASSES = 50_000, 10_000, 1024, 256, 10
_LIMITS = {"linear": 180, "knn": 30}


def run() -> None:
    """Times each probe with its choice of settings, and prints the process's peak memory."""
    from benchmarks import measuring

    from amdim_tf import neighbours, probing
    from amdim_tf.feature_splits import Features

    rng = np.random.default_rng(0)
    # As an encoder's: correlated, with variances that fall over four orders, and not separable.
    centres = rng.normal(size=[_CLASSES, _HIDDEN])
    spread = np.logspace(0, -2, _HIDDEN)[:, None]
    mixing = rng.normal(size=[_HIDDEN, _DIMENSION]) * spread

    def features(count):
        labels = rng.integers(0, _CLASSES, count)
        hidden = centres[labels] + rng.normal(size=[count, _HIDDEN], scale=3.0)
        return Features(np.maximum(hidden @ mixing, 0).astype(np.float32), labels)

    train, test = features(_TRAINED), features(_TESTED)

    def linear():
        chosen = probing.fit_linear(train, _CLASSES).logits(test.values).argmax(axis=1)
        return np.mean(chosen == test.labels)

    def knn():
        found = neighbours.evaluate(train, test, [str(i) for i in range(_CLASSES)])
        return found[20]["accuracy"]

    print(f"probes on {_TRAINED:,} features of {_DIMENSION} numbers, {_TESTED:,} queries")
    for name, probe in (("linear", linear), ("knn", knn)):
        began = time.perf_counter()
        accuracy = probe()
        seconds = time.perf_counter() - began
        print(
            f"  {name:<10} {seconds:8.1f} s (aim: below {_LIMITS[name]} s), {100 * accuracy:.1f}% "
            "correct",
            flush=True,
        )
    print(f"  {'memory':<10} {measuring.memory_mib('VmHWM'):8.0f} MiB at most (aim: below 3,000)")
