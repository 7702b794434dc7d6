"""AMDIM (Augmented Multiscale Deep InfoMax, arXiv 1906.00910) in TensorFlow and Keras."""

import os

# Keras must run on TensorFlow here, whatever else it is set to on this machine.
os.environ["KERAS_BACKEND"] = "tensorflow"

__version__ = "0.1.0"
__all__ = ["load_model"]


def __getattr__(name: str):
    # Resolved on first use, so that the command-line programs can set TensorFlow's environment
    # before TensorFlow is loaded.
    if name == "load_model":
        from amdim_tf.checkpoints import load_model

        return load_model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
