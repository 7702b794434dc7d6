"""One step of optimization, on one device or on one of many replicas.

Embeddings first, then the NCE and its gradient with respect to them, then the encoder's gradient.
In the second, replicas communicate, so that negatives come from the global batch (replica_nce.py);
what lies between the communications can be compiled. What a replica computes is its share of the
global loss: gradients, logs and statistics add up.
"""

from __future__ import annotations

import typing

import tensorflow as tf

from amdim_tf import batch_norm, microbatches, replicas, winograd
from amdim_tf.classifiers import classification_loss
from amdim_tf.config import DistributionConfig
from amdim_tf.mixture_watch import mixture_logs
from amdim_tf.nce import flat_locations, multiscale_gradients
from amdim_tf.replica_nce import ReplicaNCE

if typing.TYPE_CHECKING:
    from amdim_tf.model import AMDIM

# Keys that keep the step's random draws apart.
LOCATION_KEY, DROPOUT_KEY = 1, 2


class Embedded(typing.NamedTuple):
    """What the NCE takes of some images."""

    views: tuple  # {scale: embeddings} of each view
    mixtures: tuple  # components [b, K, D] of each view; () without a mixture


class Forward(typing.NamedTuple):
    """What a pass over some images gives."""

    embedded: Embedded
    classifier_loss: tf.Tensor
    logs: dict[str, tf.Tensor]
    moments: dict[str, tf.Tensor]


class Backward(typing.NamedTuple):
    """What is summed over replicas, and the mixture's next negatives, on all of them the same."""

    gradients: list[tf.Tensor]
    logs: dict[str, tf.Tensor]
    moments: dict[str, tf.Tensor]
    negatives: tf.Tensor | None


class TrainingStep:
    """Makes steps with a model.

    Args:
        model: with its optimizer in place when a step is made.
        settings: how the step is divided.
        compiled: XLA compiles the step, or its islands.
        islands: compile the passes and the NCE each on its own, which is what XLA can do where
            replicas communicate in between.
    """

    def __init__(
        self, model: AMDIM, settings: DistributionConfig, compiled: bool = False, islands=False
    ):
        self._model, self._settings, self._compiled = model, settings, compiled
        self._whole = compiled and not islands
        # Without XLA: there an operation keeps several cores busy less well than several operations
        # do, and some convolutions gain by fewer multiplications.
        self._on_cpu = not compiled and not tf.config.list_physical_devices("GPU")
        self._synchronized = settings.batch_norm == "synchronized"
        self.forward = self._forward
        # Synchronized batch norm communicates within the pass.
        if islands and not self._synchronized:
            self.forward = tf.function(self.forward, jit_compile=True, autograph=False)
        self.replica_nce = ReplicaNCE(model.settings, settings.nce_block, compiled, islands)

    def __call__(self, data, drawn=None) -> dict[str, tf.Tensor]:
        """One step on this replica's images; returns named scalars, the same on all replicas.

        `drawn` is what `draw` gives, for a step that is compiled as a whole: XLA draws other
        numbers from the same seed.

        Where the loss or the gradient is not finite, `nonfinite` is 1 and the step is counted, but
        weights, statistics and optimizer stay as they were. A gradient that float16 could not hold
        is not counted in `nonfinite` but halves the loss scale.
        """
        optimizer = self._model.optimizer
        scale = None if optimizer.scale is None else tf.convert_to_tensor(optimizer.scale)
        images = data["view1"].shape[0]
        drawn = self.draw(images) if drawn is None else drawn
        data = {**{name: data[name] for name in ("view1", "view2", "label")}, **drawn}
        most = self._settings.microbatch
        if most and most < images:
            size = microbatches.size_of(images, most)
            backward = self._backward_in_microbatches(data, scale, size)
        else:
            backward = self._backward(data, scale)
        gradients, logs, moments = replicas.summed(tuple(backward[:3]))
        if scale is not None:
            gradients = [gradient / scale for gradient in gradients]
        moments = {name: value / replicas.count() for name, value in moments.items()}
        total = logs.pop("total")
        logs["gradient_norm"] = tf.linalg.global_norm(gradients)
        logs["learning_rate"] = tf.cast(optimizer.learning_rate, tf.float32)
        finite = tf.math.is_finite(total) & tf.math.is_finite(logs["gradient_norm"])
        overflow = tf.constant(False)
        if scale is not None:
            overflow = ~finite & tf.math.is_finite(total) & (scale > 1)
            logs |= {"loss_scale": scale, "overflow": tf.cast(overflow, tf.float32)}
        logs["nonfinite"] = tf.cast(~(finite | overflow), tf.float32)
        replicas.together(self._finish, gradients, moments, backward.negatives, finite, overflow)
        return logs

    def draw(self, images: int):
        """Locations and dropout noise for this replica's images in the next step.

        They are drawn for the global batch and cut, so that they depend on an image's place in it
        and not on the number of replicas.

        Returns:
            {"locations": {n: ([b], [b])}, "noise": ([b, …], [b, …])}, one of each per view.
        """
        model, batch = self._model, images * replicas.count()
        step, begin = model.optimizer.iterations.value, replicas.first_image(images)

        def own(values, axis):
            if batch == images:
                return values
            return tf.gather(values, begin + tf.range(images), axis=axis)

        locations = {n: own(drawn, 1) for n, drawn in model.draw_locations(batch, step).items()}
        drawn = {"locations": {n: (both[0], both[1]) for n, both in locations.items()}}
        if model.classes:
            width = model.settings.n_rkhs + model.mlp.hidden
            noise = model.draw([2 * batch, width], step, DROPOUT_KEY)
            noise = own(tf.reshape(noise, [2, batch, width]), 1)  # [2, b, …]
            drawn["noise"] = (noise[0], noise[1])
        return drawn

    def embed(self, view1, view2):
        """Both views through encoder and embeddings: what the NCE takes, and f1 [2b, D].

        As two passes that can be computed side by side, or as one, in which groups keep their
        batch statistics apart. Replicas make one: synchronized batch norm communicates within it.
        """
        model = self._model
        apart = self._on_cpu and replicas.count() == 1
        passes = [view1, view2] if apart else [tf.concat([view1, view2], axis=0)]  # [2b, S, S, 3]
        views, mixtures, f1 = [], [], []
        for images in passes:
            groups = 2 // len(passes)
            features = model.encoder(images, training=True, groups=groups)
            embeddings = model.embed(features, model.scales, training=True, groups=groups)
            parts = {scale: tf.split(value, groups) for scale, value in embeddings.items()}
            views += [{scale: part[i] for scale, part in parts.items()} for i in range(groups)]
            if model.mixture is not None:
                mixtures += tf.split(model.mixture(features["f1"]), groups)
            f1.append(features["f1"])
        return Embedded(tuple(views), tuple(mixtures)), tf.concat(f1, axis=0)

    def _forward(self, data, labelled) -> Forward:
        """A pass over some of a replica's images, with the classifiers' share of their loss.

        Args:
            data: view1, view2, label, and noise as `draw` gives it.
            labelled: views in the global batch that have a label.
        """
        model = self._model
        loss, logs = tf.constant(0.0), {}
        with (
            batch_norm.collected(self._synchronized) as collector,
            winograd.allowed(self._on_cpu),
        ):
            embedded, f1 = self.embed(data["view1"], data["view2"])
            if model.classes:
                labels = tf.concat([data["label"], data["label"]], axis=0)  # [2b]
                noise = tf.concat(data["noise"], axis=0)  # [2b, …]
                loss, logs = classifier_losses(
                    model.classify(f1, noise, training=True), labels, labelled
                )
        return Forward(embedded, loss, logs, collector.moments)

    def _backward(self, data, scale) -> Backward:
        """Gradients by one pass over all of this replica's images."""
        labelled = self._labelled(data["label"])
        with tf.GradientTape() as tape:
            passed = self.forward(_of_pass(data), labelled)
            classifier_loss = scaled(passed.classifier_loss, scale)
        logs, upstream = self._nce(passed.embedded, data["locations"], scale)
        gradients = self._encoder_gradients(tape, passed.embedded, classifier_loss, upstream)
        logs["total"] += passed.classifier_loss
        negatives = self._negatives_in(passed.embedded)
        return Backward(gradients, logs | passed.logs, passed.moments, negatives)

    def _backward_in_microbatches(self, data, scale, size: int) -> Backward:
        """The same with the activations of `size` images in memory at a time."""
        labelled, images = self._labelled(data["label"]), data["view1"].shape[0]
        count = images // size

        def embed(number):
            return self.forward(microbatches.rows(_of_pass(data), number, size), labelled).embedded

        embedded = microbatches.stacked(embed, count, self._whole)
        logs, upstream = self._nce(embedded, data["locations"], scale)
        # Else the first of the passes with a tape would begin, and hold its activations, before
        # there is a gradient to send through it.
        with tf.control_dependencies(tf.nest.flatten(upstream)):
            again = tf.nest.map_structure(tf.identity, _of_pass(data))

        def run_again(number):
            part, of_part = microbatches.rows((again, upstream), number, size)
            with tf.GradientTape() as tape:
                passed = self.forward(part, labelled)
                classifier_loss = scaled(passed.classifier_loss, scale)
            gradients = self._encoder_gradients(tape, passed.embedded, classifier_loss, of_part)
            return gradients, passed.classifier_loss, passed.logs, passed.moments

        gradients, loss, more, moments = microbatches.summed(run_again, count)
        logs["total"] += loss
        moments = {name: value / count for name, value in moments.items()}
        return Backward(gradients, logs | more, moments, self._negatives_in(embedded))

    def _encoder_gradients(self, tape, embedded, classifier_loss, upstream):
        """Gradients of all trained variables, given that of the NCE for the embeddings."""
        targets, upstream = tf.nest.flatten(embedded), tf.nest.flatten(upstream)
        if self._model.classes:
            targets, upstream = [*targets, classifier_loss], [*upstream, tf.constant(1.0)]
        variables = [variable.value for variable in self._model.trained_variables()]
        return tape.gradient(targets, variables, output_gradients=upstream)

    def _labelled(self, labels):
        """Views in the global batch that have a label."""
        return replicas.summed(2 * tf.reduce_sum(tf.cast(labels >= 0, tf.float32)))

    def _nce(self, embedded: Embedded, locations, scale):
        """The NCE of this replica's images: logs, and the gradient with respect to `embedded`."""
        if replicas.count() > 1:
            tasks, gradient = self._nce_of_replicas(embedded, locations, scale)
        else:
            tasks, gradient = self._nce_of_one(embedded, locations, scale)
        logs = {f"loss_{task}": result.loss for task, result in tasks.items()}
        logs["regularizer"] = tf.add_n([result.regularizer for result in tasks.values()])
        logs["loss"] = tf.add_n([result.loss for result in tasks.values()])
        logs["total"] = logs["loss"] + logs["regularizer"]
        return logs | mixture_logs(tasks), gradient

    def _nce_of_replicas(self, embedded: Embedded, locations, scale):
        """Losses of all tasks, as this replica's share of the global batch's, and the gradient."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(tf.nest.flatten(embedded))
            tasks = self.replica_nce(*embedded, locations)
            parts = [part for result in tasks.values() for part in result[:2]]
            total = scaled(tf.add_n(parts), scale)
        # φ1 has no gradient where a mixture takes its place.
        zero = tf.UnconnectedGradients.ZERO
        return tasks, tape.gradient(total, embedded, unconnected_gradients=zero)

    def _nce_of_one(self, embedded: Embedded, locations, scale):
        """The same where this replica has the whole batch."""
        settings = self._model.settings
        tasks, (*views, mixtures) = multiscale_gradients(
            settings.tasks,
            *embedded.views,
            *({n: drawn[view] for n, drawn in locations.items()} for view in (0, 1)),
            settings.score_clip,
            settings.score_regularization,
            self._settings.nce_block,
            self._compiled,
            embedded.mixtures,
            settings.mixture_temperature,
            1.0 if scale is None else scale,
            self._on_cpu,
        )
        return tasks, Embedded(tuple(views), mixtures)

    def _negatives_in(self, embedded: Embedded):
        """What a mixture keeps of the global batch; None without one."""
        mixture = self._model.mixture
        if mixture is None:
            return None
        local = flat_locations(embedded.views[1][7])  # [b, S, D]
        images = local.shape[0]
        batch, offset = images * replicas.count(), replicas.first_image(images)
        return replicas.summed(mixture.choose_negatives(local, batch, offset))

    def _finish(self, strategy, gradients, moments, negatives, finite, overflow) -> None:
        """Updates weights and statistics, or withholds the step, for all replicas at once."""

        def local(values):
            """One replica's value: by now they are all the same."""
            return tf.nest.map_structure(
                lambda value: strategy.experimental_local_results(value)[0], values
            )

        model, moments, negatives = self._model, local(moments), local(negatives)

        def update():
            model.optimizer.update_all(strategy, gradients, model.trained_variables())
            for name, layer in model.norms().items():
                if name in moments:
                    layer.move(moments[name][0], moments[name][1])
            if negatives is not None:
                model.mixture.negatives.assign(negatives)

        tf.cond(local(finite), update, lambda: model.optimizer.withhold(local(overflow)))


def _of_pass(data):
    """What `forward` needs of a step's data."""
    return {name: value for name, value in data.items() if name != "locations"}


def scaled(loss, scale):
    """The loss times its scale, if it has one."""
    return loss if scale is None else loss * scale


def classifier_losses(logits, labels, labelled):
    """The share that some images have in the loss of both classifiers, and their logs.

    Args:
        logits: {name: [N, classes]}.
        labels: [N].
        labelled: how many views of the global batch have a label.
    """
    total, logs = 0.0, {}
    for name, values in logits.items():
        loss, correct, count = classification_loss(values, labels, labelled)
        total += loss
        logs |= {f"{name}_loss": loss, f"{name}_correct": correct, "labelled": count}
    return total, logs
