"""Feature extraction, files to files, beside the exported model alone, in turns."""

import statistics
import tempfile
import time

from benchmarks import measuring

from amdim_tf.errors import UserError


def run(saved_model: str, config) -> None:
    """Times the extraction beside the model alone, on the same images, in turns."""
    from amdim_tf import extraction, sources
    from amdim_tf.examples import ArraySource

    source = sources.load(config.data, "test")
    if not isinstance(source, ArraySource):
        raise UserError("--data_dir: expected images of one size of at most 128 pixels.")
    batch = config.training.batch_size

    def model_rate(model) -> float:
        began = time.perf_counter()
        for start in range(0, len(source), batch):
            model.of_images(source.images[start : start + batch])
        return len(source) / (time.perf_counter() - began)

    def turn() -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as directory:
            request = extraction.Request(
                saved_model, config.data.dataset, config.data.data_dir, "test",
                output=f"{directory}/features", batch_size=batch,
            )  # fmt: skip
            with extraction.prepared(request) as job:
                before = model_rate(job.model)
                seconds = measuring.seconds_of(lambda: extraction.run_here(job))
                return len(job.source) / seconds, (before + model_rate(job.model)) / 2

    turn()  # compiles, and brings the files into memory
    rates = [turn() for _ in range(5)]
    print(f"extract {config.data.dataset}, {len(source)} images, batch {batch}, {saved_model}")
    for name, values in zip(
        ("files to files", "model alone"), zip(*rates, strict=True), strict=True
    ):
        print(f"  {name:<15} {statistics.median(values):8.0f} images/s")
    measuring.print_ratios([extracted / alone for extracted, alone in rates], 15)
