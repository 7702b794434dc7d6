"""TensorBoard's event file, written by Python.

TensorFlow's own writer drops what it cannot write to a full disk, and raises its own errors later.
"""

from __future__ import annotations

import os
import pathlib
import socket
import time
from typing import Any

import tensorflow as tf
from tensorboard.summary.writer.record_writer import RecordWriter

from amdim_tf import safe_files
from amdim_tf.errors import UserError

_Event, _Summary = tf.compat.v1.Event, tf.compat.v1.Summary


class EventFile:
    """A new file of events in a directory.

    Args:
        directory: LOGS, where TensorBoard looks; it is made if need be.
        step: where the run stands. TensorBoard forgets later steps of earlier files.
    """

    def __init__(self, directory: pathlib.Path, step: int):
        try:
            directory.mkdir(exist_ok=True)
        except FileExistsError:
            raise UserError(
                f"{directory}: expected a directory for TensorBoard. Received: a file. Move it."
            ) from None
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = safe_files.create(directory / name)
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        started = tf.compat.v1.SessionLog(status=tf.compat.v1.SessionLog.START)
        self._write(step=step + 1, session_log=started)

    def write(self, step: int, plugin: str, values: dict[str, Any]) -> None:
        """Adds values of one kind and sends them to the file.

        Args:
            step: they belong to.
            plugin: who shows them: "scalars" for numbers, "images" for [width, height, PNG].
            values: tag -> value.
        """
        kind = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": plugin})
        summary = _Summary(
            value=[
                _Summary.Value(tag=tag, tensor=tf.make_tensor_proto(value), metadata=kind)
                for tag, value in values.items()
            ]
        )
        self._write(step=step, summary=summary)

    def _write(self, **fields: Any) -> None:
        self._records.write(_Event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
