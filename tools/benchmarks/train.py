"""The whole training step, beside the machine's rate of large matrix products, and PyTorch."""

import itertools
import statistics

from benchmarks import measuring, rivals


def run(config, steps: int) -> None:
    """Times the training step of the configured model."""
    from amdim_tf import costs, stepping, training_loop

    size, batch = config.data.image_size, config.training.batch_size
    before = measuring.memory_mib("VmHWM")
    devices = measuring.one_device(config)
    model = training_loop.compiled_model(config, measuring.CLASSES, 1000, devices)
    step, data = stepping.step_function(model, devices), measuring.random_batch(config)

    def make_step():
        step(data, False)["loss"].numpy()

    first = measuring.seconds_of(make_step)
    make_step()
    memory = measuring.memory_mib("VmHWM") - before
    measure = measuring.matmul_rates()
    times, rates = [], [measure()]
    for _ in range(steps):
        times.append(measuring.seconds_of(make_step))
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
    print(
        f"  arithmetic            {gflop / batch:8.2f} GFLOP per image pair, as plain convolutions "
        "count"
    )
    print(f"  peak memory           {memory:8.0f} MiB beyond {before:.0f} MiB after imports")
    rivals.compare(config, make_step, rivals.training_steps(config, data), steps, batch)
