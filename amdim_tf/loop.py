"""The loop of a run: steps, with rows of figures, checkpoints and stops in between."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from amdim_tf import diagnosis, distribution, profiling, stepping, views, workers
from amdim_tf.config import Config
from amdim_tf.errors import Interrupted, UserError, warn
from amdim_tf.mixture_watch import MixtureWatch
from amdim_tf.model import AMDIM
from amdim_tf.progress import Progress, Silence
from amdim_tf.signals import StopSignals
from amdim_tf.summaries import Window, average

_SHOWN_PAIRS = 16
_WINDOW = "window/"


class Loop:
    """Steps, with rows of figures and checkpoints in between.

    Args:
        model, config: what is trained, and how.
        saved: the run's checkpoints.
        log: where the figures go.
        restored: where the run stands.
        check_data: called now and then; raises where the images cannot be used.
        devices: what the steps run on. A worker that is not the chief writes nothing.
        stop: the signals that ask it to stop.
    """

    def __init__(
        self, model: AMDIM, config: Config, saved, log, restored, check_data, devices,
        stop: StopSignals,
    ):  # fmt: skip
        self._model, self._config, self._training = model, config, config.training
        self._saved, self._log, self._check_data = saved, log, check_data
        self._mixture_watch = MixtureWatch(config.model.mixture_components, warn)
        self._step, self._devices, self._stop = restored.step, devices, stop
        self._nonfinite = int(restored.loop.get("nonfinite_steps", 0))
        self._window = Window(
            {
                name.removeprefix(_WINDOW): values
                for name, values in restored.loop.items()
                if name.startswith(_WINDOW)
            }
        )
        self._row_began = self._save_began = time.monotonic()
        self._steps_since_row, self._pause = 0, 0.0

    def run(self, batches: Iterator[dict[str, tf.Tensor]], total: int) -> None:
        """Makes a step of each batch, up to step `total`."""
        train_step = stepping.step_function(self._model, self._devices)
        profile = profiling.Profile(self._training.profile_steps, self._log)
        stop = self._stop
        with self._progress(total) as progress, profile:
            for number, batch in enumerate(batches):
                if number == 0:
                    self._show_views(batch)
                profile.before(self._step + 1)
                with workers.watched(self._devices, self._saved):
                    logs = train_step(batch, bool(stop.received))
                    stopped = float(logs.pop("stop", bool(stop.received)))
                self._step += 1
                self._steps_since_row += 1
                self._window.add(logs)
                if float(logs["nonfinite"]):
                    self._note_nonfinite(batch, logs)
                progress.advance()
                last = self._step == total
                if self._step % self._training.log_steps == 0 or last:
                    progress.show(_figures_line(self._write_row()))
                    self._check_data()
                if self._is_save_due() or last or stopped:
                    self._check_data()
                    self._begin_to_save()
                self._saved.check()
                if stopped and not last:
                    self._finish()
                    raise Interrupted(
                        f"Stopped by {stop.received or 'another worker'} after step {self._step} "
                        f"of {total}, which is saved. The same command goes on from here."
                    )
            self._finish()

    def _progress(self, total: int):
        if not self._devices.is_chief:
            return contextlib.nullcontext(Silence())
        return Progress(total, "train", "step", start=self._step)

    def _finish(self) -> None:
        """Waits for the last checkpoint, and for all workers: who leaves early seems lost."""
        self._saved.wait()
        if self._devices.workers > 1:
            with workers.watched(self._devices, self._saved):
                distribution.values_of_workers(self._devices.strategy, 0)

    def _show_views(self, batch) -> None:
        if self._log is None:
            return
        batch = stepping.of_this_worker(batch, self._devices)
        pairs = [batch[view][:_SHOWN_PAIRS] for view in ("view1", "view2")]
        shown_pairs = [views.denormalize(self._config.views, pair).numpy() for pair in pairs]
        self._log.write_views(self._step + 1, *shown_pairs)

    def _write_row(self) -> dict[str, float]:
        """Writes the means since the last row, and returns them."""
        seconds = time.monotonic() - self._row_began
        images = self._steps_since_row * self._training.batch_size
        figures = average(self._window.arrays())
        figures |= {"images_per_second": images / seconds, "checkpoint_seconds": self._pause}
        if self._log is not None:
            self._log.write(self._step, figures, seconds)
            self._mixture_watch.look(self._step, figures)
        self._window, self._row_began = Window({}), time.monotonic()
        self._steps_since_row, self._pause = 0, 0.0
        return figures

    def _is_save_due(self) -> bool:
        training = self._training
        intervals = (training.checkpoint_steps, training.keep_every)
        minutes = (time.monotonic() - self._save_began) / 60
        return any(interval and self._step % interval == 0 for interval in intervals) or bool(
            training.checkpoint_minutes and minutes >= training.checkpoint_minutes
        )

    def _begin_to_save(self) -> None:
        self._save_began = time.monotonic()
        if not self._devices.is_chief:
            return
        window = {_WINDOW + name: values for name, values in self._window.arrays().items()}
        loop = {"nonfinite_steps": np.array(self._nonfinite), **window}
        self._pause += self._saved.begin_to_save(self._step, loop)

    def _note_nonfinite(self, batch, logs) -> None:
        """Counts a step that changed nothing, and ends the run where that is not allowed."""
        self._nonfinite += 1
        limit = self._training.nonfinite_limit
        if self._training.nonfinite == "skip" and self._nonfinite <= limit:
            return
        self._saved.wait()
        # No more images than the step itself has room for.
        share = self._training.batch_size // self._devices.replicas
        most = self._config.distribution.microbatch or share
        batch = stepping.of_this_worker(batch, self._devices)
        batch = {name: value[:most] for name, value in batch.items()}
        found = diagnosis.describe_step(self._model, batch, logs, self._step - 1)
        go_on = f"--nonfinite=skip (--nonfinite_limit={limit} such steps)"
        if self._nonfinite > limit:
            go_on = f"a --nonfinite_limit above {limit}"
        newest = self._saved.newest
        whence = f"Last good checkpoint: {newest}. Go on from it" if newest else "Begin again"
        raise UserError(
            f"step {self._step}: expected a finite loss and gradient. Received: {found}. {whence} "
            f"with {go_on}, or begin another run with a lower --learning_rate."
        )


def _figures_line(figures: dict[str, float]) -> str:
    """Loss per task, online accuracies and speed, in few characters."""
    tasks = [name for name in figures if name.startswith("loss_") and name != "loss_scale"]
    parts = [f"{name[5:]} {figures[name]:.2f}" for name in tasks]
    for name in ("linear", "mlp"):
        if not math.isnan(figures.get(f"{name}_accuracy", math.nan)):
            parts.append(f"{name} {100 * figures[f'{name}_accuracy']:.0f}%")
    return " ".join([*parts, f"{figures['images_per_second']:.0f} images/s"])
