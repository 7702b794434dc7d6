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

# Eigenvalues and eigenvectors (columns) of the colours of ImageNet, RGB scaled to 0..1, in the
# values in common use (Krizhevsky et al. 2012, section 4.1).
PCA_EIGENVALUES = (0.2175, 0.0188, 0.0045)
PCA_EIGENVECTORS = (
    (-0.5675, 0.7192, 0.4009),
    (-0.5808, -0.0045, -0.8140),
    (-0.5836, -0.6948, 0.4203),
)

# The operations of `color_jitter`, as its argument `order` numbers them; brightness is 0.
_CONTRAST, _SATURATION, _HUE = 1, 2, 3


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
    """The nearest whole grey levels, halves rounded up."""
    return tf.floor(values + 0.5)


def clip_levels(values):
    """Values below 0 and above 255 become 0 and 255."""
    return tf.clip_by_value(values, 0.0, 255.0)


def _luma(images):
    """Pillow's grey level of each pixel, a whole number: [B, H, W, 1]."""
    weights = tf.constant(_LUMA_WEIGHTS)[:, tf.newaxis]  # [3, 1]
    return round_levels(tf.tensordot(images, weights, 1))


def _blend(target, images, factor):
    """ImageEnhance's rule: `target` at factor 0, the image at 1, beyond it above 1."""
    factor = per_image(factor, images)
    return clip_levels(factor * images + (1.0 - factor) * target)


def brightness(images, factor):
    """Blend with black by `factor` [B]: 0 gives black, 1 the image (ImageEnhance.Brightness)."""
    return _blend(0.0, images, factor)


def contrast(images, factor):
    """Blend with the image's mean grey by `factor` [B] (ImageEnhance.Contrast)."""
    mean = tf.reduce_mean(_luma(images), axis=[1, 2], keepdims=True)  # [B, 1, 1, 1]
    return _blend(round_levels(mean), images, factor)


def color(images, factor):
    """Change the saturation: blend with the grey image by `factor` [B] (ImageEnhance.Color)."""
    return _blend(_luma(images), images, factor)


def sharpness(images, factor):
    """Blend with a smoothed image by `factor` [B] (ImageEnhance.Sharpness).

    The smoothing kernel is 3×3, weight 5 in the middle and 1 around it, over 13; the outermost rows
    and columns stay as they are. The smoothed image is rounded, as in Pillow; tensorflow-addons
    truncates it, so the two may differ by a level more.
    """
    neighbours = 9.0 * tf.nn.avg_pool2d(images, 3, 1, "VALID")  # [B, H - 2, W - 2, 3]
    inside = images[:, 1:-1, 1:-1]
    change = round_levels((neighbours + 4.0 * inside) / 13.0) - inside
    smooth = images + tf.pad(change, [[0, 0], [1, 1], [1, 1], [0, 0]])
    return _blend(smooth, images, factor)


def grayscale(images, apply=None):
    """Replace colours by their luma, in all images or where `apply` (bool [B]) is true."""
    if apply is None:
        return tf.broadcast_to(_luma(images), tf.shape(images))
    return color(images, 1.0 - tf.cast(apply, tf.float32))  # faster than tf.where


def _to_planes(images):
    """[B, H, W, 3] -> [B, 3, H·W]: arithmetic between channels is fastest on whole planes."""
    shape = tf.shape(images)
    return tf.transpose(tf.reshape(images, [shape[0], shape[1] * shape[2], 3]), [0, 2, 1])


def _from_planes(planes, images):
    """[B, 3, H·W] -> [B, H, W, 3], the shape of `images`."""
    return tf.reshape(tf.transpose(planes, [0, 2, 1]), tf.shape(images))


def _rotate_hue(planes, delta):
    """Turn the hue of [..., 3, N] by `delta` [...] turns, with HSV's saturation and value kept.

    HSV in closed form: with v the highest channel and c the chroma, each channel is v - c·dip(hue),
    and the three dips are the same trapezoid, a third of a turn apart. Three times as fast as
    tf.image.rgb_to_hsv and back.
    """
    red, green, blue = tf.unstack(planes, axis=-2)  # [..., N] each
    highest = tf.maximum(tf.maximum(red, green), blue)
    chroma = highest - tf.minimum(tf.minimum(red, green), blue)
    scale = 1.0 / tf.maximum(chroma, 1e-6)  # a grey pixel has no hue: any value will do
    hue = tf.where(
        tf.equal(highest, red),
        (green - blue) * scale,
        tf.where(tf.equal(highest, green), 2.0 + (blue - red) * scale, 4.0 + (red - green) * scale),
    )
    hue += 6.0 * delta[..., tf.newaxis]
    hue -= 6.0 * tf.floor(hue / 6.0)  # sixths of a turn, 0..6
    dips = [2.0 - tf.abs(hue - 3.0), tf.abs(hue - 2.0) - 1.0, tf.abs(hue - 4.0) - 1.0]
    return tf.stack([highest - chroma * tf.clip_by_value(dip, 0.0, 1.0) for dip in dips], axis=-2)


def hue(images, delta):
    """Turn the hue by `delta` [B], in turns of the hue circle (-0.5..0.5), keeping S and V."""
    return _from_planes(_rotate_hue(_to_planes(images), delta), images)


def _jitter_slot(planes, factors, operation):
    """Change the brightness, contrast or saturation of planes [3, N], as `operation` says.

    All three are factor·x + (1 - factor)·target, with a black, a uniform or a grey target. Where
    the operation is hue, nothing changes.
    """
    factor = tf.gather(factors, tf.minimum(operation, _SATURATION))
    factor = tf.where(tf.equal(operation, _HUE), 1.0, factor)
    gray = sum(weight * planes[channel] for channel, weight in enumerate(_LUMA_WEIGHTS))  # [N]
    of_mean = tf.cast(tf.equal(operation, _CONTRAST), tf.float32)
    of_gray = tf.cast(tf.equal(operation, _SATURATION), tf.float32)
    target = of_mean * round_levels(tf.reduce_mean(gray)) + of_gray * gray
    return clip_levels(factor * planes + (1.0 - factor) * target)


def _jitter_one(arguments):
    """The four changes of one image, whose planes are [3, N]."""
    planes, factors, delta, order = arguments
    hue_place = tf.argmax(tf.equal(order, _HUE), output_type=tf.int32)

    def slots(planes, begin, end):
        return tf.while_loop(
            lambda place, planes: place < end,
            lambda place, planes: (place + 1, _jitter_slot(planes, factors, order[place])),
            (begin, planes),
        )[1]

    planes = slots(planes, 0, hue_place)
    planes = _rotate_hue(planes, delta)
    return slots(planes, hue_place + 1, 4)


def color_jitter(images, factors, delta, order):
    """Brightness, contrast, saturation and hue changes, in an order of its own for each image.

    The counterpart of torchvision's ColorJitter. It goes from image to image, so that each stays
    in the processor's cache from change to change, and gets no more than its own four.

    Args:
        images: float32 [B, H, W, 3], 0..255.
        factors: float32 [B, 3], of brightness, contrast and saturation; 1 means no change.
        delta: float32 [B], turns of the hue circle; 0 means no change.
        order: int32 [B, 4], a permutation of 0 brightness, 1 contrast, 2 saturation, 3 hue.
    """
    arguments = _to_planes(images), factors, delta, order  # planes: [B, 3, H·W]
    planes = tf.map_fn(_jitter_one, arguments, fn_output_signature=tf.float32)
    return _from_planes(planes, images)


def pca_lighting(images, alphas):
    """Add to each image a colour along ImageNet's principal components (AlexNet's lighting noise).

    Args:
        images: float32 [B, H, W, 3], 0..255.
        alphas: float32 [B, 3], how far to go along each component, in units of its eigenvalue;
            AlexNet draws them with mean 0 and standard deviation 0.1.
    """
    steps = 255.0 * alphas * tf.constant(PCA_EIGENVALUES)
    added = tf.linalg.matvec(tf.constant(PCA_EIGENVECTORS), steps)  # [B, 3]
    return clip_levels(images + added[:, tf.newaxis, tf.newaxis, :])


def invert(images):
    """Turn every value x into 255 - x (ImageOps.invert)."""
    return 255.0 - images


def solarize(images, threshold):
    """Invert the levels at or above `threshold` [B] (ImageOps.solarize)."""
    levels = round_levels(images)
    inverted = tf.cast(levels >= per_image(threshold, images), tf.float32)  # 0 or 1
    return tf.abs(255.0 * inverted - levels)  # three times as fast as tf.where


def posterize(images, bits):
    """Keep the highest `bits` (int32 [B], 0..8) of each level's eight bits (ImageOps.posterize)."""
    levels = tf.cast(round_levels(images), tf.int32)
    dropped = 8 - per_image(bits, images, tf.int32)
    kept = tf.bitwise.left_shift(tf.bitwise.right_shift(levels, dropped), dropped)
    return tf.cast(kept, tf.float32)


def autocontrast(images):
    """Stretch each channel of each image to the full range (ImageOps.autocontrast)."""
    levels = round_levels(images)
    low = tf.reduce_min(levels, axis=[1, 2], keepdims=True)  # [B, 1, 1, 3]
    span = tf.reduce_max(levels, axis=[1, 2], keepdims=True) - low
    uniform = tf.equal(span, 0.0)  # such a channel stays as it is
    low = tf.where(uniform, 0.0, low)
    span = tf.where(uniform, 255.0, span)
    return tf.floor((levels - low) * 255.0 / span)


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
