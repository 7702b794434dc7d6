"""Scores, clipping, and the noise-contrastive loss: pure functions, never below float32.

Notation of the paper's sections 3.2 and 3.3: an antecedent a has to pick its own consequents t out
of those of all images in the batch; B images, S locations of a consequent map, D channels.
"""

from __future__ import annotations

import collections
import functools
import typing

import tensorflow as tf

from amdim_tf.blocked_nce import block_rows, blocked_losses
from amdim_tf.config import parse_task
from amdim_tf.mixture_objective import MixtureFigures, mixture_figures, mixture_objective


def scaled_scores(antecedents, consequents):
    """Matching scores Φ = a·t / sqrt(D) (paper section 3.3; the scale is the reference code's).

    Args:
        antecedents: [A, D].
        consequents: [B, S, D].

    Returns:
        [A, B, S].
    """
    B, S, D = consequents.shape[0] or tf.shape(consequents)[0], *consequents.shape[1:]
    flat = tf.reshape(consequents, [B * S, D])  # [B·S, D]
    scores = tf.matmul(antecedents, flat, transpose_b=True) * D**-0.5  # [A, B·S]
    return tf.reshape(scores, [-1, B, S])


def soft_clip(scores, limit):
    """c·tanh(s/c), linear around 0 and within ±c (paper section 3.3); limit 0: unchanged."""
    return limit * tf.tanh(scores / limit) if limit else scores


def nce_log_probabilities(scores, offset=0):
    """Log-softmax of each positive score against its negatives (paper eq. nce_log_softmax).

    Image i's positives are the S locations of consequent map i + offset; its negatives, all
    locations of all other maps. The sum over negatives is the same for the S positives and is
    computed once: the paper's "dynamic programming". With n the log of that sum,
    log p = s − log(exp s + exp n) = −softplus(n − s), which is exact at any magnitude.

    Args:
        scores: [A, B, S], with B at least 2.
        offset: the consequent map that belongs to antecedent 0.

    Returns:
        (log p [A, S], positive scores [A, S]).
    """
    rows = tf.range(tf.shape(scores)[0])  # [A]
    own = tf.one_hot(rows + offset, tf.shape(scores)[1], on_value=True, off_value=False)  # [A, B]
    positives = tf.gather(scores, rows + offset, axis=1, batch_dims=1)  # [A, S]
    negatives = tf.where(own[:, :, None], scores.dtype.min, scores)  # [A, B, S]
    log_negatives = tf.reduce_logsumexp(negatives, axis=[1, 2])[:, None]  # [A, 1], max-shifted
    return -tf.nn.softplus(log_negatives - positives), positives


def mean_square(scores):
    """The mean of s²; its gradient, unlike that of a mean, holds no second array of its size."""
    return 2 * tf.nn.l2_loss(scores) / tf.cast(tf.size(scores), scores.dtype)


def as_float32(values):
    """Half precision widened to float32, in which scores are computed under any policy."""
    return tf.cast(values, tf.float32) if values.dtype.size < 4 else values


class TaskLoss(typing.NamedTuple):
    """Loss and score regularizer of one task, both scalars."""

    loss: tf.Tensor
    regularizer: tf.Tensor


class MixtureLoss(typing.NamedTuple):
    """The same of a task whose antecedents are mixtures, and how the components share it."""

    loss: tf.Tensor
    regularizer: tf.Tensor
    figures: MixtureFigures


def nce_loss(antecedents, consequents, clip, regularization, block="auto", compiled=False):
    """The NCE loss of one task in one direction, and its score regularizer (section 3.3).

    Args:
        antecedents: [B, D].
        consequents: [B, S, D].
        clip: c, or 0 for no clipping.
        regularization: λ; the regularizer uses the scores before clipping.
        block: how many images have their scores in memory at a time (`block_rows`).
        compiled: whether XLA compiles this.

    In blocks, only the sum of both scalars has a gradient.
    """

    def losses_of_rows(scores, offset):
        log_probabilities, _ = nce_log_probabilities(soft_clip(scores, clip), offset)  # [r, S]
        share = _share_of(scores)
        return (
            plain_share(log_probabilities, share),
            share * regularization * mean_square(scores),
        )

    return TaskLoss(*_in_blocks(losses_of_rows, antecedents, consequents, block, compiled))


def plain_share(log_probabilities, share):
    """The loss of some images, as their share of the batch's mean. log_probabilities: [r, S]."""
    return -share * tf.reduce_mean(log_probabilities)


def mixture_loss(
    antecedents, consequents, clip, regularization, temperature, block="auto", compiled=False
):
    """The loss of one task in one direction whose antecedents are mixtures (section 3.7).

    Args:
        antecedents: [B, K, D].
        consequents: [B, S, D].
        clip, regularization: as in `nce_loss`; the regularizer is the mean over the components.
        temperature: τ of the mixture.
        block, compiled: as in `nce_loss`.
    """
    K = antecedents.shape[1]

    def losses_of_rows(scores, offset):
        log_probabilities = tf.stack(
            [
                nce_log_probabilities(soft_clip(scores[:, component], clip), offset)[0]
                for component in range(K)
            ],
            axis=1,
        )  # [r, K, S]
        share = _share_of(scores)
        loss, figures = mixture_share(log_probabilities, share, temperature)
        regularizer = share * regularization * mean_square(scores)
        return loss, regularizer, figures.entropy, *tf.unstack(figures.usage)

    loss, regularizer, entropy, *usage = _in_blocks(
        losses_of_rows, antecedents, consequents, block, compiled
    )
    return MixtureLoss(loss, regularizer, MixtureFigures(tf.stack(usage), entropy))


def mixture_share(log_probabilities, share, temperature):
    """The mixture's loss of some images, as their share of the batch's mean, and its figures.

    Args:
        log_probabilities: [r, K, S].
        share: the part of the batch that these images are.
        temperature: τ.
    """
    figures = mixture_figures(log_probabilities, temperature)  # without a gradient
    loss = -share * tf.reduce_mean(mixture_objective(log_probabilities, temperature))
    return loss, MixtureFigures(share * figures.usage, share * figures.entropy)


def _share_of(scores):
    """The part of a mean over all images that these rows have. scores: [r, ..., B, S]."""
    rows, batch = scores.shape[0], scores.shape[-2]
    return 1.0 if rows == batch else rows / batch


def _in_blocks(losses_of_rows, antecedents, consequents, block, compiled):
    """The scalars that `losses_of_rows` gives for all antecedents, some of them at a time."""
    batch = consequents.shape[0]
    if batch is not None and batch < 2:
        raise ValueError(
            "NCE takes its negatives from the other images of the batch: expected at least 2 "
            f"images. Received: a batch of {batch}."
        )
    antecedents, consequents = as_float32(antecedents), as_float32(consequents)
    rows, components = antecedents.shape[0], antecedents.shape[1:-1]
    size = block_rows(block, rows, consequents.shape, *components)
    if size != rows:
        return blocked_losses(losses_of_rows, antecedents, consequents, size, compiled)
    flat = tf.reshape(antecedents, [-1, antecedents.shape[-1]])  # [A·K, D]
    scores = scaled_scores(flat, consequents)  # [A·K, B, S]
    if components:
        scores = tf.reshape(scores, [-1, *components, *scores.shape[1:]])  # [A, K, B, S]
    return losses_of_rows(scores, 0)


def antecedents_of(embedding, locations):
    """One vector per image: φ1 as it is, or φn at the given location.

    Args:
        embedding: [B, D] or [B, H, W, D].
        locations: [B], row-major in 0 .. H·W − 1; not used for φ1.
    """
    if embedding.shape.rank == 2:
        return embedding
    return tf.gather(flat_locations(embedding), locations, axis=1, batch_dims=1)  # [B, D]


def flat_locations(embedding):
    """All locations of an embedding in row-major order, [B, S, D].

    Args:
        embedding: [B, D], [B, H, W, D], or [B, S, D], which stays.
    """
    if embedding.shape.rank == 2:
        return embedding[:, None]
    if embedding.shape.rank == 3:
        return embedding
    _, H, W, D = embedding.shape
    return tf.reshape(embedding, [-1, H * W, D])


def multiscale_losses(
    tasks, view1, view2, locations1, locations2, clip, regularization,
    block="auto", compiled=False, mixtures=(), temperature=1.0,
):  # fmt: skip
    """Losses of all tasks n→m, both directions averaged (paper section 3.5).

    Args:
        tasks: names such as "1to5".
        view1, view2: embeddings of the two views by scale, {1: [B, D], 5: [B, 5, 5, D], ...}.
        locations1, locations2: {n: [B]}, the location drawn in each view for tasks with a local
            antecedent of scale n.
        clip, regularization: as in `nce_loss`.
        block, compiled: as in `nce_loss`.
        mixtures: for each view the components [B, K, D] that take the place of φ1 as antecedent;
            nothing where there is no mixture.
        temperature: τ of the mixture.

    Returns:
        Task name -> TaskLoss, or MixtureLoss where components are the antecedent.
    """
    losses, previous = collections.defaultdict(list), []
    for task, compute in _directions(
        tasks, view1, view2, locations1, locations2, clip, regularization, block, compiled,
        mixtures, temperature,
    ):  # fmt: skip
        # One after the other: of those that run side by side, each holds scores of its own.
        with tf.control_dependencies(previous):
            losses[task].append(compute())
        previous = [losses[task][-1].loss]
    return _averaged(losses)


def multiscale_gradients(
    tasks, view1, view2, locations1, locations2, clip, regularization,
    block="auto", compiled=False, mixtures=(), temperature=1.0, scale=1.0, side_by_side=False,
):  # fmt: skip
    """The same losses, and the gradient of their sum with respect to views and mixtures.

    Each task adds its gradient to that of the ones before, and only then the next begins: no more
    than one gradient exists beside the sum. So do the two directions of a task, unless they are
    computed side by side.

    Args:
        scale: a factor of the gradient, not of the losses.
        side_by_side: let both directions of a task be computed at the same time where their scores
            are small enough for one block.

    Returns:
        (what `multiscale_losses` gives, the gradient as (view1, view2, mixtures)).
    """
    given = (view1, view2, tuple(mixtures))
    leaves = tf.nest.flatten(given)
    lanes = 2 if side_by_side and _fits_one_block(tasks, view1, mixtures, block) else 1
    losses = collections.defaultdict(list)
    sums, previous = [[None] * len(leaves)] * lanes, [[]] * lanes
    for number, (task, compute) in enumerate(
        _directions(
            tasks, view1, view2, locations1, locations2, clip, regularization, block, compiled,
            mixtures, temperature,
        )
    ):  # fmt: skip
        lane = number % lanes
        with tf.control_dependencies(previous[lane]):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(leaves)
                result = compute()
                total = (result.loss + result.regularizer) * (scale / 2)
            sums[lane] = _added(sums[lane], tape.gradient(total, leaves))
        previous[lane] = [gradient for gradient in sums[lane] if gradient is not None]
        losses[task].append(result)
    # φ1 has no gradient where a mixture takes its place.
    gradients = [
        tf.zeros_like(leaf) if gradient is None else gradient
        for gradient, leaf in zip(functools.reduce(_added, sums), leaves, strict=True)
    ]
    return _averaged(losses), tf.nest.pack_sequence_as(given, gradients)


def _added(gradients, more):
    """Their sums, in which None stands for zero."""
    return [
        b if a is None else a if b is None else a + b for a, b in zip(gradients, more, strict=True)
    ]


def _fits_one_block(tasks, view, mixtures, block) -> bool:
    """Whether no task's scores are computed in several blocks."""
    components = mixtures[0].shape[1] if mixtures else 1
    shapes = [flat_locations(view[parse_task(task)[1]]).shape for task in tasks]
    return all(block_rows(block, shape[0], shape, components) == shape[0] for shape in shapes)


def _directions(
    tasks, view1, view2, locations1, locations2, clip, regularization, block, compiled, mixtures,
    temperature,
):  # fmt: skip
    """(task, function that computes its loss) for both directions of each task."""

    def one_direction(n, m, source, target, locations, components):
        consequents = flat_locations(target[m])
        if n == 1 and components is not None:
            return mixture_loss(
                components, consequents, clip, regularization, temperature, block, compiled
            )
        antecedents = antecedents_of(source[n], locations.get(n))
        return nce_loss(antecedents, consequents, clip, regularization, block, compiled)

    components1, components2 = mixtures or (None, None)
    for task in tasks:
        n, m = parse_task(task)
        yield task, lambda n=n, m=m: one_direction(n, m, view1, view2, locations1, components1)
        yield task, lambda n=n, m=m: one_direction(n, m, view2, view1, locations2, components2)


def _averaged(losses):
    """{task: the mean of its two directions}."""
    return {
        task: tf.nest.map_structure(lambda a, b: (a + b) / 2, *directions)
        for task, directions in losses.items()
    }
