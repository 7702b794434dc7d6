"""Measures frozen features by the paper's protocol: no gradient reaches the encoder.

Usage:
    python -m amdim_tf.evaluate --model_dir=runs/quickstart --probes=linear,mlp,knn,few_labels
    python -m amdim_tf.evaluate --model_dir=runs/imagenet --dataset=places205 --data_dir=PLACES
    python -m amdim_tf.evaluate --model_dir=runs/scenes_mixture --probes=linear,segmentation

Prints a table and writes MODEL_DIR/evaluation/DATASET.json, with a confusion matrix and a learning
curve beside it, and TensorBoard scalars. Features are extracted once per checkpoint and kept in
MODEL_DIR/evaluation/features.
"""

import shlex
import sys

from absl import flags

from amdim_tf import cli_flags
from amdim_tf.errors import UserError

flags.DEFINE(cli_flags.PATH, "model_dir", None, "Directory of the training run.")
flags.DEFINE_string("dataset", "", "Data set to evaluate on; by default the run's own.")
flags.DEFINE(cli_flags.PATH, "data_dir", "", "Directory of that data set.")
flags.DEFINE_list(
    "probes",
    ["linear"],
    "What to measure. linear, mlp: classifiers on f1. knn: weighted nearest neighbours. "
    "few_labels: ridge regression on 1, 5 and 10 labels per class and on 1% and 10% of all labels. "
    "linear_adam: a linear classifier after 20 epochs of Adam, for comparison with others. "
    "bag_of_features: a linear classifier on a mixture's components; done beside linear for any "
    "run that has a mixture. segmentation: how a mixture's components divide images with masks.",
)
flags.DEFINE_list(
    "baselines", [], "What to show beside it: untrained; pixels, averaged down to 32x32."
)
flags.DEFINE_enum(
    "probe_training",
    "cached",
    ["cached", "augmented"],
    "cached: linear and mlp learn from features that are extracted once. augmented: they learn "
    "from augmented training images, as in the paper, which takes far longer.",
)
flags.DEFINE_float(
    "probe_epochs",
    0.0,
    "Epochs of --probe_training=augmented; 0: the reference's number for the data set.",
    lower_bound=0.0,
)
flags.DEFINE_integer(
    "recalibrate_batch_norm",
    0,
    "Measure batch-norm statistics on the evaluation views of this many training images first, in "
    "whole batches of 250; 0: keep the run's own.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "probe_seed",
    0,
    "Seed of held-out images, draws, classifiers, and images for recalibration.",
    lower_bound=0,
)
flags.DEFINE(
    cli_flags.PATH,
    "mask_dir",
    "",
    "For segmentation on a folder: a directory with a PNG file for each test image, at the same "
    "place below it, in which each colour is a segment.",
)
flags.DEFINE_integer(
    "step",
    None,
    "Evaluate the checkpoint of this step, which --keep_every has kept, instead of the newest.",
    lower_bound=0,
)
flags.DEFINE_float(
    "max_bad_images",
    None,
    "Largest share of images that may be undecodable (default: the run's own).",
)
flags.DEFINE_bool(
    "watch", False, "Evaluate the newest checkpoint of a running training, until its last step."
)
# For the flag file that a run was trained with.
cli_flags.define_config_flags()


def main() -> None:
    """Reads the flags and evaluates."""
    model_dir = cli_flags.require_model_dir("the directory of a training run")
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import evaluation

    given = cli_flags.FLAGS
    settings = evaluation.EvaluationSettings(
        model_dir=model_dir,
        dataset=given.dataset,
        data_dir=given.data_dir,
        mask_dir=given.mask_dir,
        max_bad_images=cli_flags.given_settings().get("max_bad_images"),
        probes=tuple(given.probes),
        baselines=tuple(given.baselines),
        augmented=given.probe_training == "augmented",
        probe_epochs=given.probe_epochs,
        recalibrate=given.recalibrate_batch_norm,
        seed=given.probe_seed,
        step=given.step,
        command=shlex.join(["python", "-m", "amdim_tf.evaluate", *sys.argv[1:]]),
    )
    if given.watch and given.step is not None:
        raise UserError(f"--watch: expected without --step. Received: --step={given.step}.")
    if given.watch:
        evaluation.wait_for_run(model_dir)
    cli_flags.check_flags_of_run(model_dir)
    (evaluation.watch if given.watch else evaluation.evaluate)(settings)


if __name__ == "__main__":
    cli_flags.run(main)
