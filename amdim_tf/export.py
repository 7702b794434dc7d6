"""Exports a trained model as a SavedModel, which TensorFlow loads without amdim_tf.

Usage:
    python -m amdim_tf.export --model_dir=runs/quickstart

Writes MODEL_DIR/export with these signatures, preprocessing inside:
    serving_default   images, uint8 [N, H, W, 3]   -> f1 [N, D]
    encoded           encoded_images, N JPEG, PNG, BMP, GIF or WebP files -> f1
    maps              images                       -> f1, f5, f7, phi1, phi5, phi7
    mixture           images, other_images         -> components, posterior (of a mixture)
and amdim_tf.json, which says what it is. --tflite adds f1.tflite: images, uint8 [N, S, S, 3] of the
encoder's own size -> f1.
"""

import os

from absl import flags

from amdim_tf import cli_flags

flags.DEFINE(cli_flags.PATH, "model_dir", None, "Directory of the training run.")
flags.DEFINE(
    cli_flags.PATH,
    "output_dir",
    None,
    "A new or empty directory, or an earlier export; MODEL_DIR/export if not given.",
)
flags.DEFINE_enum(
    "dtype", "float32", ["float32", "bfloat16"], "Of weights and arithmetic; outputs are float32."
)
flags.DEFINE_bool("tflite", False, "Also write f1.tflite, a LiteRT file of the f1 path.")
# For the flag file that a run was trained with.
cli_flags.define_config_flags()


def main() -> None:
    """Reads the flags and exports."""
    model_dir = cli_flags.require_model_dir("the directory of a training run")
    cli_flags.check_flags_of_run(model_dir)
    # The LiteRT converter warns about options that it sets itself.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    cli_flags.import_tensorflow_quietly()
    import tensorflow as tf

    from amdim_tf import exporting

    # On the CPU the comparison is exact to the last digits, and a training run keeps its GPU.
    tf.config.set_visible_devices([], "GPU")
    options = cli_flags.FLAGS
    exporting.export(model_dir, options.output_dir, options.dtype, options.tflite)


if __name__ == "__main__":
    cli_flags.run(main)
