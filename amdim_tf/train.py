"""Trains an encoder without labels.

Usage:
    python -m amdim_tf.train --flagfile=configs/quickstart.cfg --model_dir=runs/quickstart

Every setting is a flag; a flag file holds one --name=value per line, and a later flag wins. The
same command goes on with a run that was stopped. MODEL_DIR gets config.json, checkpoints/, logs/
(for TensorBoard) and metrics.csv.
"""

from absl import flags

from amdim_tf import cli_flags
from amdim_tf.signals import StopSignals

cli_flags.define_config_flags()
flags.adopt_module_key_flags(cli_flags)
flags.DEFINE(cli_flags.PATH, "model_dir", None, "Directory of the run; it is made if need be.")


def main() -> None:
    """Reads the flags and trains."""
    with StopSignals() as stop:  # now, as TensorFlow's import takes seconds
        model_dir = cli_flags.require_model_dir("a directory for the run's files")
        config = cli_flags.training_config(model_dir)
        cli_flags.import_tensorflow_quietly()
        from amdim_tf import training_loop

        training_loop.train(config, model_dir, stop)


if __name__ == "__main__":
    # TensorFlow's own end waits for workers that are lost, and for threads that tune data sets.
    cli_flags.run(main, at_once=True)
