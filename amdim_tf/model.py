"""AMDIM as a keras.Model: encode, and one training step."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf import views
from amdim_tf.classifiers import LinearClassifier, MLPClassifier, classification_loss
from amdim_tf.config import SCALES, Config, parse_task, top_channels
from amdim_tf.embeddings import Embedding
from amdim_tf.encoder import Encoder
from amdim_tf.mixture import Mixture, image_posteriors
from amdim_tf.nce import MixtureLoss, multiscale_losses

# Keys that keep the step's random draws apart.
_LOCATION_KEY, _DROPOUT_KEY = 1, 2


def _mixture_logs(tasks) -> dict:
    """Objective, posterior entropy and usage of each component, means over the mixture's tasks."""
    mixed = [result for result in tasks.values() if isinstance(result, MixtureLoss)]
    if not mixed:
        return {}
    usage = tf.add_n([result.figures.usage for result in mixed]) / len(mixed)  # [K]
    return {
        "mixture_objective": -tf.add_n([result.loss for result in mixed]) / len(mixed),
        "mixture_entropy": tf.add_n([result.figures.entropy for result in mixed]) / len(mixed),
        **{f"mixture_usage_{number}": share for number, share in enumerate(tf.unstack(usage))},
    }


def _is_floating(images) -> bool:
    return tf.as_dtype(images.dtype).is_floating


class AMDIM(keras.Model):
    """Encoder, embeddings, and the classifiers that are trained beside them.

    Args:
        config: the run's settings.
        classes: number of classes of the data set; 0 for unlabelled data, which leaves out the
            online classifiers.
    """

    def __init__(self, config: Config, classes: int = 0, **kwargs):
        # A fixed name, since the names of the weights in a checkpoint begin with it.
        super().__init__(name="amdim", **kwargs)
        settings, size = config.model, config.data.image_size
        self.settings = settings
        self.view_settings = config.views
        self.image_size = size
        self.classes = classes
        self.seed = config.training.seed
        # The scales that the tasks use, as antecedent or as consequent.
        self.scales = sorted({n for task in settings.tasks for n in parse_task(task)})
        self.encoder = Encoder(
            size, settings.ndf, settings.n_rkhs, settings.n_depth, settings.use_bn, name="encoder"
        )
        self.embedding5 = Embedding(settings.n_rkhs, settings.use_bn, name="embedding5")
        self.embedding7 = Embedding(settings.n_rkhs, settings.use_bn, name="embedding7")
        components = settings.mixture_components
        self.mixture = Mixture(components, name="mixture") if components else None
        # Negatives of an image in a training batch, in the task 1to7.
        self._negatives = (config.training.batch_size - 1) * 49
        self.linear = LinearClassifier(classes, name="linear") if classes else None
        self.mlp = MLPClassifier(classes, name="mlp") if classes else None
        self.build()

    def build(self, input_shape=None):
        """Creates every weight; the shapes follow from the settings alone."""
        channels = top_channels(self.image_size, self.settings.ndf)
        self.encoder.build((None, self.image_size, self.image_size, 3))
        self.embedding5.build((None, 5, 5, channels))
        self.embedding7.build((None, 7, 7, channels))
        if self.mixture is not None:
            self.mixture.build((None, self.settings.n_rkhs))
        if self.classes:
            self.linear.build((None, self.settings.n_rkhs))
            self.mlp.build((None, self.settings.n_rkhs))
        self.built = True

    def encode(self, images, training=False):
        """Features and embeddings of normalized images.

        Args:
            images: float32 [N, S, S, 3].
            training: normalize by the batch's own statistics, and update the running ones.

        Returns:
            f1 [N, D]; f5 [N, 5, 5, C] and f7 [N, 7, 7, C], the maps before embedding; phi1 [N, D],
            phi5 [N, 5, 5, D], phi7 [N, 7, 7, D].
        """
        shape, size = tuple(images.shape), self.image_size
        if len(shape) != 4 or shape[1:] != (size, size, 3) or not _is_floating(images):
            raise ValueError(
                f"encode expects normalized float images [N, {size}, {size}, 3]; `preprocess` "
                f"makes them of uint8 images. Received: shape {shape}, dtype {images.dtype}."
            )
        features = self.encoder(images, training=training)
        embeddings = self.embed(features, SCALES, training=training)
        return {**features, **{f"phi{scale}": value for scale, value in embeddings.items()}}

    def posterior(self, f1, phi7):
        """The share of each mixture component in each location of φ7 (paper section 3.7).

        Args:
            f1: [N, D], of one view of each image.
            phi7: [N, 7, 7, D], of the other; or of the same.

        Returns:
            float32 [N, 7, 7, K]; sums to 1 over K.
        """
        return image_posteriors(
            tf.cast(self.mixture(f1), tf.float32),
            tf.cast(phi7, tf.float32),
            self.mixture.negatives.value,
            self._negatives,
            self.settings.score_clip,
            self.settings.mixture_temperature,
        )

    def preprocess(self, images):
        """The evaluation view of uint8 images [N, H, W, 3] of any size: what `encode` takes."""
        return views.evaluation_view(self.view_settings, images, self.image_size)

    def call(self, images, training=False):
        """The same as `encode`."""
        return self.encode(images, training=training)

    def embed(self, features, scales, training=False, groups=1):
        """The embeddings {scale: φ} of the encoder's features, for the given scales only."""
        embedding = {
            1: lambda: features["f1"],
            5: lambda: self.embedding5(features["f5"], training=training, groups=groups),
            7: lambda: self.embedding7(features["f7"], training=training, groups=groups),
        }
        return {scale: embedding[scale]() for scale in scales}

    def classify(self, f1, noise=None, training=False):
        """Logits {"linear", "mlp"} of the online classifiers; no gradient reaches f1."""
        f1 = tf.stop_gradient(f1)
        return {"linear": self.linear(f1), "mlp": self.mlp(f1, noise=noise, training=training)}

    def losses_of(self, view1, view2, labels, step):
        """The self-supervised and the classification losses of one batch.

        Args:
            view1, view2: normalized images [B, S, S, 3].
            labels: int [B], −1 for unlabelled images.
            step: scalar; with the seed it determines the drawn locations and the dropout.

        Returns:
            (total, logs): the scalar to minimize and named float scalars.
        """
        B = view1.shape[0]
        # One pass for both views; groups keep their batch statistics apart.
        images = tf.concat([view1, view2], axis=0)  # [2B, S, S, 3]
        features = self.encoder(images, training=True, groups=2)
        embeddings = self.embed(features, self.scales, training=True, groups=2)
        halves = {scale: tf.split(value, 2) for scale, value in embeddings.items()}
        mixtures = None
        if self.mixture is not None:
            mixtures = tf.split(self.mixture(features["f1"]), 2)  # 2 × [B, K, D]
            self.mixture.remember(halves[7][1])
        locations = self.draw_locations(B, step)
        tasks = multiscale_losses(
            self.settings.tasks,
            {scale: half[0] for scale, half in halves.items()},
            {scale: half[1] for scale, half in halves.items()},
            {scale: drawn[0] for scale, drawn in locations.items()},
            {scale: drawn[1] for scale, drawn in locations.items()},
            self.settings.score_clip,
            self.settings.score_regularization,
            mixtures,
            self.settings.mixture_temperature,
        )
        logs = {f"loss_{task}": result.loss for task, result in tasks.items()}
        logs["regularizer"] = tf.add_n([result.regularizer for result in tasks.values()])
        logs["loss"] = tf.add_n([result.loss for result in tasks.values()])
        logs |= _mixture_logs(tasks)
        total = logs["loss"] + logs["regularizer"]
        if self.classes:
            classifier_loss, classifier_logs = self._classifier_losses(features["f1"], labels, step)
            total += classifier_loss
            logs.update(classifier_logs)
        return total, logs

    def _classifier_losses(self, f1, labels, step):
        """Loss and logs of both classifiers on both views. f1: [2B, D]; labels: [B]."""
        labels = tf.concat([labels, labels], axis=0)  # [2B]
        noise = self.draw([f1.shape[0], self.settings.n_rkhs + self.mlp.hidden], step, _DROPOUT_KEY)
        total, logs = 0.0, {}
        for name, logits in self.classify(f1, noise, training=True).items():
            loss, correct, labelled = classification_loss(logits, labels)
            total += loss
            logs |= {f"{name}_loss": loss, f"{name}_correct": correct, "labelled": labelled}
        return total, logs

    def draw(self, shape, step, key):
        """Uniform numbers that are a function of (seed, step, key) alone."""
        seed = tf.random.experimental.stateless_fold_in([self.seed, key], step)
        return tf.random.stateless_uniform(shape, seed)

    def draw_locations(self, batch, step):
        """For each local antecedent scale n: one location of the n×n map per view and image.

        Returns:
            {n: int32 [2, B]}, row-major locations, uniform (paper section 3.5).
        """
        scales = {parse_task(task)[0] for task in self.settings.tasks} - {1}
        uniform = self.draw([2, batch, max(SCALES)], step, _LOCATION_KEY)
        return {n: tf.cast(uniform[..., n - 1] * n * n, tf.int32) for n in sorted(scales)}

    def train_step(self, data):
        """One step of optimization on {"view1", "view2", "label"}; returns named scalars.

        Where the loss or the gradient is not finite, `nonfinite` is 1 and the step is counted, but
        weights, statistics and optimizer stay as they were.
        """
        step = self.optimizer.iterations.value
        statistics = [(v, tf.identity(v.value)) for v in self.non_trainable_variables]
        with tf.GradientTape() as tape:
            total, logs = self.losses_of(data["view1"], data["view2"], data["label"], step)
        trained = self.trained_variables()
        gradients = tape.gradient(total, trained)
        logs["gradient_norm"] = tf.linalg.global_norm(gradients)
        logs["learning_rate"] = tf.cast(self.optimizer.learning_rate, tf.float32)
        finite = tf.math.is_finite(total) & tf.math.is_finite(logs["gradient_norm"])
        logs["nonfinite"] = 1.0 - tf.cast(finite, tf.float32)

        def apply():
            self.optimizer.apply_gradients(zip(gradients, trained, strict=True))

        def withhold():
            for variable, before in statistics:
                variable.assign(before)
            self.optimizer.iterations.assign_add(1)

        tf.cond(finite, apply, withhold)
        return logs

    def trained_variables(self):
        """The weights that the tasks reach: an embedding that no task uses stays as it is."""
        unused = {
            id(variable)
            for scale, embedding in ((5, self.embedding5), (7, self.embedding7))
            if scale not in self.scales
            for variable in embedding.trainable_variables
        }
        return [variable for variable in self.trainable_variables if id(variable) not in unused]
