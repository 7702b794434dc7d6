"""The authors' checkpoints: names, shapes, and what is inferred from them."""

import numpy as np
import pytest
from conftest import DATA, GOLDEN
from pth_files import FORMATS, PthWriter, assert_same, golden_state, read_all, refused, write_npz

from amdim_tf import reference_checkpoints
from amdim_tf.reference_shapes import LOCATION_MASKS, reference_shapes

STEM = "encoder.module.layer_list.0.conv.weight"
CONV2 = "encoder.module.layer_list.5.layer_list.0.conv2.weight"


@pytest.mark.parametrize("name", GOLDEN)
def test_shapes_are_the_references(name):
    checkpoint = reference_checkpoints.load(DATA / f"{name}.npz")
    shapes = reference_shapes(reference_checkpoints.infer_architecture(checkpoint))
    state, _ = golden_state(name)
    assert list(shapes.items()) == [(key, value.shape) for key, value in state.items()]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "form", ["authors", "params", "bare", "data_parallel", "unwrapped", "encoder"]
)
def test_forms_of_the_dict(form, kind, tmp_path):
    state, hyper = golden_state()
    expected = dict(state)
    if form == "encoder":
        expected = {name: v for name, v in state.items() if name.startswith("encoder.")}
    rename = {
        "data_parallel": lambda name: f"module.{name}",
        "unwrapped": lambda name: name.replace("encoder.module.", "encoder."),
        "encoder": lambda name: name.removeprefix("encoder."),
    }.get(form, str)
    value = {rename(name): tensor for name, tensor in expected.items()}
    if form in ("authors", "params"):
        value[LOCATION_MASKS] = np.eye(25, dtype=np.uint8).reshape(25, 1, 5, 5)
        key = "hyperparams" if form == "authors" else "params"
        value = {"model": value, key: hyper, "cursor": {"info_epoch": 150, "info_step": None}}
    path = PthWriter().write(tmp_path / "a.pth", value, kind)
    tensors = read_all(path)
    tensors.pop(LOCATION_MASKS, None)
    assert_same(tensors, expected)
    checkpoint = reference_checkpoints.load(path)
    assert checkpoint.hyperparameters == (hyper if form in ("authors", "params") else {})
    architecture = reference_checkpoints.infer_architecture(checkpoint)
    assert architecture == (32, 4, 32, 2, 0 if form == "encoder" else 10)
    reference_checkpoints.check_tensors(checkpoint, architecture)


@pytest.mark.parametrize("name", ["reference_32", "reference_32_bn"])
def test_use_bn_without_hyperparameters(name, tmp_path):
    state, hyper = golden_state(name)
    source = reference_checkpoints.load(write_npz(tmp_path / "a.npz", state))
    architecture = reference_checkpoints.infer_architecture(source)
    settings, origins = reference_checkpoints.infer_settings(source, architecture, {})
    assert settings["use_bn"] == bool(hyper["use_bn"])
    assert "batches" in origins["use_bn"]
    uncounted = {key: value for key, value in state.items() if not key.endswith("tracked")}
    source = reference_checkpoints.load(write_npz(tmp_path / "b.npz", uncounted))
    reference_checkpoints.check_tensors(source, architecture)
    arguments = (reference_checkpoints.infer_settings, source, architecture)
    assert "--use_bn: expected true or false" in refused(*arguments, {})
    settings, _ = reference_checkpoints.infer_settings(*arguments[1:], {"use_bn": True})
    assert settings["use_bn"] is True


@pytest.mark.parametrize(
    ("image_size", "classes", "dataset"),
    [(32, 10, "cifar10"), (32, 100, "cifar100"), (64, 10, "stl10"), (128, 1000, "imagenet2012"),
     (128, 205, "places205"), (128, 10, None), (32, 0, None)],
)  # fmt: skip
def test_data_set(image_size, classes, dataset):
    checkpoint = reference_checkpoints.ReferenceCheckpoint("a.pth", "", {}, {"use_bn": False})
    architecture = reference_checkpoints.Architecture(image_size, 4, 32, 2, classes)
    arguments = (reference_checkpoints.infer_settings, checkpoint, architecture)
    if dataset is None:
        assert "--dataset: expected, since a.pth does not tell" in refused(*arguments, {})
    else:
        assert reference_checkpoints.infer_settings(*arguments[1:], {})[0]["dataset"] == dataset
    settings, origins = reference_checkpoints.infer_settings(*arguments[1:], {"dataset": "folder"})
    assert settings["dataset"] == "folder" and "dataset" not in origins


@pytest.mark.parametrize(
    ("hyper", "given", "message"),
    [
        ({}, {"ndf": 8}, "--ndf: expected 4, as "),
        ({}, {"image_size": 64}, "--image_size: expected 32, as "),
        ({"use_bn": 1}, {"use_bn": False}, "--use_bn: expected True, as "),
        (
            {"n_depth": 3},
            {},
            "hyper-parameters that fit its tensors, n_depth=2. Received: n_depth=3",
        ),
        ({"encoder_size": "x\n"}, {}, "encoder_size=32. Received: encoder_size=x"),
        ({"tclip": float("nan")}, {}, "expected a number tclip of at least 0. Received: nan"),
        ({"tclip": "20"}, {}, "expected a number tclip of at least 0. Received: '20'"),
        ({"use_bn": "x"}, {}, "0, 1, True or False as hyper-parameter use_bn. Received: 'x'."),
        ({"use_bn": float("nan")}, {}, "as hyper-parameter use_bn. Received: nan."),
        ({"use_bn": -1}, {"use_bn": True}, "as hyper-parameter use_bn. Received: -1."),
        ({"use_bn": 1.0}, {}, "as hyper-parameter use_bn. Received: 1.0."),
    ],
)
def test_contradictions(hyper, given, message, tmp_path):
    state, _ = golden_state()
    named = {f"hyper/{name}": value for name, value in hyper.items()}
    checkpoint = reference_checkpoints.load(write_npz(tmp_path / "a.npz", state, **named))
    architecture = reference_checkpoints.infer_architecture(checkpoint)
    assert message in refused(reference_checkpoints.infer_settings, checkpoint, architecture, given)


# Opcodes of values that take for ever to be shown, are too deep for it, too large, or no number.
_DOUBLED = b")" + b"".join(bytes([ord("q"), i, ord("h"), i]) + b"\x86" for i in range(40))
_ODD_VALUES = {"doubled": _DOUBLED, "nested": b")" + b"\x85" * 5000, "large": 2**2000, "list": b"]"}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["ndf", "encoder_size", "tclip"])
@pytest.mark.parametrize("value", _ODD_VALUES)
def test_hyperparameters_that_are_no_numbers(value, name, kind, tmp_path):
    state = {"encoder.a": np.zeros(2, np.float32)}
    document = {"model": state, "hyperparams": {name: _ODD_VALUES[value], "n_depth": 2}}
    path = PthWriter().write(tmp_path / "a.pth", document, kind)
    line = refused(reference_checkpoints.load, path)
    assert f"expected a number as hyper-parameter {name}." in line
    document["hyperparams"] = {"note": _ODD_VALUES[value], "n_depth": 2}
    path = PthWriter().write(tmp_path / "b.pth", document, kind)
    assert reference_checkpoints.load(path).hyperparameters == {"n_depth": 2}


@pytest.mark.parametrize(
    "value", [np.datetime64("NaT"), np.array("x" * 1000), np.zeros(2), np.longdouble(1)]
)
def test_scalars_that_are_no_numbers(value, tmp_path):
    state, _ = golden_state()
    path = write_npz(tmp_path / "a.npz", state, **{"hyper/tclip": value})
    assert "expected a number as hyper-parameter tclip." in refused(
        reference_checkpoints.load, path
    )
    path = write_npz(tmp_path / "b.npz", state, **{"hyper/note": value, "hyper/ndf": 4})
    assert reference_checkpoints.load(path).hyperparameters == {"ndf": 4}


def _changed(**changes):
    """A golden state dict in which names (with _ for .) have other values; None removes one."""
    state, _ = golden_state()
    for name, value in changes.items():
        if value is None:
            del state[name]
        else:
            state[name] = value
    return state


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({STEM: None}, f"expected an AMDIM encoder with a tensor {STEM} of 4 dimensions"),
        ({STEM: np.zeros(3, np.float32)}, "Received: shape (3,)"),
        ({CONV2: None}, f"Received: missing 1: {CONV2}."),
        ({CONV2: np.zeros((16, 16, 1, 2), np.float32)},
         f"of another shape 1: {CONV2} (16, 16, 1, 2) instead of (16, 16, 1, 1)."),
        ({CONV2: np.zeros((16, 16, 1, 1), np.int64)}, f"of another type 1: {CONV2} int64."),
        ({f"b{i}": np.zeros(1, np.float32) for i in range(5)}, "extra 5: b0, b1, b2 and 2 more."),
        ({"a\nb\x1b[0m": np.zeros(1, np.float32)}, r"extra 1: 'a b\x1b[0m'."),
        ({LOCATION_MASKS: np.zeros((25, 1, 5), np.uint8)}, f"shape 1: {LOCATION_MASKS}"),
        # One small tensor says that the model is enormous: it is not built.
        ({STEM: np.zeros((8192, 3, 3, 3), np.float32)}, "of another shape 64"),
        ({"evaluator.block_glb_lin.block_forward.2.weight": None}, "expected an AMDIM encoder"),
    ],
)  # fmt: skip
def test_other_tensors(changes, message, tmp_path):
    def check():
        checkpoint = reference_checkpoints.load(write_npz(tmp_path / "a.npz", _changed(**changes)))
        architecture = reference_checkpoints.infer_architecture(checkpoint)
        reference_checkpoints.check_tensors(checkpoint, architecture)

    assert message in refused(check)


@pytest.mark.parametrize("value", [0, 1, False, True])
def test_use_bn_as_a_number(value, tmp_path):
    state, _ = golden_state()
    path = write_npz(tmp_path / "a.npz", state, **{"hyper/use_bn": value})
    checkpoint = reference_checkpoints.load(path)
    architecture = reference_checkpoints.infer_architecture(checkpoint)
    settings, _ = reference_checkpoints.infer_settings(checkpoint, architecture, {})
    assert settings["use_bn"] is bool(value)


def test_a_name_twice(tmp_path):
    name = "encoder.module.layer_list.0.conv.bias"
    state = _changed(**{name.replace("encoder.module", "encoder"): np.zeros(4, np.float32)})
    line = refused(reference_checkpoints.load, write_npz(tmp_path / "a.npz", state))
    assert "expected each tensor once" in line
