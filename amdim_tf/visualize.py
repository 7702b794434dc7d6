r"""Draws figures of what the model sees and has learned: those of the paper, and two more.

Usage:
    python -m amdim_tf.visualize --model_dir=runs/quickstart --output_dir=figures \
        --figures=retrieval,similarity,embedding
    python -m amdim_tf.visualize --figures=views --dataset=scenes --policy=autoaugment_cifar10 \
        --output_dir=figures

retrieval: test images and their nearest by f1, with the matching scores of f1 and f7 over them.
similarity: pairs of views, with similarities of f1, f7 and f5 of the one to cells of the other.
segmentation: pairs of views, with the parts that each mixture component explains.
embedding: f1 in the plane of its principal components; files for TensorBoard's projector, too.
views: pairs of views for the given flags (or those of --model_dir), so that one sees what an
augmentation does before training with it.

Writes OUTPUT_DIR/NAME.png and NAME.pdf, and shows the same in TensorBoard at MODEL_DIR/logs. The
same --seed gives the same figures.
"""

import os
from typing import Any

from absl import flags

from amdim_tf import cli_flags, config_file, policy_tables
from amdim_tf import config as config_lib
from amdim_tf.config import Config
from amdim_tf.errors import UserError

flags.DEFINE_integer(
    "seed", None, "Chooses images, views and cells (default: the run's, or 0).", lower_bound=0
)
cli_flags.define_config_flags()
for _name, (_section, _) in config_lib.SETTINGS.items():
    if _section in ("data", "views"):  # what --help shows; a run's flag file may have all of them
        flags.declare_key_flag(_name)
flags.DEFINE_list(
    "figures",
    ["views"],
    "What to draw: views, and for a run retrieval, similarity, segmentation, embedding.",
)
flags.DEFINE(cli_flags.PATH, "model_dir", None, "A training run; of its settings, flags win.")
flags.DEFINE(
    cli_flags.PATH, "output_dir", None, "Directory for the figures; it is made if need be."
)
flags.DEFINE_integer(
    "pairs", 48, "How many pairs of views to show in views.", lower_bound=1, upper_bound=500
)
flags.DEFINE_integer(
    "rows",
    6,
    "Rows of images in retrieval, similarity and segmentation.",
    lower_bound=1,
    upper_bound=50,
)


def settings_of_run(model_dir: str, given: dict[str, Any]) -> Config:
    """A run's settings with those given in their place, and with what follows from these.

    The policy is the run's own copy. Another data set is in another directory, and another
    --augmentation has its own recipe.
    """
    saved = config_file.load(config_file.path_in(model_dir))[0]
    changed = {"policy": policy_tables.of_run(saved.views.policy, model_dir)}
    if given.get("dataset", saved.data.dataset) != saved.data.dataset:
        changed["data_dir"] = ""
    augmentation = given.get("augmentation", saved.views.augmentation)
    if augmentation != saved.views.augmentation:
        recipe = config_lib.make({"dataset": saved.data.dataset, "augmentation": augmentation})
        changed |= {name: getattr(recipe.views, name) for name in config_lib.STRONG_DEFAULTS}
    return config_lib.update(saved, {**changed, **given})


def main() -> None:
    """Reads the flags and draws."""
    output_dir = cli_flags.require("output_dir", "a directory for the figures")
    if os.path.exists(output_dir) and not os.path.isdir(output_dir):
        raise UserError(f"--output_dir: expected a directory. Received: {output_dir}, a file.")
    model_dir, given = cli_flags.FLAGS.model_dir, cli_flags.given_settings()
    if model_dir:
        model_dir = cli_flags.require_model_dir("the directory of a training run")
        cli_flags.check_flags_of_run(model_dir)
        config = settings_of_run(model_dir, given)
    else:
        config = config_lib.make(given)
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import figures

    settings = figures.FigureSettings(
        names=tuple(cli_flags.FLAGS.figures),
        output_dir=output_dir,
        model_dir=model_dir or "",
        pairs=cli_flags.FLAGS.pairs,
        rows=cli_flags.FLAGS.rows,
    )
    figures.draw(settings, config)


if __name__ == "__main__":
    cli_flags.run(main)
