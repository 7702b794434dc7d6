"""Features of images in memory by the encoder alone, beside PyTorch and the machine's limit."""

import statistics

from benchmarks import measuring, rivals


def run(config, turns: int) -> None:
    """Times f1 of one batch, as evaluation computes it."""
    from amdim_tf import checkpoints, costs, features

    batch, settings = config.training.batch_size, config.model
    model = checkpoints.build_model(config, measuring.CLASSES, "float32")
    images = measuring.random_batch(config)["view1"]
    encode = features.f1_of(model)

    measure = measuring.matmul_rates()
    encode(images)
    times, rates = [], [measure()]
    for _ in range(turns):
        times.append(measuring.seconds_of(lambda: encode(images).numpy()))
        rates.append(measure())
    gflop = batch * costs.encoder_flops(model) / 1e9
    seconds, limit = statistics.median(times), statistics.median(rate for rate, _ in rates)
    print(f"inference size {config.data.image_size} ({settings.ndf}, {settings.n_rkhs}, "
          f"{settings.n_depth}) batch {batch}")  # fmt: skip
    print(
        f"  median                {batch / seconds:8.1f} images/s {gflop / seconds:7.1f} GFLOP/s, "
        f"{100 * gflop / seconds / limit:.0f}% of products' sustained rate, "
        "as plain convolutions count"
    )
    rivals.compare(
        config, lambda: encode(images).numpy(), rivals.encoder_passes(config, images), turns, batch
    )
