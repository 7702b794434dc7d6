"""What is logged of a mixture, and a warning when components have stopped to be of use."""

from __future__ import annotations

import math
from collections.abc import Callable

import tensorflow as tf

from amdim_tf.nce import MixtureLoss

# A component with less than this part of an equal share is unused.
_LEAST_PART = 0.1
# Posteriors with this part of the greatest entropy say that components are alike.
_MOST_ENTROPY = 0.99
# Neither is a concern before it has lasted this many steps.
_STEPS = 1000


def mixture_logs(tasks) -> dict[str, tf.Tensor]:
    """Objective, posterior entropy and usage of each component, means over the mixture's tasks.

    Args:
        tasks: as nce.multiscale_losses gives them.
    """
    mixed = [result for result in tasks.values() if isinstance(result, MixtureLoss)]
    if not mixed:
        return {}
    usage = tf.add_n([result.figures.usage for result in mixed]) / len(mixed)  # [K]
    return {
        "mixture_objective": -tf.add_n([result.loss for result in mixed]) / len(mixed),
        "mixture_entropy": tf.add_n([result.figures.entropy for result in mixed]) / len(mixed),
        **{f"mixture_usage_{number}": share for number, share in enumerate(tf.unstack(usage))},
    }


class MixtureWatch:
    """Warns, once each, of components that are unused or alike for long.

    Args:
        components: K.
        warn: called with a line of text.
    """

    def __init__(self, components: int, warn: Callable[[str], None]):
        self._components, self._warn = components, warn
        self._since: dict[str, int] = {}
        self._warned: set[str] = set()

    def look(self, step: int, figures: dict[str, float]) -> None:
        """Takes the figures of a row, means over the steps since the row before."""
        K = self._components
        if K < 2:
            return
        for number in range(K):
            usage = figures[f"mixture_usage_{number}"]
            text = (
                f"mixture: component {number} has had less than {100 * _LEAST_PART / K:.2g}% of "
                f"the locations for {_STEPS} steps ({100 * usage:.2g}% now). A lower "
                "--mixture_temperature or fewer --mixture_components may help."
            )
            self._note(f"component {number}", usage < _LEAST_PART / K, step, text)
        alike = figures["mixture_entropy"] > _MOST_ENTROPY * math.log(K)
        text = (
            f"mixture: the {K} components have been alike for {_STEPS} steps (posterior entropy "
            f"{figures['mixture_entropy']:.3f} of at most {math.log(K):.3f}). A higher "
            "--mixture_temperature may help."
        )
        self._note("alike", alike, step, text)

    def _note(self, name: str, is_so: bool, step: int, text: str) -> None:
        """Warns where something has been so for long and was not said before."""
        if not is_so:
            self._since.pop(name, None)
        elif step - self._since.setdefault(name, step) >= _STEPS and name not in self._warned:
            self._warned.add(name)
            self._warn(text)
