"""Measures speed and memory on this machine, beside the machine's own limit.

Usage:
    python tools/benchmark.py train --ndf=128 --n_rkhs=1024 --n_depth=10 --batch_size=32
    python tools/benchmark.py input --dataset=folder --data_dir=PHOTOS --batch_size=64
    python tools/benchmark.py checkpoints --flagfile=configs/quickstart.cfg
    python tools/benchmark.py extract --saved_model=EXPORT --dataset=folder --data_dir=CIFAR10
    python tools/benchmark.py probes

train: the whole training step, online classifiers included, on images in memory. The limit is a
large matrix product, repeated for a second before and after every step, since the speed of a shared
machine changes from second to second: its sustained rate, which like a step's is a mean over the
machine's moods, and its best single run.

input: the training pipeline, from files (or memory, for small images) to batches of two normalized
views, on one core, beside the same work done image by image with Pillow in the same run, in turns.
With --batches=N: resident memory while N batches are made, instead.

checkpoints: training with a checkpoint every 100 steps beside training without, in turns.

extract: feature extraction of the test images, from files on disk to files of f1, beside the
exported model's own rate on the same images in memory before and after it, as the mean of both.
Images have one size, up to 128 pixels.

probes: linear classifier and nearest neighbours on 50,000 features of 1,024 numbers.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags

from amdim_tf import cli_flags
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError

cli_flags.define_config_flags()
flags.adopt_module_key_flags(cli_flags)
flags.DEFINE_integer("steps", 8, "`train`: timed steps, after two that warm up.", lower_bound=1)
flags.DEFINE_float("seconds", 3.0, "`input`: seconds of each turn.", lower_bound=0.1)
flags.DEFINE_integer(
    "batches",
    0,
    "`input`: make this many batches and print memory instead of speed.",
    lower_bound=0,
)
flags.DEFINE_string("saved_model", None, "`extract`: the export that it runs.")
_SUITES = ("train", "input", "checkpoints", "extract", "probes")


def main(suite: str) -> None:
    """Runs one suite."""
    if suite not in _SUITES:
        raise UserError(f"expected one of {', '.join(_SUITES)}. Received: {suite!r}.")
    config = config_lib.make(cli_flags.given_settings())
    cli_flags.import_tensorflow_quietly()
    from benchmarks import checkpoints, extract, input, probes, train

    if suite == "train":
        train.run(config, cli_flags.FLAGS.steps)
    elif suite == "input":
        input.run(config, cli_flags.FLAGS.seconds, cli_flags.FLAGS.batches)
    elif suite == "checkpoints":
        checkpoints.run(config)
    elif suite == "extract":
        extract.run(cli_flags.require("saved_model", "the directory of an export"), config)
    else:
        probes.run()


if __name__ == "__main__":
    cli_flags.run(main, words=1)
