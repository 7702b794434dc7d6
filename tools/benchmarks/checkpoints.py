"""What saving costs: training with a checkpoint every 100 steps, and without, in turns."""

import statistics
import tempfile

from benchmarks import measuring

_STEPS, _TURNS = 100, 5


def run(config) -> None:
    """Times turns of 100 steps of the configured model, every other one with a checkpoint."""
    from amdim_tf import checkpoints, stepping, training_loop

    devices = measuring.one_device(config)
    model = training_loop.compiled_model(config, measuring.CLASSES, 1000, devices)
    step, data = stepping.step_function(model, devices), measuring.random_batch(config)
    step(data, False)

    def turn(saving: bool) -> float:
        def steps():
            if saving:
                pauses.append(saved.begin_to_save(len(pauses) + 1, {}))
            for _ in range(_STEPS):
                step(data, False)["loss"].numpy()

        return measuring.seconds_of(steps)

    with tempfile.TemporaryDirectory() as folder:
        saved = checkpoints.Checkpoints(folder, model, kept=3)
        pauses, pairs = [], []
        for _ in range(_TURNS):
            with_saving = turn(saving=True)
            saved.wait()
            pairs.append((with_saving, turn(saving=False)))
        size = sum(file.stat().st_size for file in saved.newest.iterdir()) / 2**20
    print(
        f"checkpoints of {model.count_params():,} parameters, {size:.0f} MiB with the optimizer, "
        f"every {_STEPS} steps of batch {config.training.batch_size}"
    )
    for name, times in zip(("saving", "not saving"), zip(*pairs, strict=True), strict=True):
        print(f"  {name:<10} {1000 * statistics.median(times) / _STEPS:8.1f} ms per step")
    print(f"  {'pause':<10} {1000 * statistics.median(pauses):8.1f} ms per checkpoint")
    measuring.print_ratios([saving / plain for saving, plain in pairs])
