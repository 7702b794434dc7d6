"""Measures speed and memory on this machine, beside the machine's own limit.

Usage:
    python tools/benchmark.py train --ndf=128 --n_rkhs=1024 --n_depth=10 --batch_size=32
    python tools/benchmark.py inference --ndf=32 --n_rkhs=256 --n_depth=3 --batch_size=256
    python tools/benchmark.py input --dataset=folder --data_dir=PHOTOS --batch_size=64
    python tools/benchmark.py checkpoints --flagfile=configs/quickstart.cfg
    python tools/benchmark.py extract --saved_model=EXPORT --dataset=folder --data_dir=CIFAR10
    python tools/benchmark.py memory --batch_size=1008 --microbatch=32
    python tools/benchmark.py nce
    python tools/benchmark.py probes
    python tools/benchmark.py workers --ndf=32 --n_rkhs=256 --n_depth=3 --batch_size=128
    python tools/benchmark.py startup --flagfile=configs/quickstart.cfg
    python tools/benchmark.py learning --flagfile=configs/cifar10_reference.cfg --data_dir=CIFAR10

train: the whole training step, online classifiers included, on images in memory. The limit is a
large matrix product, repeated for a second before and after every step, since the speed of a shared
machine changes from second to second: its sustained rate, which like a step's is a mean over the
machine's moods, and its best single run. Where torch is installed, PyTorch makes the same step in
the same run, in turns: as the authors' code lays its images out, and channels-last.

inference: f1 of images in memory as evaluation computes it, beside the same two. (An export has
plain convolutions.)

input: the training pipeline, from files (or memory, for small images) to batches of two normalized
views, on one core, beside the same work done image by image with Pillow in the same run, in turns.
With --batches=N: resident memory while N batches are made, instead.

checkpoints: training with a checkpoint every 100 steps beside training without, in turns.

extract: feature extraction of the test images, from files on disk to files of f1, beside the
exported model's own rate on the same images in memory before and after it, as the mean of both.
Images have one size, up to 128 pixels.

memory: peak memory of a step in microbatches, beside that of a plain batch as large as one of them.

nce: the NCE and its gradient in blocks, beside the dense form: time at batch 512, in turns, and
memory at batch 4096. (step_peak and nce_peak are the parts of these that need a process each.)

probes: linear classifier and nearest neighbours on 50,000 features of 1,024 numbers.

workers: two worker processes with a core each, beside one process with both cores, in turns.

startup: from the command to the end of the first step, and imports beside TensorFlow's own.

learning: the configured run by PyTorch and by amdim_tf, each from initial weights of its own, with
the losses of each epoch and the accuracy of one and the same linear classifier.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags

from amdim_tf import cli_flags
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError
from amdim_tf.setting_fields import shown

cli_flags.define_config_flags()
flags.adopt_module_key_flags(cli_flags)
flags.DEFINE_integer("steps", 8, "`train`, `inference`, `startup`: timed turns.", lower_bound=1)
flags.DEFINE(cli_flags.Finite(0.1), "seconds", 3.0, "`input`: seconds of each turn.")
flags.DEFINE_integer(
    "batches",
    0,
    "`input`: make this many batches and print memory instead of speed.",
    lower_bound=0,
)
flags.DEFINE(cli_flags.PATH, "saved_model", None, "`extract`: the export that it runs.")
_SUITES = (
    "train", "inference", "input", "checkpoints", "extract", "memory", "nce", "probes", "workers",
    "startup", "learning",
)  # fmt: skip
_PARTS = ("step_peak", "nce_peak")


def main(suite: str = "", *others: str) -> None:
    """Runs one suite."""
    if suite not in _SUITES + _PARTS or others:
        received = " ".join([suite, *others]) or "nothing"
        raise UserError(f"expected one of {', '.join(_SUITES)}. Received: {received:.80}.")
    settings = cli_flags.given_settings()
    given = [f"--{name}={shown(value)}" for name, value in settings.items()]
    if suite in ("nce", "probes") and given:
        raise UserError(f"{suite}: expected no settings, as it has its own. Received: {given[0]}.")
    config = config_lib.make(settings)
    if suite == "memory" and not config.distribution.microbatch:
        raise UserError("--microbatch: expected how many images at a time. Received: 0.")
    if suite == "extract":
        saved_model = cli_flags.require("saved_model", "the directory of an export")
    cli_flags.import_tensorflow_quietly()
    from benchmarks import (
        checkpoints,
        extract,
        inference,
        input,
        learning,
        memory,
        probes,
        startup,
        train,
        workers,
    )

    options = cli_flags.FLAGS
    {
        "train": lambda: train.run(config, options.steps),
        "inference": lambda: inference.run(config, options.steps),
        "input": lambda: input.run(config, options.seconds, options.batches),
        "checkpoints": lambda: checkpoints.run(config),
        "extract": lambda: extract.run(saved_model, config),
        "memory": lambda: memory.memory(config, given),
        "nce": memory.nce,
        "step_peak": lambda: memory.step_peak(config),
        "nce_peak": lambda: memory.nce_peak(
            config.distribution.nce_block, config.training.batch_size
        ),
        "probes": probes.run,
        "workers": lambda: workers.run(given),
        "startup": lambda: startup.run(given, options.steps),
        "learning": lambda: learning.run(config),
    }[suite]()


if __name__ == "__main__":
    cli_flags.run(main, words=None)
