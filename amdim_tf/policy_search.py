"""The search behind tools/search_policy.py: steps, their density, trials, and what is kept of them.

Which sub-policies are tried and which are kept depends on a score alone, a function; see the tool
for what is scored, and for why the space of steps is bounded as it is.
"""

from __future__ import annotations

import collections
import itertools
import math
import typing
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from amdim_tf import policy_tables as tables
from amdim_tf.errors import UserError
from amdim_tf.policy_tables import Policy, Step

OPERATIONS = tuple(name for name in tables.OPERATIONS if name != "identity")
LEAST_PROBABILITY = 0.2
LEAST_STRENGTH = 0.25
LARGEST_SHARE = 1 / 3  # of the best sub-policies that may have an operation
TRIAL_SIZE = 5  # sub-policies in a trial
_RANDOM_TRIALS = 4  # of each fold, before there is something to learn from
_GOOD_SHARE = 0.2
_BANDWIDTH = 0.15
_CANDIDATES = 24
_PROPOSAL_KEY = 2  # keeps the proposals apart from what the tool draws with the same seed

SubPolicy = tuple[Step, Step]
# (fold, number of the trial, sub-policies) -> (harm of each sub-policy, accuracy of the classifier)
Score = Callable[[int, int, list[SubPolicy]], tuple[list[float], float]]


def strength(operation: str, level: float) -> float:
    """How far a level is from where the operation changes nothing, 0..1."""
    if operation in tables.ENHANCEMENTS:
        return abs(2 * level - 1)
    if operation in ("solarize", "posterize"):
        return 1 - level
    return level if operation in tables.RANGES else 1.0


def _first_allowed(operation: str, draw: Callable[[], Iterable[float]]) -> Step:
    """A step of the first (probability, level) drawn that lies in the space of the search."""
    while True:
        probability, level = (round(float(value), 3) for value in draw())
        if operation not in tables.RANGES:
            level = 0.0  # which means nothing
        inside = LEAST_PROBABILITY <= probability <= 1 and 0 <= level <= 1
        if inside and strength(operation, level) >= LEAST_STRENGTH:
            return Step(operation, probability, level)


class StepDensity:
    """A Parzen estimate over steps: a uniform prior, and a kernel at each observed step.

    A kernel over probability and level belongs to its operation (the tree). The prior of each
    operation weighs as much as one observed step. That kernels end at the borders of the space is
    neglected: it concerns both densities whose ratio is wanted.

    Args:
        steps: observed ones; without any, the density is uniform.
    """

    def __init__(self, steps: Iterable[Step]):
        self._steps = list(steps)
        self._places = {
            operation: np.array([step[1:] for step in self._steps if step.operation == operation])
            for operation in OPERATIONS
        }

    def draw(self, rng: np.random.Generator) -> Step:
        """A random step."""
        number = int(rng.integers(len(self._steps) + len(OPERATIONS)))
        if number < len(OPERATIONS):
            return _first_allowed(OPERATIONS[number], lambda: rng.random(2))
        operation, *place = self._steps[number - len(OPERATIONS)]
        return _first_allowed(operation, lambda: rng.normal(place, _BANDWIDTH))

    def log_density(self, step: Step) -> float:
        """The logarithm of the density at a step, up to a constant."""
        places = self._places[step.operation]  # [n, 2]: probability, level
        total = 1.0
        if len(places):
            used = 2 if step.operation in tables.RANGES else 1  # is there a level?
            distances = (places[:, :used] - np.array(step[1:])[:used]) / _BANDWIDTH
            heights = np.exp(-0.5 * np.sum(distances**2, axis=1))  # [n]
            total += heights.sum() / (_BANDWIDTH * math.sqrt(2 * math.pi)) ** used
        return math.log(total / (len(self._steps) + len(OPERATIONS)))


class Trial(typing.NamedTuple):
    """A policy that was tried on the images of a fold."""

    fold: int
    sub_policies: list[SubPolicy]
    harms: list[float]  # of each sub-policy; infinite where it changes too few images
    accuracy: float


def draw_random(rng: np.random.Generator, count: int) -> list[SubPolicy]:
    """Sub-policies, uniform over the space of the search."""
    uniform = StepDensity([])
    return [(uniform.draw(rng), uniform.draw(rng)) for _ in range(count)]


def _ranked(trials: Iterable[Trial]) -> list[SubPolicy]:
    """The sub-policies that change enough, the least harmful first."""
    tried = [pair for trial in trials for pair in zip(trial.harms, trial.sub_policies, strict=True)]
    ranked = sorted(tried, key=lambda pair: pair[0])
    return [sub_policy for harm, sub_policy in ranked if harm < math.inf]


def select(ranked: Iterable[SubPolicy], count: int) -> list[SubPolicy]:
    """The first `count` sub-policies that differ enough; fewer where there are not as many.

    Each pair of operations is taken once, and no operation more often than LARGEST_SHARE says.
    """
    selected: dict[tuple[str, ...], SubPolicy] = {}
    uses: collections.Counter[str] = collections.Counter()
    most = math.ceil(LARGEST_SHARE * count)
    for sub_policy in ranked:
        operations = tuple(step.operation for step in sub_policy)
        if operations not in selected and all(uses[name] < most for name in operations):
            selected[operations] = sub_policy
            uses.update(set(operations))
        if len(selected) == count:
            break
    return list(selected.values())


def _propose(history: list[Trial], rng: np.random.Generator) -> list[SubPolicy]:
    """What to try next in a fold, given its trials so far."""
    if len(history) < _RANDOM_TRIALS:
        return draw_random(rng, TRIAL_SIZE)
    tried = [sub_policy for trial in history for sub_policy in trial.sub_policies]
    best = select(_ranked(history), math.ceil(_GOOD_SHARE * len(tried)))
    chosen = set(best)
    others = [sub_policy for sub_policy in tried if sub_policy not in chosen]
    good, bad = (StepDensity(itertools.chain.from_iterable(part)) for part in (best, others))

    def promise(candidate: SubPolicy) -> float:
        return sum(good.log_density(step) - bad.log_density(step) for step in candidate)

    return [
        max(((good.draw(rng), good.draw(rng)) for _ in range(_CANDIDATES)), key=promise)
        for _ in range(TRIAL_SIZE)
    ]


def search(score: Score, folds: int, seed: int) -> Iterator[Trial]:
    """Trials without end, the folds in turn; each is a function of the seed and its number.

    Args:
        score: what tells how harmful sub-policies are.
        folds: how many searches, which know nothing of each other.
        seed: of the proposals.
    """
    histories: list[list[Trial]] = [[] for _ in range(folds)]
    for number in itertools.count():
        fold = number % folds
        rng = np.random.default_rng([_PROPOSAL_KEY, seed, number])
        sub_policies = _propose(histories[fold], rng)
        trial = Trial(fold, sub_policies, *score(fold, number, sub_policies))
        histories[fold].append(trial)
        yield trial


def merge(trials: list[Trial], count: int) -> Policy:
    """The best sub-policies of every fold, then the second best, and so on.

    Returns:
        A policy of `count` sub-policies; fewer where too few have been found.
    """
    folds = sorted({trial.fold for trial in trials})
    ranked = [_ranked(trial for trial in trials if trial.fold == fold) for fold in folds]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*ranked))
    found = select(filter(None, in_turn), count)
    if not found:
        raise UserError(
            f"--trials, --minutes: expected enough to find a sub-policy that changes half of its "
            f"images. Received: {len(trials)} trials without success. Allow more."
        )
    return Policy(tuple(found))
