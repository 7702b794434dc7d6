"""What the workers of a run have in common, and what is told where a step fails or one is lost."""

from __future__ import annotations

import contextlib
import os
import time
import zlib

import tensorflow as tf

from amdim_tf import config_file
from amdim_tf.config import Config
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.examples import ArraySource, Source
from amdim_tf.signals import StopSignals

# Longer than clients of network file systems remember that a file was not there.
_SHARED_SECONDS = 75.0


def facts(source: Source, config: Config, policy) -> list[str]:
    """What all workers have to agree on beside their settings, in words; images by their names."""
    directory = os.path.abspath(config.data.data_dir) if config.data.data_dir else ""
    if isinstance(source, ArraySource):
        contents = zlib.crc32(source.labels.tobytes())
    else:
        contents = 0
        for index in range(len(source)):
            name = os.path.abspath(source.name_of(index)).removeprefix(directory)
            contents = zlib.crc32(os.fsencode(name), contents)
    return [
        f"{len(source)} images in --data_dir",
        f"{len(source.class_names)} classes of images ({', '.join(source.class_names):.80})",
        f"images with the digest {contents:08x}",
        f"a policy with the digest {zlib.crc32(repr(policy).encode()):08x}",
    ]


def wait_for_config(model_dir, stop: StopSignals) -> None:
    """Returns when the first worker's settings are seen, which network file systems may delay."""
    path, began = config_file.path_in(model_dir), time.monotonic()
    while not path.exists():
        if stop.received:
            raise Interrupted(f"Stopped by {stop.received} while waiting for {path}.")
        if time.monotonic() - began > _SHARED_SECONDS:
            raise UserError(
                f"--model_dir: expected a directory that all workers share. Received: {model_dir}, "
                f"in which worker 0 has written no {path.name} that this one sees."
            )
        time.sleep(0.2)


@contextlib.contextmanager
def watched(devices, saved=None):
    """Turns the failure of an operation between workers into one line.

    Args:
        devices: of the run; with one worker, errors other than memory's pass as they are.
        saved: its checkpoints, to name the newest.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if devices.workers == 1:
            if isinstance(error, tf.errors.ResourceExhaustedError):
                raise UserError(
                    "--batch_size: expected a step that fits into memory. Received: "
                    f"{error.message.splitlines()[0][:200]}. Try --microbatch, which holds fewer "
                    "images at a time; tools/plan.py says how many."
                ) from None
            raise
        lines = [line.strip() for line in error.message.splitlines() if line.strip()]
        told = [line for line in lines if "aborted" in line or "unhealthy" in line]
        reason = (told or lines or [type(error).__name__])[0][:300]
        newest = saved.newest if saved is not None else None
        raise UserError(
            f"TF_CONFIG: expected all {devices.workers} workers to go on. Received on worker "
            f"{devices.worker}: {reason}. Start all workers again; they go on from "
            f"{newest or 'the newest checkpoint'}."
        ) from None
