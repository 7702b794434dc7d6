"""Random access to the records of TFRecord shards.

A TFRecord file is a row of records: 8 bytes of length, 4 of checksum, the record, 4 of checksum. An
index holds where each record begins, so that example i can be read with one seek. Shards that
TensorFlow Datasets prepared are indexed when they are opened, by walking over the lengths.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import struct

import numpy as np
import tensorflow as tf

from amdim_tf import safe_files
from amdim_tf.config import MOST_CLASSES, DataConfig
from amdim_tf.errors import UserError
from amdim_tf.examples import EncodedSource, SkippedImages, Source, in_memory

_FRAME = struct.Struct("<QI")  # length, its checksum
_TRAILER = 4
_MOST_BYTES = 2**30  # of a list of shards, with the names of all images


@dataclasses.dataclass(frozen=True)
class Index:
    """Where every record of some shards is.

    Attributes:
        files: paths of the shards.
        shard: int32 [N], which file each record is in.
        offset: int64 [N], where its bytes begin.
        length: int64 [N], how many there are.
        class_names: of the labels in the records.
        names: of the images, before they were packed; empty where nobody wrote them down.
    """

    files: tuple[str, ...]
    shard: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    class_names: tuple[str, ...]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        """How many records."""
        return len(self.offset)

    def read(self, number) -> bytes:
        """The bytes of one record.

        Opening the shard anew costs a few microseconds. Shards that stay open would take a
        descriptor each, and ImageNet has as many as a process may usually have open.
        """
        with open(self.files[self.shard[number]], "rb", buffering=0) as file:
            return os.pread(file.fileno(), int(self.length[number]), int(self.offset[number]))

    def file_of(self, number: int) -> str:
        """The shard that a record is in."""
        return self.files[self.shard[number]]

    def name_of(self, number: int) -> str:
        """For people: the image's path, as if it lay beside the shards; else its record's place."""
        file = self.files[self.shard[number]]
        if self.names:
            return os.path.join(os.path.dirname(file), self.names[number])
        return f"{file}, byte {self.offset[number]}"


def scan(files: list[str], class_names: tuple[str, ...]) -> Index:
    """Indexes shards by walking over the lengths of their records."""
    shards, offsets, lengths = [], [], []
    for number, path in enumerate(files):
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            position = 0
            while position < size:
                file.seek(position)
                header = file.read(_FRAME.size)
                length = _FRAME.unpack(header)[0] if len(header) == _FRAME.size else size
                end = position + _FRAME.size + length + _TRAILER
                if end > size:
                    raise UserError(
                        f"{path}: expected whole TFRecord records. Received: a record at byte "
                        f"{position} that ends at {end}, in a file of {size} bytes. Prepare the "
                        "data again."
                    )
                shards.append(number)
                offsets.append(position + _FRAME.size)
                lengths.append(length)
                position = end
    return Index(
        tuple(files),
        np.array(shards, np.int32),
        np.array(offsets, np.int64),
        np.array(lengths, np.int64),
        class_names,
    )


def parse_examples(examples):
    """(encoded images, int32 labels) of tf.train.Examples with `image` and, maybe, `label`."""
    features = tf.io.parse_example(
        examples,
        {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64, default_value=-1),
        },
    )
    return features["image"], tf.cast(features["label"], tf.int32)


def source(index: Index, config: DataConfig, files_as_files: bool = False) -> Source:
    """The examples of an index; with `files_as_files` the images stay encoded."""
    skipped = SkippedImages(len(index), config.max_bad_images)

    def parse(examples, numbers):
        del numbers
        images, labels = parse_examples(examples)
        known = tf.debugging.Assert(
            tf.reduce_all(labels < len(index.class_names)),
            ["expected a class of the index", labels],
        )
        with tf.control_dependencies([known]):
            return tf.identity(images), tf.identity(labels)

    encoded = EncodedSource(
        len(index), index.read, parse, index.name_of, index.file_of, index.class_names, skipped
    )
    return encoded if files_as_files else in_memory(encoded) or encoded


def index_path(root: pathlib.Path, split: str) -> pathlib.Path:
    """Where tools/prepare_folder.py leaves the list of a split's shards."""
    return root / f"{split}.records.json"


def read_index(root: pathlib.Path, split: str) -> Index:
    """The index of shards that tools/prepare_folder.py wrote."""
    path = index_path(root, split)
    try:
        document = json.loads(safe_files.read_limited(path, _MOST_BYTES))
        files = [str(root / pathlib.PurePath(name).name) for name in document["files"]]
        class_names = tuple(map(str, document["class_names"]))
        names = tuple(map(str, document.get("names", [])))  # older lists have none
        if not files or len(class_names) > MOST_CLASSES:
            raise ValueError(f"{len(files)} shards, {len(class_names)} classes")
    except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise UserError(
            f"{path}: expected the list that tools/prepare_folder.py writes. Received: {error}."
        ) from None
    for file in files:
        if not os.path.isfile(file):
            raise UserError(f"{path}: expected the shard {file}; there is no such file.")
    index = scan(files, class_names)
    if names and len(names) != len(index):
        raise UserError(
            f"{path}: expected a name for each of the {len(index)} images in its shards. "
            f"Received: {len(names)}. Pack the folder again."
        )
    return dataclasses.replace(index, names=names)
