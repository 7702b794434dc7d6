"""One process at a time trains in a model_dir."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import socket

from amdim_tf.errors import UserError, warn


@contextlib.contextmanager
def held(model_dir):
    """Holds MODEL_DIR/lock, and refuses where another process does.

    The operating system lets go of it when the process ends, however it ends; the file itself stays
    and says who had it last.
    """
    path = pathlib.Path(model_dir) / "lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise UserError(
            f"--model_dir: expected a directory that can be written. Received: {model_dir} "
            f"({error.strerror})."
        ) from None
    with open(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(200).decode(errors="replace").strip()
            raise UserError(
                f"--model_dir: expected one run at a time in {model_dir}. Received: a second, "
                f"beside {holder or 'another process'}. Stop that one, or use another directory."
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            warn(f"{path}: this file system has no locks; nothing keeps a second run out.")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
