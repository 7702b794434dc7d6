"""What a data set is to the rest of the program: examples with random access.

Example i is the same on every machine and in every run. Small images are held in memory as one
array; others stay on disk and are read by index.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from amdim_tf import decode, image_headers, safe_files
from amdim_tf.errors import UserError
from amdim_tf.progress import Progress

UNLABELLED = -1
# Data sets whose images have one small size and fit into this are decoded once and kept.
_MEMORY_LIMIT = 4 * 2**30
_LARGEST_SIDE = 128


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """A split held in memory.

    Attributes:
        images: uint8 [N, H, W, 3].
        labels: int32 [N]; −1 for an unlabelled image.
        class_names: empty where the data set has no classes.
        skipped: images that could not be decoded, by name.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    skipped: SkippedImages

    def __len__(self) -> int:
        """How many examples."""
        return len(self.labels)


@dataclasses.dataclass(frozen=True)
class EncodedSource:
    """A split on disk, read by index.

    Attributes:
        count: how many examples.
        stored: the bytes that are stored for an example, a file or a record, by its index.
        parse: a graph function of what is stored for some examples and their indices, of any
            shape: (contents of image files, int32 labels).
        name_of: the name of an example, for people.
        file_of: the file that an example is in, such as a shard.
        class_names: empty where the data set has no classes.
        skipped: images that could not be decoded, by name.
    """

    count: int
    stored: Callable[[int], bytes]
    parse: Callable
    name_of: Callable[[int], str]
    file_of: Callable[[int], str]
    class_names: tuple[str, ...]
    skipped: SkippedImages

    def __len__(self) -> int:
        """How many examples."""
        return self.count

    def read(self, indices):
        """(contents of image files, int32 labels) of examples, int64 [] or [n], in a graph.

        One call into Python for all of them: a call costs ten times what it takes to read a file.
        """
        stored = tf.numpy_function(self._stored_of_all, [indices], tf.string, stateful=False)
        return self.parse(tf.ensure_shape(stored, indices.shape), indices)

    def _stored_of_all(self, indices) -> np.ndarray:
        stored = np.empty(np.shape(indices), object)
        for place, index in np.ndenumerate(indices):
            stored[place] = self.stored(index)
        return stored

    def version_of(self, index: int) -> bytes:
        """What changes when another image takes an example's place: name, size and time of change.

        Raises:
            OSError: where the file is gone.
        """
        status = os.stat(self.file_of(index))
        name = os.fsencode(os.path.abspath(self.name_of(index)))
        return name + f"\n{status.st_size} {status.st_mtime_ns}\n".encode()


class SkippedImages:
    """The images of a split that could not be decoded, and whether there are too many.

    Args:
        count: images in the split.
        limit: the share that may be bad.
    """

    def __init__(self, count: int, limit: float):
        self._count, self._limit = count, limit
        self._names: dict[str, None] = {}  # a set that keeps its order
        self._lock = threading.Lock()

    def add(self, name: str) -> None:
        """Notes a bad image; any thread may."""
        with self._lock:
            self._names[name] = None

    def for_part(self, count: int) -> SkippedImages:
        """The same limit for some of the images, of which none is known to be bad."""
        return SkippedImages(count, self._limit)

    @property
    def names(self) -> list[str]:
        """What has been found so far, each once."""
        with self._lock:
            return list(self._names)

    def check(self) -> None:
        """Raises a UserError where more than the allowed share is bad."""
        names = self.names
        if len(names) > self._limit * self._count:
            raise UserError(
                f"--max_bad_images: expected at most {100 * self._limit:g}% of {self._count} "
                f"images that cannot be decoded. Received: {len(names)} so far, the first being "
                f"{names[0]}. Mend or remove them, or allow more."
            )

    def write(self, path: pathlib.Path) -> None:
        """Lists the names in a file, one per line, if there are any."""
        if self.names:
            lines = (os.fsencode(name) + b"\n" for name in self.names)
            safe_files.write_whole(path, b"".join(lines))


Source = ArraySource | EncodedSource


def subset(source: Source, rows: np.ndarray) -> Source:
    """The given examples of a source, in the given order."""
    if isinstance(source, ArraySource):
        return dataclasses.replace(source, images=source.images[rows], labels=source.labels[rows])
    numbers = tf.constant(rows, tf.int64)
    return dataclasses.replace(
        source,
        count=len(rows),
        stored=lambda index: source.stored(rows[index]),
        parse=lambda stored, indices: source.parse(stored, tf.gather(numbers, indices)),
        name_of=lambda index: source.name_of(int(rows[index])),
        file_of=lambda index: source.file_of(int(rows[index])),
        skipped=source.skipped.for_part(len(rows)),
    )


def in_memory(source: EncodedSource) -> ArraySource | None:
    """The source decoded into one array, if its images have one small size; None otherwise."""
    sizes = (_size_of(source, index) for index in range(min(len(source), 16)))
    size = next((size for size in sizes if size), None)
    if size is None or max(size) > _LARGEST_SIDE:
        return None
    shape = (*size, 3)
    if len(source) * np.prod(shape) > _MEMORY_LIMIT:
        return None
    images = np.empty([len(source), *shape], np.uint8)
    labels, good = np.empty(len(source), np.int32), np.zeros(len(source), bool)
    done = 0
    with Progress(len(source), "reading images", "image") as progress:
        for batch in _decoded_batches(source, shape):
            pixels, numbers, fits, made = (values.numpy() for values in batch)
            if np.any(made & ~fits):
                return None
            rows = slice(done, done + len(made))
            images[rows], labels[rows], good[rows] = pixels, numbers, made
            for index in np.flatnonzero(~made) + done:
                source.skipped.add(source.name_of(index))
            done += len(made)
            progress.advance(len(made))
    source.skipped.check()
    if not good.all():
        images, labels = images[good], labels[good]
    return ArraySource(images, labels, source.class_names, source.skipped)


def _decoded_batches(source: EncodedSource, shape: tuple[int, int, int]):
    """Batches of (images, labels, whether of this shape, whether decoded at all), in order."""
    nothing = tf.zeros(shape, tf.uint8)

    def load(index):
        contents, label = source.read(index)
        image = decode.decode(contents)
        fits = tf.reduce_all(tf.shape(image) == shape)
        return tf.ensure_shape(tf.cond(fits, lambda: image, lambda: nothing), shape), label, fits

    def load_or_flag(index):
        default = (nothing, tf.constant(UNLABELLED), False)
        (image, label, fits), made = decode.or_else(load, index, default)
        return image, label, fits, made

    indices = tf.data.Dataset.range(len(source))
    return indices.map(load_or_flag, num_parallel_calls=tf.data.AUTOTUNE).batch(256).prefetch(4)


def _size_of(source: EncodedSource, index: int) -> tuple[int, int] | None:
    """Height and width of an example, from its header; None where it has none."""
    try:
        height, width = image_headers.image_size(source.read(tf.constant(index, tf.int64))[0])
    except tf.errors.OpError:
        return None
    return int(height), int(width)
