"""Packs a folder of images into sharded records, for file systems on which small files are slow.

Usage:
    python tools/prepare_folder.py --data_dir=PHOTOS --output_dir=PACKED
    python -m amdim_tf.train --dataset=folder --data_dir=PACKED …

PHOTOS is laid out as for --dataset=folder. The records hold the same files, byte by byte, in the
same order, with the same labels, so that a run on PACKED equals one on PHOTOS. Shards are TFRecord
files of tf.train.Example (`image`, `label`); the images' names are in SPLIT.records.json. A run
that was stopped goes on with the shard it was at.
"""

import hashlib
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from absl import flags

from amdim_tf import cli_flags, safe_files
from amdim_tf.errors import UserError
from amdim_tf.progress import Progress


def define_flags() -> None:
    """In a function, so that the module can be imported beside other programs' flags."""
    flags.DEFINE(cli_flags.PATH, "data_dir", None, "Folder of images.")
    flags.DEFINE(
        cli_flags.PATH, "output_dir", None, "Directory for the shards; it is made if need be."
    )
    flags.DEFINE_integer("shard_images", 1000, "Images in a shard.", lower_bound=1)


def _example(path: bytes, label: int) -> bytes:
    """The serialized record of one file."""
    import tensorflow as tf

    from amdim_tf import folders

    try:
        contents = safe_files.read_limited(os.fsdecode(path), folders.MOST_BYTES)
    except OSError as error:
        raise UserError(
            f"{os.fsdecode(path)}: expected a readable file ({error.strerror or error})."
        ) from None
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[contents])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString(
        deterministic=True
    )


def _pack_split(root: pathlib.Path, output: pathlib.Path, split: str, shard_images: int) -> None:
    """Writes the shards of one split, those that are not there yet, then the list of them."""
    from amdim_tf import folders, records

    paths, labels, class_names, unreadable = folders.list_split(root, split)
    if unreadable:
        raise UserError(f"{unreadable[0]}: expected a directory that can be read.")
    listed = [os.path.relpath(path, os.fsencode(root)) for path in paths]
    _check_same_listing(output / f"{split}.listing", listed, shard_images)
    starts = range(0, len(paths), shard_images)
    names = [f"{split}-{number:05d}-of-{len(starts):05d}.tfrecord" for number in range(len(starts))]
    with Progress(len(paths), f"packing {split}", "image") as progress:
        for name, start in zip(names, starts, strict=True):
            part = range(start, min(start + shard_images, len(paths)))
            if not (output / name).exists():
                _write_shard(output / name, [(paths[i], int(labels[i])) for i in part])
            progress.advance(len(part))
    document = {
        "files": names,
        "class_names": list(class_names),
        "names": [os.fsdecode(name) for name in listed],
    }
    text = json.dumps(document, indent=2) + "\n"
    safe_files.write_whole(records.index_path(output, split), text.encode())


def _write_shard(path: pathlib.Path, files: list[tuple[bytes, int]]) -> None:
    """Writes the records of (path, label) aside, and puts the shard in place."""
    import tensorflow as tf

    aside = path.with_name(path.name + ".partial")
    try:
        safe_files.create(aside).close()  # in the place of whatever is there, such as a link
        with tf.io.TFRecordWriter(str(aside)) as writer:
            for name, label in files:
                writer.write(_example(name, label))
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _check_same_listing(path: pathlib.Path, listed: list[bytes], shard_images: int) -> None:
    """Refuses to go on with shards that were begun with other files."""
    digest = hashlib.sha256(b"%d\n" % shard_images + b"\n".join(listed)).hexdigest()
    if path.exists() and safe_files.read_limited(path, 1000) != digest.encode():
        raise UserError(
            f"--output_dir: expected an empty directory, or one with shards of the same files. "
            f"Received: {path.parent}, begun with other files or another --shard_images. "
            "Remove it, or choose another."
        )
    safe_files.write_whole(path, digest.encode())


def pack(root: pathlib.Path, output: pathlib.Path, shard_images: int) -> None:
    """Packs every split that the folder has."""
    import tensorflow as tf

    from amdim_tf import folders

    splits = folders.splits_of(root)
    try:
        output.mkdir(parents=True, exist_ok=True)
        for split in splits:
            _pack_split(root, output, split, shard_images)
    except (OSError, tf.errors.OpError) as error:
        reason = error.message if isinstance(error, tf.errors.OpError) else error.strerror
        raise UserError(
            f"--output_dir: expected a directory with room. Received: {output} ({reason}). Run the "
            "same command again when there is; whole shards are kept."
        ) from None
    print(
        f"Packed {', '.join(splits)} into {output}. Use it as --dataset=folder --data_dir={output}"
    )


def main() -> None:
    """Reads the flags and packs."""
    root = pathlib.Path(cli_flags.require("data_dir", "a folder of images"))
    output = pathlib.Path(cli_flags.require("output_dir", "a directory for the shards"))
    cli_flags.import_tensorflow_quietly()
    pack(root, output, cli_flags.FLAGS.shard_images)


if __name__ == "__main__":
    define_flags()
    cli_flags.run(main)
