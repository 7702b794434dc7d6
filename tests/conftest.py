"""What the tests share: where data lies, and the reference's models."""

import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Programs are compared with this process to the last bit, so both have what TensorFlow chooses by
# itself: no oneDNN without these instructions.
os.environ.setdefault(
    "TF_ENABLE_ONEDNN_OPTS",
    str(int("avx512_vnni" in pathlib.Path("/proc/cpuinfo").read_text())),
)

import numpy as np
import pytest

from amdim_tf import config as config_lib
from amdim_tf.model import AMDIM
from amdim_tf.reference_weights import from_reference_layout, reference_variables

DATA = pathlib.Path(__file__).parent / "data"
GOLDEN = ("reference_32", "reference_64", "reference_128", "reference_32_bn")


class Golden:
    """One golden file: its numbers, and our model with its weights."""

    def __init__(self, name):
        with np.load(DATA / f"{name}.npz") as arrays:
            self.numbers = dict(arrays)
        hyper = {
            key.removeprefix("hyper/"): value.item()
            for key, value in self.numbers.items()
            if key.startswith("hyper/")
        }
        self.config = config_lib.make(
            {
                "image_size": hyper["encoder_size"],
                "ndf": hyper["ndf"],
                "n_rkhs": hyper["n_rkhs"],
                "n_depth": hyper["n_depth"],
                "use_bn": bool(hyper["use_bn"]),
                "score_clip": hyper["tclip"],
                "score_regularization": 5e-2,
            }
        )
        self.model = AMDIM(self.config, classes=hyper["n_classes"])
        self.state = {
            key.removeprefix("state_dict/"): value
            for key, value in self.numbers.items()
            if key.startswith("state_dict/")
        }
        for name, variable in reference_variables(self.model).items():
            variable.assign(from_reference_layout(self.state[name]))


def pytest_unconfigure(config):
    """Ends one of several test processes when it has reported everything.

    Else Python would take apart, one by one and for minutes, all the graphs that tests have made.
    """
    if hasattr(config, "workerinput"):
        os._exit(0)


@pytest.fixture(params=GOLDEN)
def golden(request):
    """Each golden file in turn, with a fresh model."""
    return Golden(request.param)
