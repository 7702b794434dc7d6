"""What is told where a step fails: no memory, or another worker lost."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from amdim_tf.errors import UserError


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
