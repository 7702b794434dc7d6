"""Scores, clipping, and the noise-contrastive loss: pure functions, never below float32.

Notation of the paper's sections 3.2 and 3.3: an antecedent a has to pick its own consequents t out
of those of all images in the batch; B images, S locations of a consequent map, D channels.
"""

from __future__ import annotations

import typing

import tensorflow as tf

from amdim_tf.blocked_nce import block_rows, blocked_losses
from amdim_tf.config import parse_task


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


def nce_loss(
    antecedents, consequents, clip, regularization, offset=0, block="auto", compiled=False
):
    """The NCE loss of one task in one direction, and its score regularizer (section 3.3).

    Args:
        antecedents: [A, D]: all images of the batch, or some of them.
        consequents: [B, S, D], of all images.
        clip: c, or 0 for no clipping.
        regularization: λ; the regularizer uses the scores before clipping.
        offset: the image that antecedent 0 belongs to.
        block: how many antecedents have their scores in memory at a time (`block_rows`).
        compiled: whether XLA compiles this.

    Returns:
        The share that these antecedents have in the batch's mean: over the parts of a batch, the
        shares add up to its loss. In blocks, only the sum of both scalars has a gradient.
    """
    batch = consequents.shape[0]
    if batch is not None and batch < 2:
        raise ValueError(
            "NCE takes its negatives from the other images of the batch: expected at least 2 "
            f"images. Received: a batch of {batch}."
        )
    antecedents, consequents = _float32(antecedents), _float32(consequents)
    rows = antecedents.shape[0]

    def losses_of_rows(scores, offset):
        log_probabilities, _ = nce_log_probabilities(soft_clip(scores, clip), offset)  # [r, S]
        # The part of a mean over all rows; a mean of the rows at hand where these are all.
        share = 1.0 if scores.shape[0] == batch else scores.shape[0] / batch
        return TaskLoss(
            -share * tf.reduce_mean(log_probabilities),
            share * regularization * tf.reduce_mean(tf.square(scores)),
        )

    size = block_rows(block, rows, consequents.shape)
    if size == rows:
        return losses_of_rows(scaled_scores(antecedents, consequents), offset)  # [A, B, S]
    return TaskLoss(
        *blocked_losses(losses_of_rows, antecedents, consequents, offset, size, compiled)
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
    targets=None, offset=0, block="auto", compiled=False,
):  # fmt: skip
    """Losses of all tasks n→m, both directions averaged (paper section 3.5).

    Args:
        tasks: names such as "1to5".
        view1, view2: embeddings of the two views by scale, {1: [B, D], 5: [B, 5, 5, D], ...}.
        locations1, locations2: {n: [B]}, the location drawn in each view for tasks with a local
            antecedent of scale n.
        clip, regularization: as in `nce_loss`.
        targets: both views' embeddings of the global batch, of which view1 and view2 hold the
            images from `offset` on; None: view1 and view2 are the batch.
        offset, block, compiled: as in `nce_loss`.

    Returns:
        Task name -> TaskLoss.
    """
    targets1, targets2 = targets or (view1, view2)
    losses = {}
    for task in tasks:
        n, m = parse_task(task)
        forward, backward = (
            nce_loss(
                antecedents_of(source[n], locations.get(n)),
                flat_locations(target[m]),
                clip,
                regularization,
                offset,
                block,
                compiled,
            )
            for source, target, locations in (
                (view1, targets2, locations1),
                (view2, targets1, locations2),
            )
        )
        losses[task] = TaskLoss(
            (forward.loss + backward.loss) / 2, (forward.regularizer + backward.regularizer) / 2
        )
    return losses
