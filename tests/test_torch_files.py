"""Reading .pth and .npz files: PyTorch's own, handmade ones, and all sorts that are refused."""

import contextlib
import pickle
import struct
import zipfile

import numpy as np
import pytest
from pth_files import (
    FORMATS,
    PthWriter,
    assert_same,
    golden_state,
    hostile_programs,
    needs_torch,
    read_all,
    refused,
    write_npz,
    write_old,
    write_zip,
)

from amdim_tf import reference_checkpoints, torch_files
from amdim_tf.errors import UserError

PROGRAMS = tuple(hostile_programs("marker"))


@needs_torch
@pytest.mark.parametrize("kind", FORMATS)
def test_the_handmade_files_are_pytorchs(kind, tmp_path):
    import torch

    state, hyper = golden_state()
    path = PthWriter().write(tmp_path / "a.pth", {"model": state, "hyperparams": hyper}, kind)
    value = torch.load(path, weights_only=True, map_location="cpu")
    assert value["hyperparams"] == hyper
    assert_same({name: tensor.numpy() for name, tensor in value["model"].items()}, state)


@needs_torch
def test_tensors_that_share_and_step_over_numbers(tmp_path):
    import torch

    rows = torch.arange(24.0).reshape(4, 6)
    value = {"columns": rows.T[1:], "rows": rows[:, ::2], "none": rows[:0], "one": rows[2, 3]}
    for zipped in (True, False):
        torch.save(value, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
        read = torch_files.read_pth(tmp_path / "a.pth")
        assert_same(
            {name: tensor.read() for name, tensor in read.items()},
            {name: tensor.numpy() for name, tensor in value.items()},
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_files_are_not_run(name, tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "a.pth"
    program = hostile_programs(marker)[name]
    for place in ("zip", "old", "first", "after the tensors"):
        if place == "zip":
            write_zip(path, program)
        elif place == "old":
            write_old(path, program)
        elif place == "first":
            path.write_bytes(program)
        else:
            write_old(path, b"\x80\x02}.")
            path.write_bytes(path.read_bytes().removesuffix(pickle.dumps([], 2)) + program)
        line = refused(reference_checkpoints.load, path)
        assert "expected a PyTorch checkpoint of tensors and plain values" in line
        assert not marker.exists()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_hostile_files_are_live(name, tmp_path):
    """Otherwise the test above would say nothing."""
    marker = tmp_path / "marker"
    with contextlib.suppress(TypeError, ValueError):  # what comes after the call does not matter
        pickle.loads(hostile_programs(marker)[name])
    assert marker.exists()


@pytest.mark.parametrize("key", ["model", "hyperparams"])
@pytest.mark.parametrize("kind", FORMATS)
def test_hostile_code_beside_tensors(kind, key, tmp_path):
    state, hyper = golden_state()
    marker = tmp_path / "marker"
    call = b"cposix\nsystem\n" + PthWriter().value(f"touch {marker}") + b"\x85R"
    value = {"model": state, "hyperparams": hyper}
    value[key] = {**value[key], "last": call}
    path = PthWriter().write(tmp_path / "a.pth", value, kind)
    line = refused(reference_checkpoints.load, path)
    assert "names posix.system, which tensors do not need; nothing was run" in line
    assert not marker.exists()


def _lie(identity=None, offset=0, shape=(2, 3), strides=(3, 1)):
    """A dict with one tensor in a storage of 6 numbers, described wrongly."""
    identity = identity or ("storage", b"ctorch\nFloatStorage\n", "0", "cpu", 6)
    return PthWriter().tensor_of(identity, offset, shape, strides)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (_lie(shape=(2, 4)), "a tensor of shape (2, 4) in a storage of 6 numbers"),
        (_lie(offset=1), "a tensor of shape (2, 3) in a storage of 6 numbers"),
        (_lie(strides=(4, 1)), "a tensor of shape (2, 3) in a storage of 6 numbers"),
        (_lie(shape=(10**12,), strides=(0,)), "a tensor of shape (1000000000000,)"),
        (_lie(shape=(2**61, 2**61), strides=(0, 0)), "a tensor of shape"),
        (_lie(shape=(2**70,), strides=(1,)), "damaged"),
        (_lie(shape=(-2, -3)), "damaged"),
        (_lie(strides=(-3, 1)), "damaged"),
        (_lie(offset=-1), "damaged"),
        (_lie(shape=(2, 3, 1)), ""),
        (_lie(shape=None), "damaged"),
        (_lie(identity=("storage", b"ctorch\nFloatStorage\n", "0", "cpu", 10**11)), "a storage 0"),
        (_lie(identity=("storage", b"ctorch\nFloatStorage\n", "../x", "cpu", 6)), ""),
        (_lie(identity=("storage", "ctorch\nFloatStorage\n", "0", "cpu", 6)), "unknown kind"),
        (_lie(identity=("storage", b"ctorch\nFloatStorage\n", "0", "cpu")), "damaged"),
        (_lie(identity="storage"), "damaged"),
        (b"ctorch\nFloatStorage\n)R", "a call that tensors do not need"),
        (b"X\x05\x00\x00\x00posix)R", "a call that tensors do not need"),
        (b"}" + b"N" + b"Ns", "keys are neither texts nor whole numbers"),
        (b"q\x05h\x06", "damaged"),
        (b"NNa", "damaged"),
        (b"tttt", "damaged"),
    ],
)
def test_tensors_that_lie(lie, message, kind, tmp_path):
    writer = PthWriter()
    writer.storages.append(np.arange(6, dtype=np.float32))
    path = writer.write(tmp_path / "a.pth", {"model": {"a": lie}}, kind)
    assert message in refused(reference_checkpoints.load, path)


def test_a_true_tensor_is_not_a_lie(tmp_path):
    for kind in FORMATS:
        writer = PthWriter()
        writer.storages.append(np.arange(6, dtype=np.float32))
        path = writer.write(tmp_path / "a.pth", {"model": {"a": _lie()}}, kind)
        np.testing.assert_array_equal(read_all(path)["a"], np.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("kind", [*FORMATS, "npz"])
def test_truncated_and_altered_files(kind, tmp_path):
    """Each gives one line or, where the damage does not matter, tensors; no other exception."""
    state = {"encoder.a": np.arange(5, dtype=np.float32), "encoder.b": np.ones(2, np.int64)}
    path = tmp_path / "a.file.npz"
    if kind == "npz":
        write_npz(path, state)
    else:
        PthWriter().write(path, {"model": state, "hyperparams": {"ndf": 4, "tclip": 20.0}}, kind)
    whole = path.read_bytes()
    assert set(read_all(path)) == {"encoder.module.a", "encoder.module.b"}
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        assert str(path) in refused(read_all, path)
    generator = np.random.default_rng(0)
    outcomes = []
    for _ in range(400):
        altered = bytearray(whole)
        for place in generator.integers(0, len(whole), generator.integers(1, 4)):
            altered[place] = generator.integers(256)
        path.write_bytes(bytes(altered))
        try:
            read_all(path)
        except UserError as error:
            assert "\n" not in str(error)
            outcomes.append(False)
        else:
            outcomes.append(True)
    assert 0 < sum(outcomes) < len(outcomes)


def test_keys_of_storages_that_are_no_texts(tmp_path):
    write_old(tmp_path / "a.pth", b"\x80\x02}.")
    whole, keys = (tmp_path / "a.pth").read_bytes(), pickle.dumps([], 2)
    assert whole.endswith(keys)
    # A list of one tuple that is doubled 40 times: to show it would take for ever.
    doubled = b"".join(bytes([ord("q"), i, ord("h"), i]) + b"\x86" for i in range(40))
    hostile = whole.removesuffix(keys) + b"\x80\x02])" + doubled + b"a."
    (tmp_path / "a.pth").write_bytes(hostile)
    assert "a damaged list of storages" in refused(torch_files.read_pth, tmp_path / "a.pth")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b"", "expected a PyTorch checkpoint (.pth) or an .npz file. Received: an empty file."),
        (b".", "Received: a damaged pickle."),
        (b"c\xff\xfe\nb\n.", "Received: a damaged file, or one of another kind."),
        (b"not a checkpoint\n", "expected a PyTorch checkpoint"),
        (b"{\"model\": 1}", "expected a PyTorch checkpoint"),
        (pickle.dumps({"model": {}}, 2), "a pickle that torch.save has not written"),
        (pickle.dumps(np.zeros(3), 2), "which tensors do not need; nothing was run"),
    ],
)  # fmt: skip
def test_files_that_are_no_checkpoints(contents, message, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(contents)
    assert message in refused(reference_checkpoints.load, path)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "value", [None, 3, "model", {}, {"model": None}, {"model": {}}, {"model": {"a": 1}}, {"a": 1}]
)
def test_values_that_are_no_state_dicts(value, kind, tmp_path):
    path = PthWriter().write(tmp_path / "a.pth", value, kind)
    assert "expected a state dict of tensors" in refused(reference_checkpoints.load, path)


def _npy(header, data=b""):
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}", b"0" * 8),
         "a.npy of shape (1000000000000,) in"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", b"0" * 8), "shape (1,)"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,)}", b""), "of shape (-2,)"),
        (_npy("{'descr': '|O', 'fortran_order': False, 'shape': ()}", pickle.dumps(1)),
         "pickled objects, which are not read"),
        (_npy("{'descr': '<f4', 'fortran_order': False, 'shape': ("), "expected an .npz file"),
        (_npy("__import__('os').system('true')"), "expected an .npz file"),
        (b"\x93NUMPY\x03\x00", "a later format"),
        (b"", "expected an .npz file of plain arrays"),
    ],
)  # fmt: skip
def test_arrays_that_lie(entry, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("state_dict/a.npy", entry)
    assert message in refused(reference_checkpoints.load, tmp_path / "a.npz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("names", [("a.npy", "a.npy"), ("a.npy", "a")])
def test_an_array_twice(names, tmp_path):
    entry = _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", b"0" * 4)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in names:
            archive.writestr(f"state_dict/{name}", entry)
    line = refused(reference_checkpoints.load, tmp_path / "a.npz")
    assert "Received: an archive with the entry state_dict/a twice." in line


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_storage_twice(tmp_path):
    state = {"a": np.zeros(2, np.float32)}
    path = PthWriter().write(tmp_path / "a.pth", state, "zip")
    with zipfile.ZipFile(path, "a") as archive:
        (name,) = [name for name in archive.namelist() if "/data/" in name]
        archive.writestr(name, np.ones(2, np.float32).tobytes())
    assert f"the entry {name} twice" in refused(reference_checkpoints.load, path)


def test_compressed_and_foreign_archives(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + b"\0" * 1000)
    assert "compressed" in refused(reference_checkpoints.load, tmp_path / "a.pth")
    with zipfile.ZipFile(tmp_path / "b.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "0 entries data.pkl" in refused(reference_checkpoints.load, tmp_path / "b.pth")
