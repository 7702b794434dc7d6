"""What an export serves: functions from images to features, with all preprocessing inside.

A new output is one more function in `signatures`.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from amdim_tf import decode, image_headers, views
from amdim_tf.config import Config
from amdim_tf.model import AMDIM

# How many undecodable images an error names.
_POSITIONS_NAMED = 10


def save(model: AMDIM, directory) -> None:
    """Writes a SavedModel that needs nothing but TensorFlow to be loaded."""
    # A plain module with the variables, not the Keras model: no class has to be found again.
    module = tf.Module()
    module.weights = {variable.path: variable.value for variable in _weights(model)}
    tf.saved_model.save(module, str(directory), signatures=signatures(model))


def _weights(model: AMDIM) -> list[keras.Variable]:
    """All but the online classifiers'."""
    parts = (model.encoder, model.embedding5, model.embedding7, model.mixture)
    return [variable for part in parts if part is not None for variable in part.variables]


def signatures(model: AMDIM) -> dict:
    """The functions of an export by name.

    Returns:
        serving_default: images, uint8 [N, H, W, 3] -> f1, float32 [N, D].
        encoded: encoded_images, strings [N], files of different sizes -> f1.
        maps: images -> f1, f5, f7, phi1, phi5 and phi7, as AMDIM.encode gives them.
        mixture, where the model has one: images and other_images, two views of the same N images ->
            components, float32 [N, K, D], of images; posterior, [N, 7, 7, K], the share of each
            in the cells of other_images. For one view, both are the same.
    """
    images_of_one_size = tf.TensorSpec([None, None, None, 3], tf.uint8, "images")
    files = tf.TensorSpec([None], tf.string, "encoded_images")

    @tf.function(input_signature=[images_of_one_size])
    def serving_default(images):
        return _for_any_count(f1_of(model), _evaluation_views(model, images))

    @tf.function(input_signature=[files])
    def encoded(encoded_images):
        return _for_any_count(f1_of(model), _decoded_views(model, encoded_images))

    @tf.function(input_signature=[images_of_one_size])
    def maps(images):
        return _for_any_count(model.encode, _evaluation_views(model, images))

    found = {"serving_default": serving_default, "encoded": encoded, "maps": maps}
    if model.mixture is None:
        return found
    others = tf.TensorSpec([None, None, None, 3], tf.uint8, "other_images")

    @tf.function(input_signature=[images_of_one_size, others])
    def mixture(images, other_images):
        both = [_evaluation_views(model, given) for given in (images, other_images)]
        counts = [tf.shape(given)[0] for given in both]
        message = "other_images: expected as many as images. Received:"
        equal = tf.debugging.Assert(counts[0] == counts[1], [message, counts[1], counts[0]])
        with tf.control_dependencies([equal]):
            pairs = tf.stack(both, axis=1)  # [N, 2, S, S, 3]
        return _for_any_count(_mixture_of(model), pairs)

    return {**found, "mixture": mixture}


def _mixture_of(model: AMDIM):
    """The function from pairs of normalized views [N, 2, S, S, 3] to components and posterior."""

    def mixture(pairs):
        f1 = model.encoder(pairs[:, 0])["f1"]
        features = model.encoder(pairs[:, 1])
        phi7 = model.embed(features, [7])[7]
        return {"components": model.mixture(f1), "posterior": model.posterior(f1, phi7)}

    return mixture


def f1_of(model: AMDIM):
    """The function from normalized images [N, S, S, 3] to {"f1"}, without the embeddings."""
    return lambda images: {"f1": model.encoder(images)["f1"]}


def _for_any_count(encode, images) -> dict:
    """encode(images) as float32, for an empty batch too.

    oneDNN gets the shape of a convolution of no images wrong, so an empty batch has one until the
    end.
    """
    count = tf.shape(images)[0]
    filler = tf.zeros([tf.cast(count == 0, tf.int32), *images.shape[1:]])
    outputs = encode(tf.concat([images, filler], axis=0))
    return {name: tf.cast(value[:count], tf.float32) for name, value in outputs.items()}


def _evaluation_views(model: AMDIM, images):
    """Normalized views [N, S, S, 3] of uint8 images [N, H, W, 3]."""
    sides = tf.shape(images)[1:3]
    message = "images: expected a height and a width of at least 1 pixel. Received:"
    # By what a signature declares, the number of channels is 3 and a comparison with it is dropped
    # as true; but a call with others comes through. So the numbers are counted.
    shape = tf.shape(images, tf.int64)
    three = tf.size(images, tf.int64) == 3 * tf.reduce_prod(shape[:3])
    expected = "images: expected the shape [N, H, W, 3]. Received:"
    checks = [
        tf.debugging.Assert(three, [expected, shape], summarize=8),
        tf.debugging.Assert(tf.reduce_all(sides > 0), [message, sides]),
    ]
    with tf.control_dependencies(checks):
        # The maximum changes nothing but keeps oneDNN from complaining, as in views.two_views.
        values = tf.maximum(tf.cast(images, tf.float32), 0.0)
        return views.evaluation_view(model.view_settings, values, model.image_size)


def _decoded_views(model: AMDIM, encoded_images):
    """Normalized views [N, S, S, 3] of image files [N], each of its own size.

    Files are decoded whole and then treated as pixels are, so that a picture has the same features
    in every signature. Those that cannot be decoded are noted and named together at the end.
    """
    shape = [model.image_size, model.image_size, 3]

    def view_of(contents):
        return _evaluation_views(model, decode.decode(contents)[tf.newaxis])[0]

    def view_or_nothing(contents):
        view, made = decode.or_else(view_of, contents, tf.zeros(shape))
        return tf.ensure_shape(view, shape), tf.ensure_shape(made, [])

    # A data set decodes on all cores. One more element lets it be batched where there are no files.
    count = tf.size(encoded_images, tf.int64)
    last = tf.data.Dataset.from_tensors((tf.zeros(shape), True))
    files = tf.data.Dataset.from_tensor_slices(encoded_images)
    decoded, made = (
        files.map(view_or_nothing, num_parallel_calls=tf.data.AUTOTUNE)
        .concatenate(last)
        .batch(count + 1)
        .get_single_element()
    )
    message = _undecodable(tf.where(~made)[:, 0], count)
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(made), [message])]):
        return decoded[:count]


def _undecodable(positions, count):
    """What to say about the files at `positions`, int64 [bad], of a batch; a scalar string."""
    named = tf.strings.as_string(positions[:_POSITIONS_NAMED])
    return tf.strings.join(
        [
            "encoded_images: cannot decode image ",
            tf.strings.reduce_join(named, separator=", "),
            " (",
            tf.strings.as_string(tf.size(positions)),
            " of ",
            tf.strings.as_string(count),
            "; positions count from 0). Expected JPEG, PNG, BMP, GIF or WebP files of at most "
            f"{image_headers.PIXEL_LIMIT} pixels.",
        ]
    )


def in_bfloat16(model: AMDIM, config: Config) -> AMDIM:
    """The same encoder and embeddings with weights and arithmetic in bfloat16.

    The statistics of batch normalization stay float32, as in training.
    """
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        copy = AMDIM(config)
    finally:
        keras.config.set_dtype_policy(policy)
    weights = {variable.path: variable for variable in model.variables}
    for variable in copy.variables:
        variable.assign(weights[variable.path])
    return copy


def lite_model(model: AMDIM) -> bytes:
    """A LiteRT file of the f1 path: images, uint8 [N, S, S, 3] -> f1, float32 [N, D].

    Only normalization is inside: the images have the encoder's size already. A LiteRT interpreter
    starts with N = 1 and can be resized.
    """
    size = model.image_size

    @tf.function(input_signature=[tf.TensorSpec([None, size, size, 3], tf.uint8, "images")])
    def serving_default(images):
        normalized = views.normalize(model.view_settings, tf.cast(images, tf.float32))
        return f1_of(model)(normalized)

    module = tf.Module()
    module.weights = [variable.value for variable in model.encoder.variables]
    function = serving_default.get_concrete_function()
    return tf.lite.TFLiteConverter.from_concrete_functions([function], module).convert()
