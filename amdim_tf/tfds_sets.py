"""The paper's data sets as TensorFlow Datasets prepares them."""

from __future__ import annotations

import numpy as np

from amdim_tf import records
from amdim_tf.config import DataConfig
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource, SkippedImages, Source
from amdim_tf.progress import Progress

# Data set -> our split -> its own split.
_SPLITS = {
    "cifar10": {"train": "train", "labelled": "train", "test": "test"},
    "cifar100": {"train": "train", "labelled": "train", "test": "test"},
    "stl10": {"train": "train+unlabelled", "labelled": "train", "test": "test"},
    "imagenet2012": {"train": "train", "labelled": "train", "test": "validation"},
}
NAMES = tuple(_SPLITS)
_BATCH = 1000


def load(config: DataConfig, split: str, files_as_files: bool = False) -> Source:
    """A split of a prepared data set: ImageNet from its records, the others in memory.

    With `files_as_files` ImageNet's images stay encoded, however small they are.
    """
    # Imported on first use: it takes seconds, and other data sets do not need it.
    import tensorflow_datasets as tfds

    builder = tfds.builder(config.dataset, data_dir=config.data_dir or None)
    own_split = _SPLITS[config.dataset][split]
    class_names = tuple(builder.info.features["label"].names)
    if config.dataset != "imagenet2012":
        return _in_memory(builder, own_split, class_names, config)
    if not builder.is_prepared():
        raise _not_prepared(config)
    files = [str(path) for path in builder.info.splits[own_split].filepaths]
    return records.source(records.scan(files, class_names), config, files_as_files)


def _in_memory(builder, split: str, class_names: tuple[str, ...], config: DataConfig):
    try:
        dataset = builder.as_dataset(split=split, shuffle_files=False, batch_size=_BATCH)
    except AssertionError:  # what TensorFlow Datasets raises for data that is not there
        raise _not_prepared(config) from None
    images, labels = [], []
    total = int(dataset.cardinality()) * _BATCH
    with Progress(total, f"reading {config.dataset}", "image") as progress:
        for batch in dataset.as_numpy_iterator():
            images.append(batch["image"])
            labels.append(batch["label"].astype(np.int32))
            progress.advance(len(labels[-1]))
    skipped = SkippedImages(total, config.max_bad_images)
    return ArraySource(np.concatenate(images), np.concatenate(labels), class_names, skipped)


def _not_prepared(config: DataConfig) -> UserError:
    place = f", data_dir='{config.data_dir}'" if config.data_dir else ""
    manual = ""
    if config.dataset == "imagenet2012":
        manual = (
            " First put ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar into "
            f"{config.data_dir or '~/tensorflow_datasets'}/downloads/manual."
        )
    return UserError(
        f"--data_dir: expected {config.dataset} as TensorFlow Datasets prepares it. Received: "
        f"{config.data_dir or 'its default directory'}, where it is not. Prepare it with: "
        'python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{config.dataset}'{place}).download_and_prepare()\".{manual}"
    )
