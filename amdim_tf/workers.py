"""What becomes of a worker when another one is lost."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from amdim_tf.errors import UserError


@contextlib.contextmanager
def watched(devices, saved=None):
    """Turns the failure of an operation between workers into one line.

    Args:
        devices: of the run; with one worker, errors pass as they are.
        saved: its checkpoints, to name the newest.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if devices.workers == 1:
            raise
        reason = error.message.strip().splitlines()[0][:300]
        newest = saved.newest if saved is not None else None
        raise UserError(
            f"TF_CONFIG: expected all {devices.workers} workers to go on. Received on worker "
            f"{devices.worker}: {reason}. Start all workers again; they go on from "
            f"{newest or 'the newest checkpoint'}."
        ) from None
