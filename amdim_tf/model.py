"""AMDIM as a keras.Model: encode, and one training step."""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf import views
from amdim_tf.batch_norm import BatchNorm
from amdim_tf.classifiers import LinearClassifier, MLPClassifier
from amdim_tf.config import SCALES, Config, parse_task, top_channels
from amdim_tf.embeddings import Embedding
from amdim_tf.encoder import Encoder
from amdim_tf.mixture import Mixture, image_posteriors
from amdim_tf.training_step import LOCATION_KEY, TrainingStep


def _is_floating(images) -> bool:
    return tf.as_dtype(images.dtype).is_floating


class AMDIM(keras.Model):
    """Encoder, embeddings, and the classifiers that are trained beside them.

    Args:
        config: the run's settings.
        classes: number of classes of the data set; 0 for unlabelled data, which leaves out the
            online classifiers.
        compiled, islands: whether XLA compiles the training step, and whether in parts between
            which replicas communicate.
    """

    def __init__(
        self, config: Config, classes: int = 0, compiled: bool = False, islands: bool = False,
        **kwargs,
    ):  # fmt: skip
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
        self.training_step = TrainingStep(self, config.distribution, compiled, islands)

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

    def antecedents(self, f1):
        """What f1 [N, D] predicts cells by: the components of a mixture [N, K, D], or itself."""
        return f1[:, None] if self.mixture is None else self.mixture(f1)

    def posterior(self, f1, phi7):
        """The share of each mixture component in each location of φ7 (paper section 3.7).

        Args:
            f1: [N, D], of one view of each image.
            phi7: [N, 7, 7, D], of the other; or of the same.

        Returns:
            float32 [N, 7, 7, K]; sums to 1 over K.
        """
        if self.mixture is None:
            raise ValueError(
                "posterior: expected a model with a mixture. Received: one without. Train with "
                "--mixture_components."
            )
        wanted = [f1.shape[0], 7, 7, self.settings.n_rkhs]
        if not tf.TensorShape(wanted).is_compatible_with(phi7.shape):
            raise ValueError(
                f"posterior takes phi7 of as many images as f1: expected {wanted}. "
                f"Received: {list(phi7.shape)}."
            )
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
        images = tf.convert_to_tensor(images)
        if images.dtype != tf.uint8 or images.shape.rank != 4 or images.shape[-1] != 3:
            raise ValueError(
                "preprocess: expected uint8 images [N, H, W, 3]. Received: "
                f"{images.dtype.name} {images.shape}."
            )
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
        uniform = self.draw([2, batch, max(SCALES)], step, LOCATION_KEY)
        return {n: tf.cast(uniform[..., n - 1] * n * n, tf.int32) for n in sorted(scales)}

    def train_step(self, data):
        """One step of optimization on {"view1", "view2", "label"}; returns named scalars."""
        return self.training_step(data)

    def norms(self) -> dict[str, BatchNorm]:
        """Every batch norm, by the path of its running mean."""
        layers = self._flatten_layers()
        return {one.moving_mean.path: one for one in layers if isinstance(one, BatchNorm)}

    def trained_variables(self):
        """The weights that the tasks reach: what no task uses stays as it is."""
        variables = self.encoder.variables_beyond(min(self.scales))
        for scale, embedding in ((5, self.embedding5), (7, self.embedding7)):
            if scale not in self.scales:
                variables += embedding.trainable_variables
        unused = set(map(id, variables))
        return [variable for variable in self.trainable_variables if id(variable) not in unused]
