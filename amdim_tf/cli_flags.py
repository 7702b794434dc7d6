"""Command-line flags that make a Config, and the frame in which every program runs.

TensorFlow is not imported here: help and mistakes in the flags are answered at once.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import platform
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

from amdim_tf import config as config_lib
from amdim_tf import signals
from amdim_tf.config import SETTINGS, Config
from amdim_tf.errors import Interrupted, UserError
from amdim_tf.setting_fields import shown

with signals.kept_from_threads():  # those of NumPy, which it imports
    from amdim_tf import config_file

FLAGS = flags.FLAGS


class _ListParser(flags.ArgumentParser):
    """Values with commas between them, such as 0.3,1.0."""

    def __init__(self, item: Callable[[str], Any], description: str):
        self._item = item
        self._description = description

    def parse(self, argument):
        """A tuple of the items; an empty text is an empty tuple."""
        if isinstance(argument, tuple):
            return argument
        try:
            parts = [part.strip() for part in argument.split(",")] if argument.strip() else []
            return tuple(self._item(part) for part in parts)
        except ValueError:
            raise ValueError(f"expected {self._description} with commas between them") from None

    def flag_type(self):
        """Shown in the help."""
        return self._description


class Finite(flags.FloatParser):
    """A number within its bounds that is neither NaN nor infinite, which absl's bounds let pass."""

    def is_outside_bounds(self, val):
        """Whether it is none."""
        return not math.isfinite(val) or super().is_outside_bounds(val)


class _PathParser(flags.ArgumentParser):
    """A path, in which ~ is the home directory."""

    def parse(self, argument):
        """The path without ~."""
        return os.path.expanduser(argument)

    def flag_type(self):
        """Shown in the help."""
        return "path"


# Used as flags.DEFINE(cli_flags.PATH, name, default, help).
PATH = _PathParser()
_PATHS = ("data_dir", "policy")


def define_config_flags() -> None:
    """One flag per setting. Their default is None, which means: not given on the command line.

    A flag that the program has defined by itself stays as it is.
    """
    for name, (_, field) in SETTINGS.items():
        if name in FLAGS:
            continue
        default = getattr(_section_of(name), name)
        text = f"{field.metadata['help']} (default: {shown(default)})"
        if name in _DATASET_DEPENDENT:
            text = f"{field.metadata['help']} (default: the data set's)"
        if "choices" in field.metadata and field.type == "str":
            text += " One of: " + ", ".join(field.metadata["choices"]) + "."
        if field.type == "tuple[float, ...]":
            flags.DEFINE(_ListParser(float, "numbers"), name, None, text)
        elif field.type == "tuple[int, ...]":
            flags.DEFINE(_ListParser(int, "whole numbers"), name, None, text)
        elif field.type == "tuple[str, ...]":
            flags.DEFINE(_ListParser(str, "names"), name, None, text)
        elif name in _PATHS:
            flags.DEFINE(PATH, name, None, text)
        else:
            define = {
                "int": flags.DEFINE_integer,
                "float": flags.DEFINE_float,
                "bool": flags.DEFINE_bool,
                "str": flags.DEFINE_string,
            }[field.type]
            define(name, None, text)


_DATASET_DEPENDENT = {name for values in config_lib.DATASET_DEFAULTS.values() for name in values}


def _section_of(name: str):
    return getattr(Config(), SETTINGS[name][0])


def given_settings() -> dict[str, Any]:
    """The settings that the command line or a flag file gives."""
    given = {name: FLAGS[name].value for name in SETTINGS if FLAGS[name].value is not None}
    if given.get("epochs") and given.get("train_steps"):
        raise UserError(
            f"--epochs: expected either --epochs or --train_steps. Received: {given['epochs']:g} "
            f"beside --train_steps={given['train_steps']}. If one of them is from a flag file, "
            "take it back by --epochs=0 or --train_steps=0."
        )
    if given.get("train_steps") and given.get("epochs") == 0:
        del given["epochs"]
    return given


def check_flags_of_run(model_dir: str) -> None:
    """Refuses flags, as of a flag file, that do not fit the model of a run.

    Only those of the model count: what a run was trained by does not change what it is now.
    """
    given = {
        name: value
        for name, value in given_settings().items()
        if SETTINGS[name][0] == "model" or name == "image_size"
    }
    saved = config_file.load(config_file.path_in(model_dir))[0]
    config_file.changes(saved, config_lib.update(saved, given), model_dir)


def training_config(model_dir: str) -> Config:
    """The settings of a run: those saved in model_dir, if it has been started, or the flags'.

    Raises:
        UserError: where a flag contradicts a saved setting that cannot change in mid-run.
    """
    given = given_settings()
    run = config_file.run_in(model_dir)
    if run is None and "dataset" not in given and config_file.path_in(model_dir).exists():
        # It was stopped before its first checkpoint.
        return config_lib.update(config_file.load(config_file.path_in(model_dir))[0], given)
    if run is None:
        if "dataset" not in given:
            raise UserError(
                f"--dataset: expected for a new run, by flag or flag file; {model_dir} holds none "
                "to go on with. Received: nothing."
            )
        return config_lib.make(given)
    if "epochs" in given:
        given.setdefault("train_steps", 0)  # else a number of steps that was saved would win
    # What cannot change is told first: it may contradict what the run has.
    config_file.changes(run[0], config_lib.replaced(run[0], given), model_dir)
    return config_lib.update(run[0], given)


def require_model_dir(meaning: str) -> str:
    """The value of --model_dir, without characters that TensorFlow's file functions expand."""
    model_dir = require("model_dir", meaning)
    if set(model_dir) & set("*?[]\\"):
        raise UserError(
            f"--model_dir: expected a name without * ? [ ] and backslash. Received: {model_dir}."
        )
    if "://" in model_dir:
        raise UserError(
            f"--model_dir: expected a directory of this machine. Received: {model_dir}. Mount the "
            "bucket as a directory, or copy the run there afterwards."
        )
    return model_dir


def require(name: str, meaning: str) -> str:
    """The value of a flag that must be given."""
    value = FLAGS[name].value
    if not value:
        raise UserError(f"--{name}: expected {meaning}. Received: nothing.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UserError(f"--{name}: expected a name in UTF-8. Received: {value!a}.") from None
    return value


def import_tensorflow_quietly() -> None:
    """Imports TensorFlow without the notes on CPU kernels that it prints on every start.

    TF_CPP_MIN_LOG_LEVEL does not reach these lines (TensorFlow issue 100442), so they are taken out
    of standard error; every other line, and every warning or error, is passed on.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # for the notes of later compilations
    # Everything but AMX, which some virtual machines announce and die of in bfloat16.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    if platform.machine() in ("x86_64", "AMD64"):
        # TensorFlow leaves oneDNN off on processors without AVX512-VNNI, where it is faster too.
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    saved = os.dup(2)
    with tempfile.TemporaryFile() as notes, signals.kept_from_threads():
        os.dup2(notes.fileno(), 2)
        try:
            import tensorflow as tf

            tf.config.list_physical_devices()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            notes.seek(0)
            for line in notes.read().decode(errors="replace").splitlines():
                if not _STARTUP_NOTE.search(line):
                    print(line, file=sys.stderr)


# Information lines, and the search for a CUDA driver that fails wherever there is no GPU.
_STARTUP_NOTE = re.compile(r"^I\d{4} |absl::InitializeLog|^To enable the following instructions")
if not os.path.exists("/proc/driver/nvidia"):
    _STARTUP_NOTE = re.compile(_STARTUP_NOTE.pattern + r"|failed call to cuInit")


def run(main: Callable[..., None], words: int | None = 0, at_once: bool = False) -> None:
    """Parses the command line, runs `main`, and turns a UserError into one line and exit code 2.

    Args:
        main: the program; it gets the words beside the flags as arguments.
        words: how many words beside flags the program takes; None for any number.
        at_once: end the process when `main` has ended, without waiting for TensorFlow's threads.
    """
    _open_standard_streams()

    def parse(argv):
        try:
            program, *rest = FLAGS(argv)
        except flags.IllegalFlagValueError as error:
            sys.exit(_error_line(_value_mistake(error)))
        except flags.CantOpenFlagFileError as error:
            reason = str(error).partition("flagfile: ")[2]
            sys.exit(_error_line(f"--flagfile: expected a file of flags. Received: {reason}."))
        except flags.Error as error:
            sys.exit(_error_line(str(error).removeprefix("ERROR:: ")))
        except UnicodeError:
            files = " ".join(word for word in argv if "flagfile" in word)
            expected = "expected text files in UTF-8 with one --name=value per line"
            sys.exit(_error_line(f"--flagfile: {expected}. Received: other bytes in {files}."))
        except ValueError as error:  # --noNAME=VALUE
            sys.exit(_error_line(error))
        except SystemExit:  # --help, which absl ends with an error code
            sys.exit(0)
        if words is not None and len(rest) != words:
            expected = f"{words} word(s) beside the flags" if words else "flags only"
            sys.exit(_error_line(f"expected {expected}. Received: {' '.join(rest) or 'none'}."))
        return [program, *rest]

    def guarded_main(argv):
        logging.set_verbosity(logging.WARNING)
        if not at_once:
            sys.exit(_code_of(main, argv[1:]))
        code = _code_of(functools.partial(_with_own_temporary_files, main), argv[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    app.run(guarded_main, flags_parser=parse)


def _with_own_temporary_files(main: Callable[..., None], *words: str) -> None:
    """Runs a program whose temporary files go with it.

    AutoGraph writes some, and removes them at an end that os._exit does not reach.
    """
    with tempfile.TemporaryDirectory(prefix="amdim_tf-", ignore_cleanup_errors=True) as directory:
        tempfile.tempdir = directory
        try:
            main(*words)
        finally:
            tempfile.tempdir = None


def _code_of(main: Callable[..., None], words: list[str]) -> int:
    """Runs a program; returns its exit code, after a line that tells why where it is not 0."""
    try:
        main(*words)
        sys.stdout.flush()
    except UserError as error:
        return _error_line(error)
    except OSError as error:
        # Whatever is still to be printed would fail again, and not in one line.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # whoever read the output has left
            return 128 + signal.SIGPIPE
        name = error.filename or "a file, or standard output"
        remedy = _REMEDIES.get(error.errno, "")
        return _error_line(f"{name}: {error.strerror or error}.{remedy}")
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Interrupted as notice:
        print(notice, file=sys.stderr)
        return signals.STOPPED_CODE
    return 0


_REMEDIES = {
    errno.ENOSPC: " Make room, and run the same command again.",
    errno.EDQUOT: " Make room, and run the same command again.",
    errno.EROFS: " Expected a place that can be written to.",
    errno.EACCES: " Expected permission to read or write it.",
    errno.EISDIR: " Expected a file: move the directory away.",
    errno.EEXIST: " Expected a directory: move the file away.",
    errno.ENOTDIR: " Expected a directory: move the file away.",
}


def _open_standard_streams() -> None:
    """Gives a process whose output was closed somewhere to write to.

    Else the next file that it opens would take that place, and whatever is printed would go there.
    """
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 3:
        descriptor = os.dup(descriptor)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _value_mistake(error: flags.IllegalFlagValueError) -> str:
    """Absl's "flag --NAME=VALUE: REASON" in the form of our other messages."""
    reason = str(error.__context__)
    flag = str(error).removesuffix(f": {reason}").removeprefix("flag --")
    name, _, value = flag.partition("=")
    kind = FLAGS[name].flag_type() if name in FLAGS else ""
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false"}
    _, limited, limit = reason.partition(" is not ")
    expected = limit if limited else kinds.get(kind, reason.removeprefix("expected "))
    return f"--{name}: expected {expected}. Received: {value or 'nothing'}."


def _error_line(error) -> int:
    """Prints an error as one line and returns the exit code."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return 2
