"""Measures frozen features: a linear classifier on f1, beside simple baselines.

Usage:
    python -m amdim_tf.evaluate --model_dir=runs/quickstart --baselines=untrained,pixels

Prints a table and writes MODEL_DIR/evaluation/DATASET.json.
"""

from absl import flags

from amdim_tf import cli_flags

flags.DEFINE_string("model_dir", None, "Directory of the training run.")
flags.DEFINE_list("probes", ["linear"], "What to train on the features: linear.")
flags.DEFINE_list("baselines", [], "What to show beside it: untrained, pixels.")


def main() -> None:
    """Reads the flags and evaluates."""
    model_dir = cli_flags.require_model_dir("the directory of a training run")
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import evaluation

    evaluation.evaluate(model_dir, cli_flags.FLAGS.probes, cli_flags.FLAGS.baselines)


if __name__ == "__main__":
    cli_flags.run(main)
