"""Colour and histogram operations on whole batches of images.

Every function is pure: it maps a batch of images, float32 [B, H, W, 3] with values 0..255, and
one parameter per image (tensors of shape [B]) to a batch of the same shape and range, so a few
large kernels give every image its own augmentation. Nothing here draws random numbers.

The meaning of each operation is Pillow's (ImageEnhance, ImageOps). Those that Pillow defines on
whole grey levels round their input first; the others keep fractions, and so differ from Pillow's
8-bit results by less than one level. All work eagerly, in tf.data with unknown B, H and W, and
under XLA.
"""

import tensorflow as tf

# Pillow's weights of the L (luma) conversion, in 1/65536. Their products with whole grey levels,
# and the sum, fit into float32's 24 bits, so the conversion below is exact.
_LUMA_WEIGHTS = (19595 / 65536, 38470 / 65536, 7471 / 65536)

# Principal components of the colours of ImageNet, RGB scaled to 0..1 (Krizhevsky et al. 2012,
# section 4.1): standard deviations along the components, and the components as columns.
_PCA_DEVIATIONS = (0.2175, 0.0188, 0.0045)
_PCA_COMPONENTS = (
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)


def per_image(parameter, images, dtype=tf.float32):
    """Return `parameter` [B] as [B, 1, 1, 1], ready to broadcast against `images`."""
    parameter = tf.convert_to_tensor(parameter)
    if len(parameter.shape) != 1 or len(images.shape) != 4:
        raise ValueError(
            "Expected images [B, H, W, 3] and one parameter per image [B]. "
            f"Received: images {images.shape}, parameter {parameter.shape}"
        )
    return tf.reshape(tf.cast(parameter, dtype), [-1, 1, 1, 1])


def round_levels(values):
    """Round half up to whole grey levels and clip to 0..255, as Pillow stores its results."""
    return tf.clip_by_value(tf.floor(values + 0.5), 0.0, 255.0)


def _clip(values):
    return tf.clip_by_value(values, 0.0, 255.0)


def _luma(images):
    """Pillow's grey level of each pixel, a whole number: [B, H, W, 1]."""
    weights = tf.constant(_LUMA_WEIGHTS)[:, tf.newaxis]  # [3, 1]
    return tf.floor(tf.tensordot(images, weights, 1) + 0.5)


def _blend(target, images, factor):
    """ImageEnhance's rule: `target` at factor 0, the image at 1, beyond it above 1."""
    factor = per_image(factor, images)
    return _clip(factor * images + (1.0 - factor) * target)


def brightness(images, factor):
    """Blend with black by `factor` [B]: 0 gives black, 1 the image (ImageEnhance.Brightness)."""
    return _blend(0.0, images, factor)


def contrast(images, factor):
    """Blend with the image's mean grey by `factor` [B] (ImageEnhance.Contrast)."""
    mean = tf.reduce_mean(_luma(images), axis=[1, 2], keepdims=True)  # [B, 1, 1, 1]
    return _blend(tf.floor(mean + 0.5), images, factor)


def color(images, factor):
    """Change the saturation: blend with the grey image by `factor` [B] (ImageEnhance.Color)."""
    return _blend(_luma(images), images, factor)


def sharpness(images, factor):
    """Blend with a smoothed image by `factor` [B] (ImageEnhance.Sharpness).

    The smoothing kernel is 3×3, weight 5 in the middle and 1 around it, over 13. Pillow leaves the
    outermost rows and columns as they are.
    """
    neighbours = 9.0 * tf.nn.avg_pool2d(images, 3, 1, "VALID")  # [B, H - 2, W - 2, 3]
    inside = images[:, 1:-1, 1:-1]
    change = tf.floor((neighbours + 4.0 * inside) / 13.0 + 0.5) - inside
    smooth = images + tf.pad(change, [[0, 0], [1, 1], [1, 1], [0, 0]])
    return _blend(smooth, images, factor)


def grayscale(images, apply=None):
    """Replace colours by their luma, in all images or where `apply` (bool [B]) is true."""
    gray = tf.broadcast_to(_luma(images), tf.shape(images))
    if apply is None:
        return gray
    return tf.where(per_image(apply, images, tf.bool), gray, images)


def _to_planes(images):
    """[B, H, W, 3] -> [B, 3, H·W]: arithmetic between channels is fastest on whole planes."""
    shape = tf.shape(images)
    return tf.transpose(tf.reshape(images, [shape[0], shape[1] * shape[2], 3]), [0, 2, 1])


def _from_planes(planes, images):
    """[B, 3, H·W] -> [B, H, W, 3], the shape of `images`."""
    return tf.reshape(tf.transpose(planes, [0, 2, 1]), tf.shape(images))


def _rotate_hue(planes, delta):
    """Turn the hue of [B, 3, N] by `delta` [B] turns, with HSV's saturation and value kept.

    HSV in closed form: with maximum v and chroma c, each channel is v - c + c·ramp(hue), and the
    three ramps are the same trapezoid, a third of a turn apart. Several times faster than
    tf.image.rgb_to_hsv and back.
    """
    red, green, blue = tf.unstack(planes, axis=1)  # [B, N] each
    highest = tf.maximum(tf.maximum(red, green), blue)
    lowest = tf.minimum(tf.minimum(red, green), blue)
    chroma = highest - lowest
    scale = 1.0 / tf.maximum(chroma, 1e-6)  # a grey pixel has no hue: any value will do
    hue = tf.where(
        tf.equal(highest, red),
        (green - blue) * scale,
        tf.where(tf.equal(highest, green), 2.0 + (blue - red) * scale, 4.0 + (red - green) * scale),
    )
    hue += 6.0 * delta[:, tf.newaxis]
    hue -= 6.0 * tf.floor(hue / 6.0)  # sixths of a turn, 0..6
    ramps = [tf.abs(hue - 3.0) - 1.0, 2.0 - tf.abs(hue - 2.0), 2.0 - tf.abs(hue - 4.0)]
    return tf.stack([lowest + chroma * tf.clip_by_value(ramp, 0.0, 1.0) for ramp in ramps], axis=1)


def hue(images, delta):
    """Turn the hue by `delta` [B], in turns of the hue circle (-0.5..0.5), keeping S and V."""
    delta = per_image(delta, images)[:, 0, 0, 0]
    return _from_planes(_rotate_hue(_to_planes(images), delta), images)


def _jitter_slot(planes, factors, operation):
    """Apply to each image of [B, 3, N] its `operation` [B]: 0 brightness, 1 contrast, 2 saturation.

    Any other operation leaves the image as it is. All three are factor·x + (1 - factor)·target
    with a black, a constant or a grey target: an affine map of the colour, done by one matmul.
    """
    factor = tf.gather(factors, tf.minimum(operation, 2), batch_dims=1)  # [B]
    factor = tf.where(operation < 3, factor, 1.0)
    of_mean = tf.where(tf.equal(operation, 1), 1.0 - factor, 0.0)
    of_gray = tf.where(tf.equal(operation, 2), 1.0 - factor, 0.0)
    weights = tf.constant(_LUMA_WEIGHTS)
    matrix = (  # [B, 3, 3]
        factor[:, tf.newaxis, tf.newaxis] * tf.eye(3) + of_gray[:, tf.newaxis, tf.newaxis] * weights
    )
    mean = tf.floor(tf.linalg.matvec(tf.reduce_mean(planes, axis=2), weights) + 0.5)  # [B]
    return _clip(tf.matmul(matrix, planes) + (of_mean * mean)[:, tf.newaxis, tf.newaxis])


def color_jitter(images, factors, delta, order):
    """Brightness, contrast, saturation and hue changes, in an order of its own for each image.

    The counterpart of torchvision's ColorJitter. Hue is the expensive one, so it runs once for the
    whole batch: each image passes through the slots before its hue change, the hue change, and the
    slots after it. A slot on the wrong side is the identity, which costs one small matmul.

    Args:
        images: float32 [B, H, W, 3], 0..255.
        factors: float32 [B, 3], of brightness, contrast and saturation; 1 means no change.
        delta: float32 [B], turns of the hue circle; 0 means no change.
        order: int32 [B, 4], a permutation of 0 brightness, 1 contrast, 2 saturation, 3 hue.
    """
    nothing = 3
    is_hue = tf.cast(tf.equal(order, 3), tf.int32)
    before_hue = tf.equal(tf.cumsum(is_hue, axis=1), 0)  # [B, 4]
    first = tf.where(before_hue, order, nothing)
    second = tf.where(before_hue, nothing, order)
    planes = _to_planes(images)  # [B, 3, H·W]
    for slot in (0, 1, 2):
        planes = _jitter_slot(planes, factors, first[:, slot])
    planes = _rotate_hue(planes, delta)
    for slot in (1, 2, 3):
        planes = _jitter_slot(planes, factors, second[:, slot])
    return _from_planes(planes, images)


def pca_lighting(images, alphas):
    """Add to each image a colour along ImageNet's principal components (AlexNet's lighting noise).

    Args:
        images: float32 [B, H, W, 3], 0..255.
        alphas: float32 [B, 3], how many standard deviations along each component.
    """
    deviations = 255.0 * tf.constant(_PCA_DEVIATIONS)
    colors = tf.linalg.matvec(tf.constant(_PCA_COMPONENTS), alphas * deviations)  # [B, 3]
    return _clip(images + colors[:, tf.newaxis, tf.newaxis, :])


def invert(images):
    """Turn every value x into 255 - x (ImageOps.invert)."""
    return 255.0 - images


def solarize(images, threshold):
    """Invert the levels at or above `threshold` [B] (ImageOps.solarize)."""
    levels = round_levels(images)
    return tf.where(levels < per_image(threshold, images), levels, 255.0 - levels)


def posterize(images, bits):
    """Keep the highest `bits` (int32 [B], 0..8) of the eight bits of each level."""
    levels = tf.cast(round_levels(images), tf.int32)
    dropped = 8 - per_image(bits, images, tf.int32)
    kept = tf.bitwise.left_shift(tf.bitwise.right_shift(levels, dropped), dropped)
    return tf.cast(kept, tf.float32)


def autocontrast(images):
    """Stretch each channel of each image to the full range (ImageOps.autocontrast)."""
    levels = round_levels(images)
    low = tf.reduce_min(levels, axis=[1, 2], keepdims=True)  # [B, 1, 1, 3]
    span = tf.reduce_max(levels, axis=[1, 2], keepdims=True) - low
    stretched = tf.floor((levels - low) * 255.0 / tf.maximum(span, 1.0))
    return tf.where(span > 0.0, stretched, levels)


def equalize(images):
    """Give each channel of each image a flat histogram (ImageOps.equalize).

    The histograms of all channels are counted as one, each channel with 256 bins of its own; the
    bin of a value is also its place in the table of new values.
    """
    shape = tf.shape(images)
    channels = tf.reshape(tf.range(shape[0] * 3), [shape[0], 1, 1, 3])
    bins = channels * 256 + tf.cast(round_levels(images), tf.int32)  # [B, H, W, 3]
    flat = tf.reshape(bins, [-1])
    counts = tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, shape[0] * 3 * 256)
    counts = tf.reshape(counts, [-1, 256])  # [B·3, 256]
    darker = tf.cumsum(counts, axis=1, exclusive=True)  # pixels below each level
    # Pillow spreads all pixels but those of the brightest level in use.
    pixels = shape[1] * shape[2]
    spread = tf.reduce_max(tf.where(darker < pixels, darker, 0), axis=1, keepdims=True)
    step = spread // 255  # [B·3, 1]
    table = tf.minimum((darker + step // 2) // tf.maximum(step, 1), 255)
    table = tf.where(step > 0, table, tf.range(256))
    return tf.cast(tf.gather(tf.reshape(table, [-1]), bins), tf.float32)
