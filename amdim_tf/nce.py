"""Scores, clipping, and the noise-contrastive loss: pure functions, never below float32.

Notation of the paper's sections 3.2 and 3.3: an antecedent a has to pick its own consequents t out
of those of all images in the batch; B images, S locations of a consequent map, D channels.
"""

from __future__ import annotations

import typing

import tensorflow as tf

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


def _float32(values):
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


def nce_loss(antecedents, consequents, clip, regularization):
    """The NCE loss of one task in one direction, and its score regularizer (section 3.3).

    Args:
        antecedents: [B, D].
        consequents: [B, S, D].
        clip: c, or 0 for no clipping.
        regularization: λ; the regularizer uses the scores before clipping.
    """
    _check_batch(consequents)
    scores = scaled_scores(_float32(antecedents), _float32(consequents))  # [B, B, S]
    log_probabilities, _ = nce_log_probabilities(soft_clip(scores, clip))  # [B, S]
    return TaskLoss(
        -tf.reduce_mean(log_probabilities), regularization * tf.reduce_mean(tf.square(scores))
    )


def mixture_loss(antecedents, consequents, clip, regularization, temperature):
    """The loss of one task in one direction whose antecedents are mixtures (section 3.7).

    Args:
        antecedents: [B, K, D].
        consequents: [B, S, D].
        clip, regularization: as in `nce_loss`; the regularizer is the mean over the components.
        temperature: τ of the mixture.
    """
    _check_batch(consequents)
    # A component at a time, each as a plain antecedent: K × [B, B, S].
    scores = [
        scaled_scores(component, _float32(consequents))
        for component in tf.unstack(_float32(antecedents), axis=1)
    ]
    log_probabilities = tf.stack(
        [nce_log_probabilities(soft_clip(part, clip))[0] for part in scores], axis=1
    )  # [B, K, S]
    squares = tf.add_n([tf.reduce_mean(tf.square(part)) for part in scores]) / len(scores)
    return MixtureLoss(
        -tf.reduce_mean(mixture_objective(log_probabilities, temperature)),
        regularization * squares,
        mixture_figures(log_probabilities, temperature),
    )


def _check_batch(consequents) -> None:
    """Refuses a batch that has no negatives."""
    batch = consequents.shape[0]
    if batch is not None and batch < 2:
        raise ValueError(
            "NCE takes its negatives from the other images of the batch: expected at least 2 "
            f"images. Received: a batch of {batch}."
        )


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
    """All locations of an embedding in row-major order: [B, D] or [B, H, W, D] -> [B, S, D]."""
    if embedding.shape.rank == 2:
        return embedding[:, None]
    _, H, W, D = embedding.shape
    return tf.reshape(embedding, [-1, H * W, D])


def multiscale_losses(
    tasks,
    view1,
    view2,
    locations1,
    locations2,
    clip,
    regularization,
    mixtures=None,
    temperature=1.0,
):
    """Losses of all tasks n→m, both directions averaged (paper section 3.5).

    Args:
        tasks: names such as "1to5".
        view1, view2: embeddings of the two views by scale, {1: [B, D], 5: [B, 5, 5, D], ...}.
        locations1, locations2: {n: [B]}, the location drawn in each view for tasks with a local
            antecedent of scale n.
        clip, regularization: as in `nce_loss`.
        mixtures: None, or for each view the components [B, K, D] that take the place of φ1 as
            antecedent.
        temperature: τ of the mixture.

    Returns:
        Task name -> TaskLoss, or MixtureLoss where components are the antecedent.
    """

    def one_direction(n, m, source, target, locations, components):
        consequents = flat_locations(target[m])
        if n == 1 and components is not None:
            return mixture_loss(components, consequents, clip, regularization, temperature)
        antecedents = antecedents_of(source[n], locations.get(n))
        return nce_loss(antecedents, consequents, clip, regularization)

    components1, components2 = mixtures or (None, None)
    losses = {}
    for task in tasks:
        n, m = parse_task(task)
        forward = one_direction(n, m, view1, view2, locations1, components1)
        backward = one_direction(n, m, view2, view1, locations2, components2)
        losses[task] = tf.nest.map_structure(lambda a, b: (a + b) / 2, forward, backward)
    return losses
