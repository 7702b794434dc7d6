"""A linear classifier by a fixed recipe of Adam, for comparison with figures measured that way."""

from __future__ import annotations

import tensorflow as tf

from amdim_tf.feature_splits import Features

# Those of the figures to compare with.
_LEARNING_RATE, _WEIGHT_DECAY, _EPOCHS, _BATCH_SIZE, _SEED = 1e-3, 1e-4, 20, 500, 0


def linear_accuracy(train: Features, test: Features, classes: int) -> float:
    """Accuracy on `test` of a linear classifier trained on `train`; labels of −1 do not count.

    Features are standardized by the statistics of the training images; test images have no part in
    anything but the last count.
    """
    train, test = (
        Features(split.values[split.labels >= 0], split.labels[split.labels >= 0])
        for split in (train, test)
    )
    mean, std = train.values.mean(axis=0), train.values.std(axis=0) + 1e-6
    weights, bias = _train_linear(
        tf.constant((train.values - mean) / std), tf.constant(train.labels), classes
    )
    logits = ((test.values - mean) / std) @ weights.numpy() + bias.numpy()
    return float((logits.argmax(axis=1) == test.labels).mean())


def _train_linear(values, labels, classes):
    """Softmax regression by Adam with decoupled weight decay on the weights.

    Args:
        values: [N, D], standardized.
        labels: int [N].
        classes: K.

    Returns:
        (weights [D, K], bias [K]).
    """
    count, dimension = values.shape
    weights = tf.Variable(tf.zeros([dimension, classes]))
    bias = tf.Variable(tf.zeros([classes]))
    moments = [tf.Variable(tf.zeros_like(v)) for v in (weights, bias, weights, bias)]
    batch = min(_BATCH_SIZE, count)

    @tf.function
    def epoch(number):
        order = tf.random.experimental.stateless_shuffle(tf.range(count), seed=[_SEED, number])
        for start in tf.range(0, count - batch + 1, batch):
            step(tf.gather(values, order[start : start + batch]),
                 tf.gather(labels, order[start : start + batch]),
                 tf.cast(number * (count // batch) + start // batch + 1, tf.float32))  # fmt: skip

    def step(x, y, t):
        probabilities = tf.nn.softmax(tf.matmul(x, weights) + bias)  # [B, K]
        error = (probabilities - tf.one_hot(y, classes)) / tf.cast(tf.shape(x)[0], tf.float32)
        gradients = (tf.matmul(x, error, transpose_a=True), tf.reduce_sum(error, axis=0))
        for index, (variable, gradient) in enumerate(zip((weights, bias), gradients, strict=True)):
            first, second = moments[index], moments[index + 2]
            first.assign(0.9 * first + 0.1 * gradient)
            second.assign(0.999 * second + 0.001 * tf.square(gradient))
            scale = tf.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            variable.assign_sub(
                _LEARNING_RATE
                * (scale * first / (tf.sqrt(second) + 1e-8) + _WEIGHT_DECAY * variable)
            )

    for number in range(_EPOCHS):
        epoch(tf.constant(number))
    return weights, bias
