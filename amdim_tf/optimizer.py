"""Adam as the reference uses it: L2 in the gradient, warm-up, milestones."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf.config import OptimizerConfig

# The loss scale of float16 at the beginning, and the steps without overflow until it doubles.
FIRST_SCALE = 2.0**15
GROWTH_STEPS = 2000


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
        scales_loss: keep a loss scale for float16, whose smallest gradients would vanish without.

    Attributes:
        scale: the number that the loss is multiplied by; None without `scales_loss`.
    """

    def __init__(
        self, learning_rate=2e-4, beta_1=0.8, beta_2=0.999, epsilon=1e-8, l2=1e-5,
        scales_loss=False, name="coupled_adam", **kwargs,
    ):  # fmt: skip
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.l2 = l2
        self.scales_loss = scales_loss
        self.scale = self._steps_at_scale = None

    def build(self, variables):
        """Creates both moments of every variable."""
        if self.built:
            return
        super().build(variables)
        self._first, self._second = self.add_optimizer_variables(variables, ["m", "v"])
        if self.scales_loss:
            first = keras.initializers.Constant(FIRST_SCALE)
            self.scale = self.add_variable((), first, name="loss_scale")
            self._steps_at_scale = self.add_variable((), "zeros", name="steps_at_scale")

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable and its moments in place."""
        index = self._get_variable_index(variable)
        moments = self._first[index].value, self._second[index].value
        self._fused_update(
            variable, gradient, *moments, tf.cast(learning_rate, tf.float32), self._corrections()
        )

    def update_all(self, strategy, gradients, variables) -> None:
        """Makes one step in cross-replica context, with gradients that are summed already.

        Args:
            strategy: TensorFlow's strategy; that of one device too.
            gradients: of the variables that the optimizer was built for, in their order.
            variables: these.
        """
        rate, corrections = tf.cast(self.learning_rate, tf.float32), self._corrections()

        def fused(variable, gradient, first, second):
            self._fused_update(variable, gradient, first, second, rate, corrections)

        moments = zip(self._first, self._second, strict=True)
        for gradient, variable, (first, second) in zip(gradients, variables, moments, strict=True):
            arguments = (gradient, first.value, second.value)
            strategy.extended.update(variable.value, fused, args=arguments, group=False)
        self.iterations.assign_add(1)
        if self.scales_loss:
            steps = self._steps_at_scale + 1
            grown = steps >= GROWTH_STEPS
            self.scale.assign(tf.where(grown, tf.minimum(self.scale * 2, 2.0**100), self.scale))
            self._steps_at_scale.assign(tf.where(grown, 0.0, steps))

    def withhold(self, overflow) -> None:
        """Counts a step that changes nothing; where its gradient overflowed, halves the scale."""
        self.iterations.assign_add(1)
        if self.scales_loss:
            self.scale.assign(tf.where(overflow, tf.maximum(self.scale / 2, 1.0), self.scale))
            self._steps_at_scale.assign(0.0)

    def _corrections(self):
        """Of the next step, for all variables: powers of both decays, and the kernel's epsilon.

        The kernel adds epsilon before it corrects the second moment, PyTorch after.
        """
        step = tf.cast(self.iterations + 1, tf.float32)
        power_1, power_2 = self.beta_1**step, self.beta_2**step
        return power_1, power_2, self.epsilon * tf.sqrt(1 - power_2)

    def _fused_update(self, variable, gradient, first, second, learning_rate, corrections):
        power_1, power_2, epsilon = corrections
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first.handle,
            v=second.handle,
            beta1_power=power_1,
            beta2_power=power_2,
            lr=learning_rate,
            beta1=self.beta_1,
            beta2=self.beta_2,
            epsilon=epsilon,
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
            "scales_loss": self.scales_loss,
        }


def make_schedule(config: OptimizerConfig, steps_per_epoch: int) -> WarmupMilestones:
    """The learning rates of a run; milestones are epochs in its settings and steps here."""
    return WarmupMilestones(
        config.learning_rate,
        config.warmup_steps,
        [round(epoch * steps_per_epoch) for epoch in config.milestones],
        config.decay_factor,
    )


def make_optimizer(
    config: OptimizerConfig, steps_per_epoch: int, scales_loss: bool = False
) -> CoupledAdam:
    """The optimizer of a run."""
    schedule = make_schedule(config, steps_per_epoch)
    return CoupledAdam(
        schedule, config.beta_1, config.beta_2, l2=config.weight_decay, scales_loss=scales_loss
    )
