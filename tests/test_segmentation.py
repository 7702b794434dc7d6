"""Segmentation measures against scikit-learn and SciPy, k-means, cells, and the probe itself."""

import json
import sys

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from pictures import encoded, picture, write_tree
from PIL import Image
from test_train import ROOT, run

from amdim_tf import (
    cells,
    checkpoints,
    evaluation,
    masked_images,
    segmentation,
    segmentation_probe,
    training_loop,
)
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError
from amdim_tf.evaluation import EvaluationSettings

sys.path.append(str(ROOT / "tools"))
import prepare_folder

cluster = pytest.importorskip("sklearn.cluster")
metrics = pytest.importorskip("sklearn.metrics")
optimize = pytest.importorskip("scipy.optimize")


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    regions=st.integers(1, 5),
    segments=st.integers(1, 5),
    places=st.integers(2, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_measures_equal_those_of_other_libraries(regions, segments, places, seed):
    rng = np.random.default_rng(seed)
    first, second = rng.integers(0, regions, [3, places]), rng.integers(0, segments, [3, places])
    second[1] = first[1] % segments  # something to find
    counts = segmentation.contingency(first, second)
    found = segmentation.adjusted_rand_index(counts)
    expected = [metrics.adjusted_rand_score(*pair) for pair in zip(second, first, strict=True)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    ious = segmentation.best_matching_iou(counts)
    for image in range(3):
        names = np.unique(second[image])
        table = np.array(
            [[_iou(first[image] == i, second[image] == j) for j in names] for i in range(regions)]
        )
        rows, columns = optimize.linear_sum_assignment(-table)
        np.testing.assert_allclose(ious[image], table[rows, columns].sum() / len(names), atol=1e-9)


def _iou(first, second):
    return (first & second).sum() / max((first | second).sum(), 1)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
    columns=st.integers(1, 7), more=st.integers(0, 5), seed=st.integers(0, 2**32 - 1),
    ties=st.booleans(),
)  # fmt: skip
def test_assignment_is_the_best(columns, more, seed, ties):
    gains = np.random.default_rng(seed).standard_normal([columns + more, columns])
    gains = np.round(gains) if ties else gains
    rows = segmentation.assignment(gains)
    assert len(set(rows.tolist())) == columns
    best = gains[optimize.linear_sum_assignment(gains, maximize=True)].sum()
    np.testing.assert_allclose(gains[rows, np.arange(columns)].sum(), best, atol=1e-9)


def test_measures_by_hand():
    truth = np.array([[0, 0, 1, 1], [0, 0, 1, 1]])
    counts = segmentation.contingency(np.array([[2, 2, 0, 0], [0, 1, 0, 1]]), truth)
    np.testing.assert_allclose(segmentation.adjusted_rand_index(counts), [1.0, -0.5])
    np.testing.assert_allclose(segmentation.best_matching_iou(counts), [1.0, 1 / 3])


def test_kmeans_finds_clusters_and_is_as_good_as_another():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, [5, 60])
    centres = rng.standard_normal([5, 3, 4]) * 20
    points = np.take_along_axis(centres, labels[..., None], 1) + rng.standard_normal([5, 60, 4])
    found = segmentation.kmeans(points + 1000, 3, 0)
    counts = segmentation.contingency(found, labels)
    np.testing.assert_array_equal(segmentation.adjusted_rand_index(counts), np.ones(5))
    noise = rng.standard_normal([8, 49, 3])
    found = segmentation.kmeans(noise, 4, 1)
    for image in range(8):
        ours = sum(
            np.square(part - part.mean(axis=0)).sum()
            for part in (noise[image][found[image] == k] for k in range(4))
            if len(part)
        )
        theirs = cluster.KMeans(4, n_init=10, random_state=0).fit(noise[image]).inertia_
        assert ours < 1.1 * theirs
    np.testing.assert_array_equal(found, segmentation.kmeans(noise, 4, 1))
    flat = segmentation.kmeans(np.zeros([2, 9, 3]), 3, 0)
    assert flat.shape == (2, 9)


@pytest.mark.parametrize("size", [32, 64, 128])
def test_cells_lie_where_the_encoder_looks(size):
    """The middle of what a cell sees is the pixel that upsampling gives it whole."""
    spread = np.zeros([1, 7, 7, 1], np.float32)
    spread[0, 2, 5] = 1
    raised = cells.upsample(spread, size)[0, ..., 0]
    middle = np.array([3, 6]) * size / 8
    top = np.argwhere(raised > raised.max() - 1e-6).mean(axis=0) + 0.5
    np.testing.assert_allclose(top, middle, atol=0.51)
    assert raised.max() > 0.7
    whole = np.zeros([1, size, size], int)
    whole[0, : size // 2] = 1
    np.testing.assert_array_equal(
        cells.majority(whole)[0, :, 0][[0, 1, 2, 4, 5, 6]], [1] * 3 + [0] * 3
    )
    labels = np.random.default_rng(0).integers(0, 3, [4, 7, 7])
    raised = cells.upsample_labels(labels, 3, size)
    np.testing.assert_array_equal(cells.majority(raised)[:, 1:-1, 1:-1], labels[:, 1:-1, 1:-1])


def test_perfect_regions_and_images_with_one_segment():
    segments = np.zeros([2, 32, 32], int)
    segments[0, 10:22, 6:22] = 1
    labels = cells.majority(segments)
    found = segmentation_probe._measure({"mixture": labels + 1}, segments, 3)
    np.testing.assert_allclose(found["mixture", "7x7"][:, 0], [1, 1])
    assert found["mixture", "upsampled"][0, 0] > 0.7
    assert np.isnan(found["mixture", "7x7"][:, 1]).all()


def _folder(root, masks=True):
    """Two test images of 40×36 pixels, with a rectangle, and masks of it."""
    rng = np.random.default_rng(0)
    for number in range(2):
        image = np.array(picture(36, 40, seed=number))
        mask = np.zeros([36, 40, 3], np.uint8)
        top, left = rng.integers(2, 12, 2)
        mask[top : top + 16, left : left + 16] = (200, 0, 10)
        image[mask.any(axis=-1)] = 255 - image[mask.any(axis=-1)]
        for folder, values in (("images/test/a", image), ("masks/a", mask)):
            path = root / folder / f"{number}.{'jpg' if 'images' in folder else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            if masks or "images" in folder:
                kind = "JPEG" if "images" in folder else "PNG"
                path.write_bytes(encoded(Image.fromarray(values), kind))
    (root / "images" / "train").mkdir()
    return root / "images", root / "masks"


def test_folders_with_masks(tmp_path):
    images, masks = _folder(tmp_path)
    config = config_lib.make(
        {"dataset": "folder", "data_dir": str(images), "image_size": 32, "evaluation_resize": 36}
    )
    assert masked_images.count(config, str(masks)) == 2
    ((pictures, segments),) = masked_images.batches(config, str(masks))
    assert pictures.shape == (2, 32, 32, 3) and segments.shape == (2, 32, 32)
    assert set(np.unique(segments)) == {0, 1}
    # The view is the centre of 32 pixels, unresized: as many pixels as the rectangle shows there.
    assert 150 < segments[0].sum() <= 256
    with pytest.raises(UserError, match="--mask_dir"):
        masked_images.count(config, "")
    (masks / "a" / "1.png").unlink()
    with pytest.raises(UserError, match=r"1\.png"):
        masked_images.count(config, str(masks))
    (masks / "a" / "1.png").write_bytes(encoded(picture(10, 10), "PNG"))
    with pytest.raises(UserError, match="40 x 36"):
        list(masked_images.batches(config, str(masks)))
    tfds = config_lib.make({"dataset": "cifar10"})
    with pytest.raises(UserError, match="no masks"):
        masked_images.count(tfds, str(masks))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a mixture's run of two steps."""
    model_dir = tmp_path_factory.mktemp("run") / "run"
    settings = {"ndf": 4, "n_rkhs": 16, "n_depth": 1, "batch_size": 8, "train_steps": 2}
    training_loop.train(config_lib.make({**settings, "mixture_components": 3}), model_dir)
    return model_dir


@pytest.mark.slow
def test_the_probe_writes_table_and_json(trained, capsys):
    settings = EvaluationSettings(str(trained), probes=("linear", "segmentation"))
    evaluation.evaluate(settings)
    printed = capsys.readouterr().out
    results = json.loads((trained / "evaluation" / "scenes.json").read_text())
    found = results["segmentation"]
    assert found["images"] == 4000 and found["components"] == 3
    for method, described in segmentation_probe.METHODS.items():
        line = next(line for line in printed.splitlines() if line.startswith(described))
        assert f"{found['7x7'][method]['adjusted_rand_index']:.3f}" in line
        assert f"{found['upsampled'][method]['iou']:.3f}" in line
    assert abs(found["7x7"]["random"]["adjusted_rand_index"]) < 0.01
    assert found["7x7"]["kmeans_colours"]["adjusted_rand_index"] > 0.4
    assert 0.05 < results["bag_of_features"]["accuracy"] < 1
    assert "bag_of_features" in printed


def test_images_with_one_segment_are_not_counted(tmp_path):
    images, masks = _folder(tmp_path)
    settings = {"ndf": 4, "n_rkhs": 16, "n_depth": 1, "image_size": 32, "mixture_components": 3}
    config = config_lib.make({**settings, "dataset": "folder", "data_dir": str(images)})
    model = checkpoints.build_model(config, 0)
    blank = encoded(Image.new("RGB", (40, 36)), "PNG")
    (masks / "a" / "1.png").write_bytes(blank)
    found = segmentation_probe.evaluate(model, config, str(masks), 0)
    assert (found["images"], found["left_out"]) == (1, 1)
    assert 0 < found["upsampled"]["mixture"]["iou"] <= 1
    (masks / "a" / "0.png").write_bytes(blank)
    with pytest.raises(UserError, match=r"at least 2 segments\. Received: 2 that show"):
        segmentation_probe.evaluate(model, config, str(masks), 0)


@pytest.mark.slow
def test_a_folder_needs_no_labels(trained, tmp_path):
    images, masks = _folder(tmp_path)
    flags = [f"--model_dir={trained}", "--dataset=folder", f"--data_dir={images}"]
    flags.append("--probes=segmentation")
    done = run("evaluate", *flags, f"--mask_dir={masks}")
    assert "Segmentation of 2 test images of folder" in done.stdout
    assert f"Wrote {trained / 'evaluation' / 'folder.json'}." in done.stdout
    assert not (trained / "evaluation" / "folder_history.csv").exists()  # of accuracies
    settings = EvaluationSettings(
        str(trained), dataset="folder", data_dir=str(images), probes=("segmentation",)
    )
    with pytest.raises(UserError, match="--mask_dir"):
        evaluation.evaluate(settings)


def test_masks_of_16_bits_and_of_too_many_colours(tmp_path):
    images, masks = _folder(tmp_path)
    config = config_lib.make({"dataset": "folder", "data_dir": str(images), "image_size": 32})
    path = masks / "a" / "1.png"
    deep = np.zeros([36, 40, 1], np.uint16)
    deep[10:20, 10:20] = 1  # the same as 0 in 8 bits
    path.write_bytes(tf.io.encode_png(deep).numpy())
    ((_, segments),) = masked_images.batches(config, str(masks))
    assert set(segments[1].ravel()) == {0, 1}
    noise = np.random.default_rng(0).integers(0, 256, [36, 40, 3]).astype(np.uint8)
    path.write_bytes(tf.io.encode_png(noise).numpy())
    with pytest.raises(UserError, match="expected at most 256 colours"):
        list(masked_images.batches(config, str(masks)))


def test_what_is_no_mask_of_its_own_is_refused(tmp_path):
    images, masks = _folder(tmp_path)
    settings = {"dataset": "folder", "data_dir": str(images), "image_size": 32}
    config = config_lib.make(settings)
    path = masks / "a" / "1.png"
    whole = path.read_bytes()
    for contents, named in (
        (encoded(picture(36, 40), "JPEG"), "expected a PNG image. Received: other"),
        (encoded(picture(36, 40), "GIF"), "expected a PNG image. Received: other"),
        (whole[: len(whole) // 2], "expected a whole PNG image"),
    ):
        path.write_bytes(contents)
        with pytest.raises(UserError, match=named):
            list(masked_images.batches(config, str(masks)))
    (images / "test" / "a" / "1.png").write_bytes(encoded(picture(36, 40), "PNG"))
    with pytest.raises(UserError, match=r"two that it could belong to, .*1\.jpg and .*1\.png"):
        masked_images.count(config, str(masks))
    packed = tmp_path / "packed"
    write_tree(tmp_path / "few", {f"{n}/a/0.jpg": picture(36, 40) for n in ("train", "test")})
    prepare_folder.pack(tmp_path / "few", packed, 1000)
    with pytest.raises(UserError, match="whose images are packed"):
        masked_images.count(config_lib.make({**settings, "data_dir": str(packed)}), str(masks))
    with pytest.raises(UserError, match="masks of their own"):
        masked_images.count(config_lib.make({"dataset": "scenes"}), str(masks))
