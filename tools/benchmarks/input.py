"""The input pipeline on one core, beside the same work done with Pillow, in turns."""

import os
import random
import statistics
import time

import numpy as np
from benchmarks import measuring


def run(config, seconds: float, batch_count: int) -> None:
    """Times the input pipeline beside Pillow, a few seconds each in turn, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
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
    if batch_count:
        _print_memory(batches, batch_count)
        return
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
        while time.perf_counter() - began < seconds:
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
    measuring.print_ratios(ratios)


def _print_memory(batches, count: int) -> None:
    """Resident memory after each tenth of `count` batches: it should not grow."""
    marks = {max(1, count * tenth // 10) for tenth in range(1, 11)}
    for number, _ in enumerate(batches.take(count), 1):
        if number in marks:
            print(
                f"  {number:8} batches {measuring.memory_mib('VmRSS'):8.0f} MiB resident",
                flush=True,
            )
