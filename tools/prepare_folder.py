"""Packs a folder of images into sharded records, for file systems on which small files are slow.

Usage:
    python tools/prepare_folder.py --data_dir=PHOTOS --output_dir=PACKED
    python -m amdim_tf.train --dataset=folder --data_dir=PACKED …

PHOTOS is laid out as for --dataset=folder. The records hold the same files, byte by byte, in the
same order, with the same labels, so that a run on PACKED equals one on PHOTOS. Shards are TFRecord
files of tf.train.Example (`image`, `label`, `path`). A run that was stopped goes on with the shard
it was at.
"""

import hashlib
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags

from amdim_tf import cli_flags
from amdim_tf.errors import UserError
from amdim_tf.progress import Progress

flags.DEFINE(cli_flags.PATH, "data_dir", None, "Folder of images.")
flags.DEFINE(cli_flags.PATH, "output_dir", None, "Directory for the shards; it is made if need be.")
flags.DEFINE_integer("shard_images", 1000, "Images in a shard.", lower_bound=1)


def _example(path: bytes, label: int, root: pathlib.Path) -> bytes:
    """The serialized record of one file."""
    import tensorflow as tf

    def of_bytes(value):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    try:
        with open(path, "rb") as file:
            contents = file.read()
    except OSError as error:
        raise UserError(
            f"{os.fsdecode(path)}: expected a readable file ({error.strerror})."
        ) from None
    number = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
    relative = os.path.relpath(path, os.fsencode(root))
    features = {"image": of_bytes(contents), "label": number, "path": of_bytes(relative)}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(
        deterministic=True
    )


def _pack_split(root: pathlib.Path, output: pathlib.Path, split: str, shard_images: int) -> None:
    """Writes the shards of one split, those that are not there yet, then the list of them."""
    import tensorflow as tf

    from amdim_tf import folders, records

    paths, labels, class_names, unreadable = folders.list_split(root, split)
    if unreadable:
        raise UserError(f"{unreadable[0]}: expected a directory that can be read.")
    _check_same_listing(output / f"{split}.listing", paths, root, shard_images)
    starts = range(0, len(paths), shard_images)
    names = [f"{split}-{number:05d}-of-{len(starts):05d}.tfrecord" for number in range(len(starts))]
    with Progress(len(paths), f"packing {split}", "image") as progress:
        for name, start in zip(names, starts, strict=True):
            part = range(start, min(start + shard_images, len(paths)))
            if not (output / name).exists():
                aside = output / f"{name}.partial"
                with tf.io.TFRecordWriter(str(aside)) as writer:
                    for index in part:
                        writer.write(_example(paths[index], int(labels[index]), root))
                aside.replace(output / name)
            progress.advance(len(part))
    document = {"files": names, "class_names": list(class_names), "examples": len(paths)}
    path = records.index_path(output, split)
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(document, indent=2) + "\n")
    aside.replace(path)


def _check_same_listing(path: pathlib.Path, paths, root: pathlib.Path, shard_images: int) -> None:
    """Refuses to go on with shards that were begun with other files."""
    names = b"\n".join(os.path.relpath(name, os.fsencode(root)) for name in paths)
    digest = hashlib.sha256(b"%d\n" % shard_images + names).hexdigest()
    if path.exists() and path.read_text() != digest:
        raise UserError(
            f"--output_dir: expected an empty directory, or one with shards of the same files. "
            f"Received: {path.parent}, begun with other files or another --shard_images. "
            "Remove it, or choose another."
        )
    path.write_text(digest)


def main() -> None:
    """Packs every split that the folder has."""
    root = pathlib.Path(cli_flags.require("data_dir", "a folder of images"))
    output = pathlib.Path(cli_flags.require("output_dir", "a directory for the shards"))
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import folders

    splits = folders.splits_of(root)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for split in splits:
            _pack_split(root, output, split, cli_flags.FLAGS.shard_images)
    except OSError as error:
        raise UserError(
            f"--output_dir: expected a directory with room. Received: {output} ({error.strerror})."
        ) from None
    print(
        f"Packed {', '.join(splits)} into {output}. Use it as --dataset=folder --data_dir={output}"
    )


if __name__ == "__main__":
    cli_flags.run(main)
