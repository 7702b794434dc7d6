"""What has to be known about a start of a run to repeat it."""

from __future__ import annotations

import datetime
import os
import pathlib
import platform
import socket
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import amdim_tf

# What changes how TensorFlow computes. Others may hold secrets, and are none of our business.
_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA", "TF_ENABLE_ONEDNN_OPTS",
    "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_XLA_FLAGS", "XLA_FLAGS",
)  # fmt: skip


def make(seed: int, step: int) -> dict[str, Any]:
    """The record of a start: when, where, with what, and from which step."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "seed": seed,
        "command": sys.argv,
        "versions": {
            "amdim_tf": amdim_tf.__version__,
            "git_commit": _git_commit(),
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "keras": keras.__version__,
            "numpy": np.__version__,
        },
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "processors": os.cpu_count(),
        },
        "devices": [
            tf.config.experimental.get_device_details(device).get("device_name", device.name)
            for device in tf.config.list_physical_devices()
        ],
        "environment": {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
    }


def _git_commit() -> str:
    """The commit of the checkout that is running, with + where it has been changed; "" for none."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(pathlib.Path(__file__).parent), *words],
            capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    try:
        # An installed copy may lie in somebody else's repository.
        if git("rev-parse", "--show-prefix") != "amdim_tf/":
            return ""
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""
