r"""Extracts features of every image of a data set with an exported SavedModel.

Usage:
    python -m amdim_tf.extract --saved_model=runs/quickstart/export --dataset=folder \
        --data_dir=PHOTOS --output=FEATURES --format=npz

FEATURES gets shards features-00000-of-00005.npz, … with index, path, label and f1 of each image, in
order; skipped_images.txt, if images could not be decoded; and, at the end, manifest.json. The same
command goes on with an extraction that was stopped. --index=INDEX makes of f1 what
python -m amdim_tf.search searches.

With --runner=beam an Apache Beam pipeline does the same, with Beam's own options after --:
    python -m amdim_tf.extract … --runner=beam -- --direct_num_workers=2 \
        --direct_running_mode=multi_processing
"""

import functools
import os

from absl import flags

from amdim_tf import cli_flags
from amdim_tf.errors import UserError

flags.DEFINE(
    cli_flags.PATH, "saved_model", None, "Directory that python -m amdim_tf.export has written."
)
flags.DEFINE_string("dataset", None, "Data set, as for training: folder, scenes, cifar10, ….")
flags.DEFINE(
    cli_flags.PATH, "data_dir", "", "Directory of the data set; the built-in one needs none."
)
flags.DEFINE_enum(
    "split",
    "train",
    ["train", "labelled", "test"],
    "Which images; train is all of a folder without splits.",
)
flags.DEFINE(cli_flags.PATH, "output", None, "Directory for the features.")
flags.DEFINE_enum("format", "npz", ["npz", "tfrecord", "parquet"], "Of the files of features.")
flags.DEFINE_list("outputs", ["f1"], "Which features: some of f1, f5, f7, phi1, phi5, phi7.")
flags.DEFINE_integer("batch_size", 250, "Images in a call of the model.", lower_bound=1)
flags.DEFINE_integer("shard_size", 2000, "Images in a file.", lower_bound=1)
flags.DEFINE(cli_flags.PATH, "index", None, "Directory for an index of f1, to be searched.")
flags.DEFINE_enum("runner", "local", ["local", "beam"], "This process, or a Beam pipeline.")
# For flag files of training, of which only the data set counts here.
cli_flags.define_config_flags()


def main(*beam_options: str) -> None:
    """Reads the flags and extracts."""
    options = cli_flags.FLAGS
    saved_model = cli_flags.require("saved_model", "the directory of an export")
    dataset = cli_flags.require("dataset", "a data set, such as folder")
    output = cli_flags.require("output", "a directory for the features")
    if beam_options and options.runner != "beam":
        raise UserError(
            "expected flags only; Beam's options after -- need --runner=beam. "
            f"Received: {' '.join(beam_options)}."
        )
    # TensorFlow warns of every bad image, which are counted and listed.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import extraction, search_index

    request = extraction.Request(
        saved_model=saved_model,
        dataset=dataset,
        data_dir=options.data_dir,
        split=options.split,
        output=output,
        format=options.format,
        outputs=tuple(name.strip() for name in options.outputs),
        batch_size=options.batch_size,
        shard_size=options.shard_size,
    )
    if options.index:
        search_index.check_request(options.index, request)
    run = None
    if options.runner == "beam":
        from amdim_tf import beam_extraction

        beam_extraction.new_pipeline(
            beam_options
        )  # mistakes are answered before the model is loaded
        run = functools.partial(beam_extraction.run, options=beam_options)
    extraction.extract(request, run)
    if options.index:
        search_index.build(output, options.index)


if __name__ == "__main__":
    cli_flags.run(main, words=None)
