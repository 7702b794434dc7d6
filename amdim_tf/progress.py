"""Progress for people: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time

import tqdm


class Progress:
    """Counts up to a total and shows a few figures beside the count.

    Args:
        total: when it is done.
        label: what is being done, in a word or two.
        unit: what is counted.
        start: where counting starts, for work that goes on from an earlier run.
        line_seconds: without a terminal, the least time between two lines.
    """

    def __init__(self, total: int, label: str, unit: str, start: int = 0, line_seconds=30.0):
        self._total, self._label, self._unit = total, label, unit
        self._done, self._printed, self._shown = start, start, time.monotonic()
        self._pace_from: tuple[int, float] | None = None  # how much was done, and when
        self._line_seconds = line_seconds
        self._figures = ""
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=total, initial=start, unit=unit, dynamic_ncols=True,
                bar_format=label + " {n_fmt}/{total_fmt} |{bar:10}| {remaining} left {desc}",
            )  # fmt: skip

    def advance(self, count: int = 1) -> None:
        """Counts on; without a terminal, prints a line now and then."""
        self._done += count
        if self._pace_from is None:
            self._pace_from = (self._done, time.monotonic())
        if self._bar is not None:
            self._bar.update(count)
        elif time.monotonic() - self._shown >= self._line_seconds:
            self._print_line()

    def show(self, figures: str) -> None:
        """Replaces the figures beside the count."""
        self._figures = figures
        if self._bar is not None:
            self._bar.set_description_str(figures, refresh=False)

    def close(self) -> None:
        """Ends the bar, or prints the last line."""
        if self._bar is not None:
            self._bar.close()
        elif self._done > self._printed:
            self._print_line()

    def __enter__(self) -> Progress:
        """For `with`: closes at the end."""
        return self

    def __exit__(self, *_) -> None:
        """Closes the bar."""
        self.close()

    def _print_line(self) -> None:
        self._shown, self._printed = time.monotonic(), self._done
        parts = [self._label, f"{self._done}/{self._total} {self._unit}s", self._left()]
        text = " ".join(part for part in [*parts, self._figures] if part)
        print(text, file=sys.stderr, flush=True)

    def _left(self) -> str:
        """How long the rest takes, by the pace since the first piece of work, which compiles."""
        if self._done == self._total:
            return "00:00 left"
        if self._pace_from is None or self._done == self._pace_from[0]:
            return ""
        done, moment = self._pace_from
        pace = (self._shown - moment) / (self._done - done)
        return f"{tqdm.tqdm.format_interval(pace * (self._total - self._done))} left"


class Silence:
    """Shows nothing, for workers beside the one that does."""

    def advance(self, count: int = 1) -> None:
        """Counts nothing."""

    def show(self, figures: str) -> None:
        """Drops the figures."""
