"""Draws figures of what the model sees.

Usage:
    python -m amdim_tf.visualize --figures=views --dataset=scenes --policy=autoaugment_cifar10 \
        --output_dir=figures

views: pairs of views, side by side, for the given flags (or those of --model_dir), so that one sees
what an augmentation does before training with it. Writes OUTPUT_DIR/views.png.
"""

from absl import flags

from amdim_tf import cli_flags, config_file
from amdim_tf import config as config_lib

cli_flags.define_config_flags()
flags.adopt_module_key_flags(cli_flags)
flags.DEFINE_list("figures", ["views"], "What to draw: views.")
flags.DEFINE_string("model_dir", None, "A training run whose settings to take; flags win.")
flags.DEFINE_string("output_dir", None, "Directory for the figures; it is made if need be.")
flags.DEFINE_integer("pairs", 48, "How many pairs of views to show.", lower_bound=1)


def main() -> None:
    """Reads the flags and draws."""
    output_dir = cli_flags.require("output_dir", "a directory for the figures")
    model_dir, given = cli_flags.FLAGS.model_dir, cli_flags.given_settings()
    given["batch_size"] = max(cli_flags.FLAGS.pairs, 2)
    if model_dir:
        config = config_lib.update(config_file.load(config_file.path_in(model_dir))[0], given)
    else:
        config = config_lib.make(given)
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import figures

    figures.draw(cli_flags.FLAGS.figures, config, cli_flags.FLAGS.pairs, output_dir)


if __name__ == "__main__":
    cli_flags.run(main)
