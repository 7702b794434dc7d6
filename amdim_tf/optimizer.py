"""Adam as the reference uses it: L2 in the gradient, warm-up, milestones."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf.config import OptimizerConfig


@keras.saving.register_keras_serializable("amdim_tf")
class WarmupMilestones(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then a factor at each milestone.

    Args:
        learning_rate: after warm-up.
        warmup_steps: step t < warmup_steps has the rate (t + 1) / warmup_steps · learning_rate.
        milestones: steps from which one more factor applies.
        factor: applied at each milestone.
    """

    def __init__(self, learning_rate, warmup_steps, milestones, factor):
        super().__init__()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.milestones = tuple(milestones)
        self.factor = factor

    def __call__(self, step):
        """The learning rate of a step, counted from 0."""
        step = tf.cast(step, tf.float32)
        warmup = tf.minimum(1.0, (step + 1) / max(self.warmup_steps, 1))
        passed = tf.add_n([tf.cast(step >= m, tf.float32) for m in self.milestones] or [step * 0])
        return self.learning_rate * warmup * self.factor**passed

    def get_config(self):
        """The constructor's arguments."""
        return {
            "learning_rate": self.learning_rate,
            "warmup_steps": self.warmup_steps,
            "milestones": list(self.milestones),
            "factor": self.factor,
        }


@keras.saving.register_keras_serializable("amdim_tf")
class CoupledAdam(keras.optimizers.Optimizer):
    """Adam with L2 added to the gradient, and PyTorch's place for epsilon.

    Keras' own Adam decouples weight decay and adds epsilon before the bias correction of the
    second moment; the reference does neither. One fused kernel updates a variable in one pass:
    with c1 = 1 − β1^t and c2 = 1 − β2^t, lr · (m/c1) / (sqrt(v/c2) + ε) equals
    (lr·sqrt(c2)/c1) · m / (sqrt(v) + ε·sqrt(c2)), which is what the kernel computes.

    Args:
        learning_rate: number or schedule.
        beta_1, beta_2: decay of the moments.
        epsilon: added to the root of the corrected second moment.
        l2: weight of the L2 term.
    """

    def __init__(
        self, learning_rate=2e-4, beta_1=0.8, beta_2=0.999, epsilon=1e-8, l2=1e-5,
        name="coupled_adam", **kwargs,
    ):  # fmt: skip
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.l2 = l2

    def build(self, variables):
        """Creates both moments of every variable."""
        if self.built:
            return
        super().build(variables)
        self._first, self._second = self.add_optimizer_variables(variables, ["m", "v"])

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable and its moments in place."""
        index = self._get_variable_index(variable)
        step = tf.cast(self.iterations + 1, tf.float32)
        power_1, power_2 = self.beta_1**step, self.beta_2**step
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._first[index].value.handle,
            v=self._second[index].value.handle,
            beta1_power=power_1,
            beta2_power=power_2,
            lr=tf.cast(learning_rate, tf.float32),
            beta1=self.beta_1,
            beta2=self.beta_2,
            epsilon=self.epsilon * tf.sqrt(1 - power_2),
            grad=tf.cast(gradient, tf.float32) + self.l2 * variable,
        )

    def get_config(self):
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "l2": self.l2,
        }


def make_optimizer(config: OptimizerConfig, steps_per_epoch: int) -> CoupledAdam:
    """The optimizer of a run; milestones are epochs there and steps here."""
    schedule = WarmupMilestones(
        config.learning_rate,
        config.warmup_steps,
        [round(epoch * steps_per_epoch) for epoch in config.milestones],
        config.decay_factor,
    )
    return CoupledAdam(schedule, config.beta_1, config.beta_2, l2=config.weight_decay)
