"""What is shown to the user as a line of text."""

from __future__ import annotations

import re
import sys


class UserError(Exception):
    """Something the user can mend: a flag, a file, a setting.

    Its message is one line that names the flag or file, what was expected, what was received and
    the fix. The command-line programs print it and exit with a non-zero code; anything else that
    is raised is a bug and keeps its traceback.
    """


class Interrupted(Exception):
    """The user or the system asked the program to stop, and it has stopped in good order."""


def tensorflow_reason(error) -> str:
    """The first line of a TensorFlow error, without the names of operations and nodes."""
    line = error.message.strip().split("\n")[0]
    return re.sub(r"\{\{.*?\}\} ?| \[Op:.*", "", line)[:300]


def warn(message: str) -> None:
    """Shows one line that does not stop the program."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
