"""The NCE of a global batch whose images are spread over replicas.

Antecedents travel, consequents stay. An image has one antecedent in a task, or a few components of
a mixture, but up to 49 consequents: each replica scores the antecedents of all images against the
consequents of its own, and the sums over negatives that come of it are put together. So what is
communicated, and what a replica keeps of the others' embeddings, is some dozens of times less than
the consequents themselves.
"""

from __future__ import annotations

import tensorflow as tf

from amdim_tf import replicas
from amdim_tf.blocked_nce import block_rows, blocked_sums
from amdim_tf.config import ModelConfig, parse_task
from amdim_tf.nce import (
    MixtureLoss,
    TaskLoss,
    antecedents_of,
    as_float32,
    flat_locations,
    mixture_share,
    plain_share,
    scaled_scores,
    soft_clip,
)  # fmt: skip


class ReplicaNCE:
    """Losses of one replica's images, with negatives from all of them.

    Args:
        settings: tasks, clipping, regularization and temperature.
        block: how many images have their scores in memory at a time (`block_rows`).
        compiled: whether XLA compiles this.
        islands: compile what lies between the communications, each on its own.
    """

    def __init__(self, settings: ModelConfig, block: str, compiled: bool, islands: bool):
        self._settings, self._block, self._compiled = settings, block, compiled
        # (task, n, m, view of the antecedent, view of the consequents)
        self._directions = [
            (task, *parse_task(task), view, 1 - view) for task in settings.tasks for view in (0, 1)
        ]
        self.sums, self.losses = self._sums, self._losses
        if islands:
            self.sums = tf.function(self._sums, jit_compile=True, autograph=False)
            self.losses = tf.function(self._losses, jit_compile=True, autograph=False)

    def __call__(self, views, mixtures, locations) -> dict[str, TaskLoss | MixtureLoss]:
        """The share that this replica's images have in the loss of each task; differentiable.

        Args:
            views: {n: [b, …, D]} of each view.
            mixtures: components [b, K, D] of each view, or ().
            locations: {n: ([b], [b])}.
        """
        antecedents = self.antecedents(views, mixtures, locations)
        consequents = self.consequents(views)
        images = tf.nest.flatten(antecedents)[0].shape[0]
        joined = tf.concat(list(antecedents.values()), axis=1)  # [b, L, D]
        widths = [values.shape[1] for values in antecedents.values()]
        parts = tf.split(replicas.gathered(joined), widths, axis=1)
        everyone = dict(zip(antecedents, parts, strict=True))  # [B, K, D] each
        log_sums, squares = self.sums(everyone, consequents, replicas.first_image(images))
        of_replicas = replicas.gathered(log_sums[None])  # [R, B, T]
        log_negatives = tf.reduce_logsumexp(of_replicas, axis=0)  # [B, T]
        own = replicas.own_rows(log_negatives, images)  # [b, T]
        return self.losses(antecedents, consequents, own, squares)

    def antecedents(self, views, mixtures, locations):
        """{"n/view": [b, K, D]}, in float32, each once however many tasks it has."""
        found = {}
        for _, n, _, view, _ in self._directions:
            if n == 1 and mixtures:
                vectors = mixtures[view]
            else:
                vectors = antecedents_of(views[view][n], locations.get(n, (None, None))[view])
                vectors = vectors[:, None]
            found[f"{n}/{view}"] = as_float32(vectors)
        return found

    def consequents(self, views):
        """{"m/view": [b, S, D]}, in float32."""
        return {
            f"{m}/{view}": as_float32(flat_locations(views[view][m]))
            for _, _, m, _, view in self._directions
        }

    def _sums(self, antecedents, consequents, offset):
        """What this replica's consequents give to every image's sums over negatives.

        Args:
            antecedents: {"n/view": [B, K, D]}, of all images.
            consequents: {"m/view": [b, S, D]}, of this replica's.
            offset: place of the first of these in the global batch.

        Returns:
            (logs of the sums [B, T], one for each direction and component; sums of the squared
            scores, one for each direction).
        """
        clip, columns, squares = self._settings.score_clip, [], []
        for _, n, m, view, other in self._directions:
            log_sums, square = negative_sums(
                antecedents[f"{n}/{view}"], consequents[f"{m}/{other}"], clip, offset, self._block,
                self._compiled,
            )  # fmt: skip
            columns.append(log_sums)
            squares.append(square)
        return tf.concat(columns, axis=1), squares

    def _losses(self, antecedents, consequents, log_negatives, squares):
        """The losses, from complete sums.

        Args:
            antecedents, consequents: as `_sums` takes them, but both of this replica's images.
            log_negatives: [b, T].
            squares: as `_sums` gives them.
        """
        settings, replica_count = self._settings, replicas.count()
        found, column = {}, 0
        for (task, n, m, view, other), square in zip(self._directions, squares, strict=True):
            vectors, targets = antecedents[f"{n}/{view}"], consequents[f"{m}/{other}"]
            b, K, D = vectors.shape
            scores = tf.matmul(vectors, targets, transpose_b=True) * D**-0.5  # [b, K, S]
            logs = log_negatives[:, column : column + K, None]  # [b, K, 1]
            column += K
            log_probabilities = -tf.nn.softplus(logs - soft_clip(scores, settings.score_clip))
            count = K * (replica_count * b) ** 2 * targets.shape[1]
            regularizer = settings.score_regularization * square / count
            if n == 1 and settings.mixture_components:
                loss, figures = mixture_share(
                    log_probabilities, 1 / replica_count, settings.mixture_temperature
                )
                result = MixtureLoss(loss, regularizer, figures)
            else:
                loss = plain_share(log_probabilities[:, 0], 1 / replica_count)
                result = TaskLoss(loss, regularizer)
            found.setdefault(task, []).append(result)
        return {
            task: tf.nest.map_structure(lambda a, b: (a + b) / 2, *both)
            for task, both in found.items()
        }


def negative_sums(antecedents, consequents, clip, offset, block="auto", compiled=False):
    """Log of Σ exp of the clipped scores of an antecedent with the consequents of other images.

    Args:
        antecedents: float32 [B, K, D], of all images.
        consequents: float32 [b, S, D], of the images from `offset` on.
        clip: c, or 0 for no clipping.
        offset: see above.
        block, compiled: as in `nce.nce_loss`.

    Returns:
        ([B, K], the sum of all squared scores before clipping). Where there is no other image, the
        logarithm is the least number there is.
    """
    B, K, D = antecedents.shape

    def sums_of_rows(scores, start):
        """scores: [r, K, b, S], of the images from `start` on."""
        place = tf.range(scores.shape[0]) + start - offset  # in this replica, or outside of it
        own = tf.one_hot(place, scores.shape[2], on_value=True, off_value=False)  # [r, b]
        others = tf.where(own[:, None, :, None], scores.dtype.min, soft_clip(scores, clip))
        return tf.reduce_logsumexp(others, axis=[2, 3]), 2 * tf.nn.l2_loss(scores)

    size = block_rows(block, B, consequents.shape, K)
    if size != B:
        return blocked_sums(sums_of_rows, antecedents, consequents, size, compiled)
    scores = scaled_scores(tf.reshape(antecedents, [B * K, D]), consequents)  # [B·K, b, S]
    return sums_of_rows(tf.reshape(scores, [B, K, *scores.shape[1:]]), 0)
