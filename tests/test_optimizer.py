"""CoupledAdam against a NumPy loop of PyTorch's rule; the schedule by hand."""

import keras
import numpy as np
import tensorflow as tf

from amdim_tf.config import OptimizerConfig
from amdim_tf.optimizer import CoupledAdam, WarmupMilestones, make_optimizer


def test_equals_the_references_adam():
    rng = np.random.default_rng(0)
    start = rng.standard_normal([4, 3])
    gradients = rng.standard_normal([5, 4, 3]) * np.array([1.0, 1e-6, 0.0])[None, None]
    rate, beta_1, beta_2, epsilon, l2 = 0.01, 0.8, 0.999, 1e-8, 1e-2
    expected, m, v = start.copy(), np.zeros([4, 3]), np.zeros([4, 3])
    for t, gradient in enumerate(gradients, start=1):
        gradient = gradient + l2 * expected
        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient**2
        corrected = np.sqrt(v / (1 - beta_2**t)) + epsilon
        expected -= rate * (m / (1 - beta_1**t)) / corrected
    variable = keras.Variable(start.astype(np.float32))
    optimizer = CoupledAdam(rate, beta_1, beta_2, epsilon, l2)
    for gradient in gradients:
        optimizer.apply([tf.constant(gradient, tf.float32)], [variable])
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_schedule_by_hand():
    schedule = WarmupMilestones(0.1, 4, [10, 20], 0.2)
    rates = {step: float(schedule(step)) for step in (0, 1, 3, 4, 9, 10, 19, 20, 100)}
    expected = {
        0: 0.025, 1: 0.05, 3: 0.1, 4: 0.1, 9: 0.1, 10: 0.02, 19: 0.02, 20: 0.004, 100: 0.004,
    }  # fmt: skip
    np.testing.assert_allclose(list(rates.values()), list(expected.values()), rtol=1e-5)


def test_milestones_are_epochs():
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=1.0, warmup_steps=0, milestones=(2, 3.5)), steps_per_epoch=10
    )
    schedule = optimizer._learning_rate
    rates = [float(schedule(step)) for step in (0, 19, 20, 34, 35)]
    np.testing.assert_allclose(rates, [1, 1, 0.2, 0.2, 0.04], rtol=1e-5)


def test_config_round_trip():
    optimizer = CoupledAdam(WarmupMilestones(0.1, 4, [10], 0.2), 0.7, 0.99, 1e-7, 1e-4)
    copy = CoupledAdam.from_config(optimizer.get_config())
    assert copy.get_config() == optimizer.get_config()
