"""Policies: levels, published tables, files, draws, and their operations on whole batches."""

import collections
import functools
import json
import pathlib
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from amdim_tf import geometry_ops, image_ops, policies
from amdim_tf.errors import UserError
from amdim_tf.policies import GREY, DrawnSteps, Policy, Step
from amdim_tf.policy_tables import OPERATIONS, SIGNED

TABLES = ("autoaugment_imagenet", "autoaugment_cifar10", "autoaugment_svhn")
VALID = {"format": "amdim_tf policy", "version": 1, "sub_policies": [[["rotate", 0.8, 0.5]]]}


def photographs(count, height=48, width=40):
    """Like photographs: large shapes, fine detail, not all of full contrast. [B, H, W, 3]."""
    rng = np.random.default_rng(0)
    images = []
    for number in range(count):
        image = np.zeros([height, width, 3])
        for cells, strength in ((3, 80), (8, 40), (24, 15)):
            coarse = rng.uniform(-strength, strength, [cells, cells, 3]).astype(np.float32)
            image += tf.image.resize(coarse, [height, width], "bicubic").numpy()
        image = 110 + 20 * (number % 3) + image * (0.5 + 0.25 * (number % 4))
        images.append(np.clip(np.round(image), 0, 255))
    return np.stack(images).astype(np.float32)


def one_step(operation, level=0.7, probability=1.0):
    """A policy of a single step."""
    return Policy(((Step(operation, probability, level),),))


def always(policy):
    """The same policy, no step ever left out."""
    return Policy(
        tuple(
            tuple(step._replace(probability=1.0) for step in steps) for steps in policy.sub_policies
        ),
        policy.picks,
    )


def rows_of(drawn, rows):
    return DrawnSteps(*(values[rows] for values in drawn))


def chi_square(observed, expected):
    """Pearson's statistic over its value at p = 0.001 (Wilson and Hilferty): above 1 is a fail."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    assert np.all(observed[expected == 0] == 0)
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    return np.sum((observed - expected) ** 2 / expected) / limit


# Levels


@pytest.mark.parametrize(
    ("operation", "at_0", "at_quarter", "at_1"),
    [
        ("shear_x", 0, 0.075, 0.3),
        ("shear_y", 0, 0.075, 0.3),
        ("translate_x", 0, 37.5 / 331, 150 / 331),
        ("translate_y", 0, 37.5 / 331, 150 / 331),
        ("rotate", 0, 7.5, 30),
        ("solarize", 0, 64, 256),
        ("posterize", 4, 5, 8),
        ("contrast", 0.1, 0.55, 1.9),
        ("color", 0.1, 0.55, 1.9),
        ("brightness", 0.1, 0.55, 1.9),
        ("sharpness", 0.1, 0.55, 1.9),
        ("cutout", 0, 0.05, 0.2),
        ("identity", 0, 0, 0),
        ("autocontrast", 0, 0, 0),
        ("invert", 0, 0, 0),
        ("equalize", 0, 0, 0),
    ],
)
def test_levels(operation, at_0, at_quarter, at_1):
    values = [policies.parameter(operation, level) for level in (0.0, 0.25, 1.0)]
    np.testing.assert_allclose(values, [at_0, at_quarter, at_1])


def test_posterize_rounds_its_bits():
    assert [policies.parameter("posterize", level) for level in (0.12, 0.13, 0.9)] == [4, 5, 8]


# The published policies


@pytest.mark.parametrize("name", TABLES)
def test_tables_have_the_published_form(name):
    policy = policies.load(name)
    assert policy.picks == 1
    assert len(policy.sub_policies) == 25
    for steps in policy.sub_policies:
        assert len(steps) == 2
        for step in steps:
            assert step.operation in OPERATIONS[1:-1]  # neither identity nor cutout
            assert 10 * step.probability == pytest.approx(round(10 * step.probability))
            assert 9 * step.level == pytest.approx(round(9 * step.level))


@pytest.mark.parametrize(
    ("name", "number", "expected"),  # AutoAugment's sub-policies, numbered from 0 as in its tables
    [
        ("autoaugment_imagenet", 0, [("posterize", 0.4, 4), ("rotate", 0.6, 30)]),
        ("autoaugment_imagenet", 3, [("posterize", 0.6, 5), ("posterize", 0.6, 5)]),
        ("autoaugment_imagenet", 8, [("rotate", 0.2, 10), ("solarize", 0.6, 256 / 9)]),
        ("autoaugment_imagenet", 10, [("rotate", 0.8, 80 / 3), ("color", 0.4, 0.1)]),
        ("autoaugment_imagenet", 18, [("shear_x", 0.6, 0.5 / 3), ("equalize", 1.0, 0)]),
        ("autoaugment_imagenet", 24, [("equalize", 0.8, 0), ("equalize", 0.6, 0)]),
        ("autoaugment_cifar10", 0, [("invert", 0.1, 0), ("contrast", 0.2, 1.3)]),
        ("autoaugment_cifar10", 1, [("rotate", 0.7, 20 / 3), ("translate_x", 0.3, 150 / 331)]),
        ("autoaugment_cifar10", 5, [("shear_y", 0.2, 0.7 / 3), ("posterize", 0.3, 5)]),
        ("autoaugment_cifar10", 13, [("brightness", 0.9, 1.3), ("color", 0.2, 1.7)]),
        ("autoaugment_cifar10", 22, [("autocontrast", 0.9, 0), ("solarize", 0.8, 256 * 2 / 3)]),
        ("autoaugment_svhn", 0, [("shear_x", 0.9, 0.4 / 3), ("invert", 0.2, 0)]),
        ("autoaugment_svhn", 14, [("contrast", 0.3, 0.7), ("rotate", 0.8, 40 / 3)]),
        ("autoaugment_svhn", 20, [("solarize", 0.7, 256 * 7 / 9), ("translate_y", 0.6, 350 / 993)]),
        ("autoaugment_svhn", 24, [("shear_x", 0.7, 0.2 / 3), ("invert", 0.1, 0)]),
    ],
)
def test_rows_of_the_tables(name, number, expected):
    steps = policies.load(name).sub_policies[number]
    for step, (operation, probability, value) in zip(steps, expected, strict=True):
        assert step[:2] == (operation, probability)
        assert policies.parameter(operation, step.level) == pytest.approx(value)


@pytest.mark.parametrize(
    ("strength", "expected"),
    [
        (0, {"rotate": {0}, "solarize": {256}, "posterize": {8}, "color": {1}, "equalize": {0}}),
        (10, {"shear_x": {0.1}, "solarize": {170.667}, "posterize": {7}, "contrast": {0.7, 1.3}}),
        (30, {"rotate": {30}, "solarize": {0}, "posterize": {4}, "brightness": {0.1, 1.9}}),
    ],
)
def test_randaugment(strength, expected):
    policy = policies.load(f"randaugment(3, {strength})")
    assert policy.picks == 3
    found = collections.defaultdict(set)
    for (step,) in policy.sub_policies:
        assert step.probability == 1.0
        value = policies.parameter(step.operation, step.level)
        found[step.operation].add(round(value, 3))
    assert set(found) == set(OPERATIONS) - {"invert", "cutout"}
    counts = collections.Counter(step.operation for (step,) in policy.sub_policies)
    assert set(counts.values()) == {2}
    for operation, values in expected.items():
        assert found[operation] == values


@pytest.mark.parametrize(
    "name",
    [
        "",
        "autoaugment",
        "randaugment",
        "randaugment(2)",
        "randaugment(0,9)",
        "randaugment(11,9)",
        "randaugment(2,31)",
        "randaugment(2,-1)",
        "randaugment(2,9.5)",
        "randaugment(٢,9)",
        "randaugment(2,9)x",
        "policy.txt",
    ],
)
def test_unknown_names(name):
    with pytest.raises(UserError, match=r"^--policy: expected .* Received: '") as caught:
        policies.load(name)
    assert repr(name) in str(caught.value)


# Policy files


@pytest.mark.parametrize("name", [*TABLES, "randaugment(2,9)"])
def test_round_trip(name, tmp_path):
    policy = policies.load(name)
    path = tmp_path / "policy.json"
    policies.save(policy, path)
    assert policies.load(path) == policy
    assert [file.name for file in tmp_path.iterdir()] == ["policy.json"]
    assert set(json.loads(path.read_text())) - {"picks"} == set(VALID)


def test_a_run_has_its_own_copy(tmp_path):
    assert policies.of_run("", tmp_path) == ""
    assert policies.of_run("mine.json", tmp_path) == "mine.json"
    kept = policies.load("randaugment(1,5)")
    policies.save(kept, policies.path_in(tmp_path))
    assert policies.of_run("", tmp_path) == ""
    assert policies.load(policies.of_run("moved/mine.json", tmp_path)) == kept


def test_save_leaves_nothing_half_written(tmp_path):
    (tmp_path / "policy.json").mkdir()  # a file cannot replace it
    with pytest.raises(UserError, match=r"policy\.json: expected a file that can be written"):
        policies.save(one_step("invert"), tmp_path / "policy.json")
    assert [file.name for file in tmp_path.iterdir()] == ["policy.json"]
    with pytest.raises(UserError, match="expected a file that can be written"):
        policies.save(one_step("invert"), tmp_path / "nowhere" / "policy.json")


STEP = ["rotate", 0.8, 0.5]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("", "expected JSON"),
        ("{", "expected JSON"),
        ("__import__('os')", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ('{"format": 1, "format": 1}', "a key that occurs twice"),
        (b"\xff\xfe{}", "expected a readable text file"),
        (" " * 1_000_001, "expected at most 1000000 bytes"),
        ([[STEP]], r"the file: expected an object \{\.\.\.\}. Received: \[\[\['rotate'"),
        ({}, "expected the key 'format'"),
        ({"format": "amdim_tf policy", "version": 1}, "expected the key 'sub_policies'"),
        ({**VALID, "format": "policy"}, "format: expected 'amdim_tf policy'. Received: 'policy'"),
        ({**VALID, "version": 2}, "version: expected 1. Received: 2"),
        ({**VALID, "version": True}, "version: expected 1. Received: True"),
        ({**VALID, "picks": 0}, "picks: expected a whole number from 1 to 10. Received: 0"),
        ({**VALID, "picks": 2.0}, "picks: expected a whole number from 1 to 10. Received: 2.0"),
        ({**VALID, "seed": 0}, "keys: expected .* only. Received: 'seed'"),
        ({**VALID, "sub_policies": {}}, r"sub_policies: expected a list of 1 to .* Received: \{\}"),
        ({**VALID, "sub_policies": []}, "sub_policies: expected a list of 1 to .* Received: 0"),
        ({**VALID, "sub_policies": [[STEP]] * 10_001}, "1 to 10000 sub-policies. Received: 10001"),
        ({**VALID, "sub_policies": [[STEP], 5]}, "sub-policy 2: expected a list of .* Received: 5"),
        ({**VALID, "sub_policies": [[STEP], []]}, "sub-policy 2: expected a list of .*: 0"),
        ({**VALID, "sub_policies": [[STEP] * 11]}, "sub-policy 1: expected .* 10 steps.*: 11"),
        ({**VALID, "sub_policies": [[STEP, STEP[:2]]]}, r"sub-policy 1, step 2: expected \[oper"),
        ({**VALID, "sub_policies": [[STEP, "rotate"]]}, "sub-policy 1, step 2: .* 'rotate'"),
        ({**VALID, "sub_policies": [[["flip", 1, 1]]]}, "step 1: expected an operation .* 'flip'"),
        ({**VALID, "sub_policies": [[["Rotate", 1, 1]]]}, "expected an operation .* 'Rotate'"),
        ({**VALID, "sub_policies": [[[["rotate"], 1, 1]]]}, r"an operation .*\['rotate'\]"),
        ({**VALID, "sub_policies": [[["rotate", 1.5, 1]]]}, "a probability from 0 to 1. .*: 1.5"),
        ({**VALID, "sub_policies": [[["rotate", "1", 1]]]}, "a probability from 0 to 1. .*: '1'"),
        ({**VALID, "sub_policies": [[["rotate", True, 1]]]}, "a probability .*: True"),
        ({**VALID, "sub_policies": [[["rotate", 1, -0.1]]]}, "a level from 0 to 1. .*: -0.1"),
        ({**VALID, "sub_policies": [[["rotate", 1, 9]]]}, "a level from 0 to 1. Received: 9"),
        ({**VALID, "sub_policies": [[["rotate", 1, float("nan")]]]}, "a level .* Received: nan"),
        ({**VALID, "sub_policies": [[["rotate", 1, None]]]}, "a level .* Received: None"),
        ({**VALID, "sub_policies": [[["rotate", 1, 10**400]]]}, "a level .* Received: 1000"),
    ],
)
def test_mistakes_in_a_file(document, message, tmp_path):
    path = tmp_path / "bad.json"
    if isinstance(document, bytes):
        path.write_bytes(document)
    else:
        path.write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(UserError, match=message) as caught:
        policies.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_no_file(tmp_path):
    for path in (tmp_path / "no.json", tmp_path / "directory.json", tmp_path / "a\0b.json"):
        if path.name == "directory.json":
            path.mkdir()
        with pytest.raises(UserError, match="expected a file; there is none"):
            policies.load(path)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("rotate"),
    lambda items: st.lists(items) | st.dictionaries(st.text(), items),
    max_leaves=15,
)
NEARLY_VALID = st.fixed_dictionaries(
    {
        "format": st.just(VALID["format"]) | JSON_VALUES,
        "version": st.just(1) | JSON_VALUES,
        "sub_policies": JSON_VALUES
        | st.lists(
            st.lists(
                JSON_VALUES
                | st.tuples(st.sampled_from(OPERATIONS) | st.text(), JSON_VALUES, JSON_VALUES)
                | st.tuples(st.sampled_from(OPERATIONS), st.floats(0, 1), st.floats(0, 1))
            )
        ),
    },
    optional={"picks": JSON_VALUES | st.integers(0, 12), "more": JSON_VALUES},
)


@settings(max_examples=200, deadline=None)
@given(JSON_VALUES.map(json.dumps) | NEARLY_VALID.map(json.dumps) | st.text() | st.binary())
def test_any_file_is_a_policy_or_a_user_error(content):
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "policy.json"
        path.write_bytes(
            content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        )
        try:
            policy = policies.load(path)
        except UserError as error:
            assert str(error).startswith(f"{path}: ")
            assert "\n" not in str(error)
            return
        assert isinstance(policy, Policy)
        policies.save(policy, path)
        assert policies.load(path) == policy


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text("randaugment(),0123456789 ").map("randaugment".__add__))
def test_any_name_is_a_policy_or_a_user_error(name):
    try:
        assert isinstance(policies.load(name), Policy)
    except UserError as error:
        assert "\n" not in str(error)


# Draws


def test_draws_are_a_function_of_key_and_row():
    policy = policies.load("autoaugment_cifar10")
    drawn = policies.draw(policy, [3, 4], 64)
    assert drawn.operation.shape == drawn.parameter.shape == [64, 2]
    assert drawn.center.shape == [64, 2, 2]
    for batch in (0, 1, 7, 63):
        for values, fewer in zip(drawn, policies.draw(policy, [3, 4], batch), strict=True):
            np.testing.assert_array_equal(values[:batch], fewer)
    others = policies.draw(policy, [3, 5], 64)
    assert np.mean(others.operation.numpy() != drawn.operation.numpy()) > 0.3
    in_graph = tf.function(functools.partial(policies.draw, policy))(
        tf.constant([3, 4]), tf.constant(64)
    )
    assert in_graph.operation.shape[1] == 2
    for values, same in zip(drawn, in_graph, strict=True):
        np.testing.assert_array_equal(values, same)


@pytest.mark.parametrize("name", TABLES)
def test_frequencies_of_a_table(name):
    count = 20_000
    policy = policies.load(name)
    drawn = policies.draw(policy, [1, 2], count)
    expected = np.zeros([len(OPERATIONS), len(OPERATIONS)])
    for first, second in policy.sub_policies:
        for one, p_one in ((first.operation, first.probability), (None, 1 - first.probability)):
            for two, p_two in (
                (second.operation, second.probability),
                (None, 1 - second.probability),
            ):
                place = [OPERATIONS.index(each or "identity") for each in (one, two)]
                expected[tuple(place)] += count * p_one * p_two / 25
    expected[expected < 1e-6] = 0  # 1 - 0.9 - 0.1
    observed = np.zeros_like(expected)
    np.add.at(observed, tuple(drawn.operation.numpy().T), 1)
    assert chi_square(observed.ravel(), expected.ravel()) < 1


def test_signs_and_centres():
    policy = always(policies.load("autoaugment_svhn"))
    drawn = policies.draw(policy, [5, 6], 20_000)
    signed = np.isin(drawn.operation, [OPERATIONS.index(name) for name in SIGNED])
    negative = drawn.parameter.numpy() < 0
    assert not np.any(negative[~signed])
    for name in SIGNED:
        own = negative[drawn.operation.numpy() == OPERATIONS.index(name)]
        assert chi_square([own.sum(), len(own) - own.sum()], [len(own) / 2] * 2) < 1
    cells = np.floor(drawn.center.numpy().reshape(-1, 2) * 4).astype(int)
    observed = np.bincount(cells[:, 0] * 4 + cells[:, 1], minlength=16)
    assert chi_square(observed, [len(cells) / 16] * 16) < 1


def test_frequencies_of_randaugment():
    drawn = policies.draw(policies.load("randaugment(2,9)"), [7, 8], 40_000)
    observed = np.zeros([len(OPERATIONS)] * 2)
    np.add.at(observed, tuple(drawn.operation.numpy().T), 1)
    listed = [name not in ("invert", "cutout") for name in OPERATIONS]
    expected = 40_000 / 196 * np.outer(listed, listed)
    assert chi_square(observed.ravel(), expected.ravel()) < 1
    factors = drawn.parameter.numpy()[drawn.operation.numpy() == OPERATIONS.index("color")]
    np.testing.assert_allclose(np.unique(factors), [0.73, 1.27], rtol=1e-6)
    assert chi_square([np.sum(factors > 1), np.sum(factors < 1)], [len(factors) / 2] * 2) < 1


def test_probabilities_0_and_1():
    images = photographs(8)
    for probability, operation in ((0.0, "identity"), (1.0, "invert")):
        drawn = policies.draw(one_step("invert", 0.0, probability), [0, 0], 5000)
        assert np.all(drawn.operation.numpy() == OPERATIONS.index(operation))
    drawn = policies.draw(one_step("invert", 0.0, 0.0), [0, 0], 8)
    np.testing.assert_array_equal(policies.apply(images, drawn), images)
    drawn = policies.draw(one_step("invert", 0.0, 1.0), [0, 0], 8)
    np.testing.assert_array_equal(policies.apply(images, drawn), 255 - images)


def test_sub_policies_of_different_lengths():
    policy = Policy(((Step("invert", 1.0, 0.0),), (Step("equalize", 1.0, 0.0),) * 3))
    operations = policies.draw(policy, [0, 1], 100).operation.numpy()
    assert operations.shape == (100, 3)
    invert, equalize = OPERATIONS.index("invert"), OPERATIONS.index("equalize")
    assert {tuple(row) for row in operations} == {(invert, 0, 0), (equalize,) * 3}


# Operations


def plain(image, operation, value, center):
    """One step of one image [1, H, W, 3] with the plain operations of one name each."""
    height, width = image.shape[1:3]
    enhancements = ("contrast", "color", "brightness", "sharpness")
    if operation in ("autocontrast", "invert", "equalize"):
        return getattr(image_ops, operation)(image)
    if operation in enhancements:
        return tf.floor(getattr(image_ops, operation)(image, [value]) + 1e-3)
    if operation in ("shear_x", "shear_y", "rotate"):
        return getattr(geometry_ops, operation)(image, [value], GREY)
    if operation == "translate_x":
        return geometry_ops.translate_x(image, [value * width], GREY)
    if operation == "translate_y":
        return geometry_ops.translate_y(image, [value * height], GREY)
    if operation == "solarize":
        return image_ops.solarize(image, [value])
    if operation == "posterize":
        return image_ops.posterize(image, [int(value)])
    if operation == "cutout":
        x, y = center[0] * width - 0.5, center[1] * height - 0.5
        half_side = value * min(height, width) / 2
        return geometry_ops.cutout(image, [x], [y], [half_side], GREY)
    assert operation == "identity"
    return image


def test_apply_is_each_image_by_itself():
    batch = 96
    images = photographs(batch, 20, 26)
    steps = [Step(name, 0.9, level) for name in OPERATIONS for level in (0.2, 0.8)]
    policy = Policy(tuple((step,) for step in steps), picks=3)
    drawn = policies.draw(policy, [9, 9], batch)
    assert len(np.unique(drawn.operation)) == len(OPERATIONS)
    expected = []
    for row in range(batch):
        image = tf.constant(images[row : row + 1])
        for slot in range(3):
            name = OPERATIONS[drawn.operation[row, slot]]
            image = plain(image, name, drawn.parameter[row, slot], drawn.center[row, slot])
        expected.append(image)
    result = policies.apply(images, drawn)
    np.testing.assert_array_equal(result, tf.concat(expected, 0))
    np.testing.assert_array_equal(result, np.round(result))


def pillow(image, operation, value):
    """The same step with Pillow."""
    width, height = image.size
    affine = {
        "shear_x": (1, value, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, value, 1, 0),
        "translate_x": (1, 0, -value * width, 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, -value * height),
    }
    if operation in affine:
        return image.transform(image.size, Image.AFFINE, affine[operation], fillcolor=GREY)
    if operation == "rotate":
        return image.rotate(value, fillcolor=GREY)
    if operation == "solarize":
        return ImageOps.solarize(image, value)
    if operation == "posterize":
        return ImageOps.posterize(image, int(value))
    if operation in ("autocontrast", "invert", "equalize"):
        return getattr(ImageOps, operation)(image)
    return getattr(ImageEnhance, operation.capitalize())(image).enhance(value)


@pytest.mark.parametrize("name", TABLES)
def test_sub_policies_against_pillow(name):
    """Every sub-policy with both steps, within a level on 99% of the values of each image."""
    images = photographs(4)
    for number, steps in enumerate(always(policies.load(name)).sub_policies):
        drawn = policies.draw(Policy((steps,)), [number, 0], len(images))
        result = policies.apply(images, drawn).numpy()
        for row, image in enumerate(images):
            expected = Image.fromarray(image.astype(np.uint8))
            for slot, step in enumerate(steps):
                expected = pillow(expected, step.operation, float(drawn.parameter[row, slot]))
            near = np.abs(result[row] - np.asarray(expected, np.float32)) <= 1
            assert near.mean() >= 0.99, (number, steps, row)


def test_values_are_rounded_first():
    images = photographs(2) + np.float32(0.4)
    drawn = policies.draw(one_step("identity"), [0, 0], 2)
    np.testing.assert_array_equal(policies.apply(np.clip(images, 0, 255), drawn), photographs(2))


def test_fill_colour():
    drawn = policies.draw(one_step("translate_x", 1.0), [0, 0], 2)
    result = policies.apply(photographs(2), drawn, fill=(1, 2, 3)).numpy()
    edge = np.where(drawn.parameter.numpy() > 0, 0, -1).ravel()
    for image, column in zip(result, edge, strict=True):
        np.testing.assert_array_equal(image[:, column], np.tile([1, 2, 3], [48, 1]))


def test_each_operation_sees_only_its_own_images(monkeypatch):
    seen = []

    def equalize(images, original=image_ops.equalize):
        seen.append(images.shape[0])
        return original(images)

    monkeypatch.setattr(image_ops, "equalize", equalize)
    drawn = policies.draw(policies.load("autoaugment_imagenet"), [2, 2], 50)
    policies.apply(photographs(50, 8, 8), drawn)
    count = np.sum(drawn.operation.numpy() == OPERATIONS.index("equalize"), axis=0)
    assert seen == count.tolist()
    assert 0 < sum(seen) < 60


def test_rows_can_be_sliced_off():
    images = photographs(12, 16, 16)
    drawn = policies.draw(policies.load("randaugment(2,20)"), [4, 4], 12)
    whole = policies.apply(images, drawn)
    some = policies.apply(images[3:9], rows_of(drawn, slice(3, 9)))
    np.testing.assert_array_equal(whole[3:9], some)


@pytest.mark.parametrize("batch", [0, 1])
def test_batches_of_none_and_one(batch):
    policy = policies.load("randaugment(2,20)")
    for key in range(10):
        drawn = policies.draw(policy, [key, 0], batch)
        result = policies.apply(photographs(1, 16, 16)[:batch], drawn)
        assert result.shape == [batch, 16, 16, 3]


def test_in_a_dataset_with_unknown_sizes():
    images = photographs(9, 16, 18)
    policy = policies.load("autoaugment_cifar10")
    pieces = (images[:4], images[4:4], images[4:8], images[8:])  # 4, 0, 4 and 1 images
    dataset = tf.data.Dataset.from_generator(
        lambda: enumerate(pieces),
        output_signature=(
            tf.TensorSpec([], tf.int32),
            tf.TensorSpec([None, None, None, 3], tf.float32),
        ),
    )

    def augment(step, batch):
        return policies.apply(batch, policies.draw(policy, [1, step], tf.shape(batch)[0]))

    mapped = dataset.map(augment)
    assert mapped.element_spec.shape.as_list() == [None, None, None, 3]
    for step, (piece, result) in enumerate(zip(pieces, mapped, strict=True)):
        expected = policies.apply(piece, policies.draw(policy, [1, step], len(piece)))
        np.testing.assert_array_equal(result, expected)
