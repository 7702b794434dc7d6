"""The paper's data sets through TensorFlow Datasets: its mock data, and data prepared for real."""

import pathlib
import tarfile

import numpy as np
import pytest
from pictures import encoded, picture
from PIL import Image

from amdim_tf import config as config_lib
from amdim_tf import input_pipeline, sources
from amdim_tf.errors import UserError
from amdim_tf.examples import ArraySource, EncodedSource

tfds = pytest.importorskip("tensorflow_datasets")

CIFAR_JPEGS = pathlib.Path(__file__).parent.parent.parent / "shared/data/cifar10_jpeg.tar.gz"


def _data(dataset, data_dir=""):
    return config_lib.make({"dataset": dataset, "data_dir": str(data_dir)}).data


@pytest.mark.parametrize(
    "dataset, side, classes", [("cifar10", 32, 10), ("cifar100", 32, 100), ("stl10", 96, 10)]
)
def test_mock_data(dataset, side, classes):
    with tfds.testing.mock_data(num_examples=12):
        source = sources.load(_data(dataset), "train")
        test = sources.load(_data(dataset), "test")
    assert isinstance(source, ArraySource)
    assert len(source) == len(test) == 12
    assert source.images.shape[1:] == (side, side, 3) and source.images.dtype == np.uint8
    assert len(source.class_names) == classes
    config = config_lib.make({"dataset": dataset, "batch_size": 6})
    batch = next(iter(input_pipeline.training_batches(source, config, 0, 1)))
    assert batch["view1"].shape == (6, config.data.image_size, config.data.image_size, 3)


@pytest.mark.parametrize("dataset", ["cifar10", "stl10", "imagenet2012"])
def test_data_that_is_not_prepared(dataset, tmp_path):
    with pytest.raises(UserError) as error:
        sources.load(_data(dataset, tmp_path), "train")
    message = str(error.value)
    assert f"tfds.builder('{dataset}', data_dir='{tmp_path}').download_and_prepare()" in message
    assert "\n" not in message
    assert ("ILSVRC2012_img_train.tar" in message) == (dataset == "imagenet2012")


def _prepare(name, version, data_dir, features, splits):
    return tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version=version,
        features=features,
        split_datasets={split: list(enumerate(rows)) for split, rows in splits.items()},
        data_dir=data_dir,
        disable_shuffling=True,
    )


def test_cifar10_prepared_for_real(tmp_path):
    if not CIFAR_JPEGS.exists():
        pytest.skip("needs the CIFAR-10 JPEGs, which are not part of this repository")
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    examples = {"train": [], "test": []}
    with tarfile.open(CIFAR_JPEGS) as archive:
        for member in archive:
            parts = member.name.split("/")
            if len(parts) == 4 and int(parts[3][:4]) < 5 and parts[1] in examples:
                image = np.asarray(Image.open(archive.extractfile(member)))
                examples[parts[1]].append((image, names.index(parts[2]), member.name))
    features = tfds.features.FeaturesDict(
        {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(names=names),
        }
    )
    splits = {
        split: [{"id": name, "image": image, "label": label} for image, label, name in rows]
        for split, rows in examples.items()
    }
    version = str(tfds.builder("cifar10", data_dir=tmp_path).info.version)
    _prepare("cifar10", version, tmp_path, features, splits)
    source = sources.load(_data("cifar10", tmp_path), "train")
    assert len(source) == len(examples["train"]) == 50
    by_image = {image.tobytes(): label for image, label, _ in examples["train"]}
    for image, label in zip(source.images, source.labels, strict=True):
        assert by_image[image.tobytes()] == label


def test_imagenet_is_read_from_its_shards(tmp_path):
    names = tfds.builder("imagenet2012", data_dir=tmp_path).info.features["label"].names
    version = str(tfds.builder("imagenet2012", data_dir=tmp_path).info.version)
    features = tfds.features.FeaturesDict(
        {
            "file_name": tfds.features.Text(),
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=names),
        }
    )
    rows = []
    for number in range(6):
        path = tmp_path / f"{number}.jpg"
        path.write_bytes(encoded(picture(160, 170 + number, number)))
        rows.append({"file_name": path.name, "image": str(path), "label": 7 * number})
    _prepare("imagenet2012", version, tmp_path, features, {"train": rows, "validation": rows[:3]})
    source = sources.load(_data("imagenet2012", tmp_path), "train")
    assert isinstance(source, EncodedSource) and len(source.class_names) == 1000
    assert len(source) == 6 and len(sources.load(_data("imagenet2012", tmp_path), "test")) == 3
    read = {int(source.read(np.int64(i))[1]): source.read(np.int64(i))[0].numpy() for i in range(6)}
    for row in rows:
        assert read[row["label"]] == pathlib.Path(row["image"]).read_bytes()
