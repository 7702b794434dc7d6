"""The encoder's shapes, receptive fields and initialization."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from amdim_tf.encoder import Encoder

# Receptive field and stride, in pixels, of one cell of the 7×7 and 5×5 maps, by hand from the
# table of stages: each layer of width w and stride s adds (w − 1) · (product of strides before it).
# Size 32: conv3/1, 4/2, 2/2 -> 3 + 3·1 + 1·2 = 8, then conv3 at stride 4 -> 8 + 2·4 = 16.
# Size 64: conv3/1, 4/2, 4/2, 2/2 -> 3 + 3 + 3·2 + 1·4 = 16, then 16 + 2·8 = 32.
# Size 128: conv5/2, conv3/1, 4/2, 4/2, 2/2 -> 5 + 4 + 6 + 12 + 8 = 35, then 35 + 2·16 = 67.
FIELDS = {32: (8, 16, 4), 64: (16, 32, 8), 128: (35, 67, 16)}


def _randomized(encoder):
    """The encoder with no weight left at zero, so that every path carries signal."""
    encoder.build((None, encoder.image_size, encoder.image_size, 3))
    rng = np.random.default_rng(0)
    for variable in encoder.trainable_variables:
        variable.assign(rng.uniform(0.05, 0.15, variable.shape))
    return encoder


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("use_bn", [False, True])
def test_shapes(size, use_bn):
    encoder = Encoder(size, 4, 32, 2, use_bn)
    outputs = encoder(tf.zeros([2, size, size, 3]))
    channels = 16 if size == 32 else 32
    assert outputs["f7"].shape == (2, 7, 7, channels)
    assert outputs["f5"].shape == (2, 5, 5, channels)
    assert outputs["f1"].shape == (2, 32)
    assert encoder.compute_output_shape((2, size, size, 3)) == {
        name: tuple(value.shape) for name, value in outputs.items()
    }


@pytest.mark.parametrize("size", [32, 64, 128])
def test_one_pixel_moves_the_cells_that_see_it(size):
    encoder = _randomized(Encoder(size, 4, 32, 2))
    field7, field5, stride = FIELDS[size]
    # At 128 the image is padded by 2 on each side, with a reflection: pixels further inside than
    # that are seen once, at their own place.
    padding = 2 if size == 128 else 0
    rng = np.random.default_rng(1)
    image = rng.uniform(0.5, 1.5, [1, size, size, 3]).astype(np.float32)
    before = encoder(image)
    inside = (0, size // 2, size - 1) if size < 128 else (4, size // 2, size - 5)
    for row in inside:
        for column in inside:
            changed = image.copy()
            changed[0, row, column] += 1.0
            after = encoder(changed)
            for name, field, cells in (("f7", field7, 7), ("f5", field5, 5)):
                moved = np.abs(after[name] - before[name]).max(axis=(0, 3)) > 1e-6
                start = stride * np.arange(cells)
                sees_row = (start <= row + padding) & (row + padding < start + field)
                sees_column = (start <= column + padding) & (column + padding < start + field)
                np.testing.assert_array_equal(moved, np.outer(sees_row, sees_column))


def test_untrained_residuals_are_zero():
    # The last convolution of each residual starts at zero, so the untrained encoder is the stem
    # followed by mean pooling: checked on a constant image, which pooling leaves constant.
    encoder = Encoder(32, 4, 32, 3)
    images = tf.ones([1, 32, 32, 3]) * tf.constant([0.3, -0.2, 0.5])
    outputs = encoder(images)
    stem = encoder.stages[0](images)[0, 0, 0]
    np.testing.assert_allclose(outputs["f7"][0, 3, 3, :4], stem, rtol=1e-5)
    np.testing.assert_allclose(outputs["f7"][0, :, :, 4:], 0)


def test_initial_weights_are_within_the_references_limits():
    encoder = Encoder(64, 8, 64, 2)
    encoder.build((None, 64, 64, 3))
    stem, block = encoder.stages[0], encoder.stages[1]
    for values, fan_in in (
        (stem.kernel.numpy(), 27),
        (stem.bias.numpy(), 27),
        (block.layers[0].conv1.kernel.numpy(), 16 * 8),
        (block.layers[1].conv1.kernel.numpy(), 16),
    ):
        limit = fan_in**-0.5
        assert np.abs(values).max() <= limit
        assert np.abs(values).max() > 0.5 * limit
    assert not block.layers[0].conv2.kernel.numpy().any()


def test_size_that_no_encoder_has():
    with pytest.raises(ValueError, match="image_size=48"):
        Encoder(48, 4, 32, 2)


def test_config_round_trip():
    encoder = Encoder(32, 4, 32, 2, use_bn=True, name="e")
    copy = keras.layers.deserialize(keras.layers.serialize(encoder))
    assert copy.get_config() == encoder.get_config()
    assert [type(stage) for stage in copy.stages] == [type(stage) for stage in encoder.stages]
