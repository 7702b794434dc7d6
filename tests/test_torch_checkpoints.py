"""tools/import_torch_checkpoint.py and tools/export_torch_checkpoint.py: there and back."""

import os
import pathlib
import resource
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from conftest import DATA, GOLDEN, Golden
from pictures import encoded, picture, write_tree
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
    write_zip,
)

import amdim_tf
from amdim_tf import (
    checkpoints,
    config_file,
    reference_checkpoints,
    reference_weights,
    training_loop,
)
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError
from amdim_tf.reference_shapes import LOCATION_MASKS

FILE_SIZE = resource.RLIMIT_FSIZE
TOOLS = pathlib.Path(__file__).resolve().parents[1] / "tools"
sys.path.append(str(TOOLS))
import export_torch_checkpoint as export_tool  # noqa: E402
import import_torch_checkpoint as import_tool  # noqa: E402


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 3), (4,), ()])
def test_layouts_are_inverse(shape):
    array = np.random.default_rng(0).normal(size=shape)
    there = reference_weights.from_reference_layout(array)
    np.testing.assert_array_equal(reference_weights.to_reference_layout(there), array)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_file_to_run_and_back(name, tmp_path, capsys):
    source, model_dir = DATA / f"{name}.npz", tmp_path / "run"
    given = {"dataset": "folder"}
    import_tool.import_checkpoint(str(source), str(model_dir), given, golden=str(source))
    shown = capsys.readouterr().out
    state, hyper = golden_state(name)
    for line in (
        f"golden .npz, {len(state)} tensors, {sum(v.size for v in state.values()):,} numbers",
        f"--image_size={hyper['encoder_size']} from the shapes",
        f"--ndf={hyper['ndf']} from",
        f"--n_rkhs={hyper['n_rkhs']} from",
        f"--n_depth={hyper['n_depth']} from",
        f"--use_bn={bool(hyper['use_bn'])} from the hyper-parameters",
        "classes: 10",
        "verified against",
    ):
        assert line in shown, shown
    model = amdim_tf.load_model(model_dir)
    assert model.settings.score_clip == hyper["tclip"]
    with np.load(source) as numbers:
        encoded = model.encode(numbers["x2"], training=False)
        for scale in (1, 5, 7):
            expected = numbers[f"eval/x2/r{scale}"]
            actual = np.reshape(encoded[f"phi{scale}"], expected.shape)
            np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=0)
    output = tmp_path / "back.npz"
    export_tool.export_checkpoint(str(model_dir), str(output))
    assert_same(read_all(output), state)
    assert reference_checkpoints.load(output).hyperparameters == hyper
    assert {path.name for path in tmp_path.iterdir()} == {"run", "back.npz"}


@needs_torch
@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_of_pytorch_to_run_and_back(kind, tmp_path):
    import torch

    state, hyper = golden_state("reference_32_bn")
    state[LOCATION_MASKS] = np.eye(25, dtype=np.uint8).reshape(25, 1, 5, 5)
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    value = {"model": tensors, "hyperparams": {**hyper, "use_bn": True}, "cursor": {"info_step": 3}}
    source, model_dir = tmp_path / "amdim.pth", tmp_path / "run"
    torch.save(value, source, _use_new_zipfile_serialization=kind == "zip")
    assert_same(read_all(source), state)
    golden = str(DATA / "reference_32_bn.npz")
    import_tool.import_checkpoint(str(source), str(model_dir), {}, golden=golden)
    output = tmp_path / "back.pth"
    export_tool.export_checkpoint(str(model_dir), str(output))
    back = torch.load(output, weights_only=True)
    assert_same({name: tensor.numpy() for name, tensor in back["model"].items()}, state)
    assert back["hyperparams"] == {**hyper, "use_bn": True}
    assert back["cursor"]["info_step"] == 0


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_becomes_single(half, tmp_path, capsys):
    state, hyper = golden_state()
    halved = {n: v.astype(half) if v.dtype == np.float32 else v for n, v in state.items()}
    path = PthWriter().write(tmp_path / "a.pth", {"model": halved, "hyperparams": hyper}, "zip")
    import_tool.import_checkpoint(str(path), str(tmp_path / "run"), {})
    assert ("float16 numbers become float32" in capsys.readouterr().out) == (half is np.float16)
    export_tool.export_checkpoint(str(tmp_path / "run"), str(tmp_path / "back.npz"))
    assert_same(
        read_all(tmp_path / "back.npz"), {n: v.astype(state[n].dtype) for n, v in halved.items()}
    )


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e39])
def test_numbers_that_are_none_are_refused_by_name(value, idle, tmp_path):
    state, hyper = golden_state()
    name = "encoder.module.layer_list." + ("1.bn1.bn.weight" if idle else "0.conv.weight")
    state[name] = state[name].astype(np.float64)
    state[name].flat[3] = value
    others = {f"hyper/{key}": number for key, number in hyper.items()}
    path = write_npz(tmp_path / "a.npz", state, **others)
    line = refused(import_tool.import_checkpoint, str(path), str(tmp_path / "run"), {})
    assert "expected finite float32 numbers. Received: NaN, infinity or a number" in line
    assert f"in {name}." in line
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.slow
def test_an_imported_run_trains_on_and_exports(tmp_path):
    pictures = {f"train/{i % 10}/{i}.png": encoded(picture(32, 32, i), "PNG") for i in range(20)}
    data = write_tree(tmp_path / "data", pictures)
    source, model_dir = DATA / "reference_32.npz", tmp_path / "run"
    given = {"dataset": "folder", "data_dir": str(data), "batch_size": 8, "train_steps": 9,
             "log_steps": 1, "augmentation": "none"}  # fmt: skip
    import_tool.import_checkpoint(str(source), str(model_dir), given, step=7)
    config, _ = config_file.load(config_file.path_in(model_dir))
    model = training_loop.train(config, model_dir)
    assert model.optimizer.iterations.numpy() == 9
    _, facts = config_file.load(config_file.path_in(model_dir))
    assert facts["classes"] == list("0123456789")  # the data set's own names by now
    rows = (model_dir / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows[1:]] == ["8", "9"]
    export_tool.export_checkpoint(str(model_dir), str(tmp_path / "back.npz"))
    state, _ = golden_state()
    back = read_all(tmp_path / "back.npz")
    learned = {name for name in state if not np.array_equal(back[name], state[name])}
    assert learned == set(reference_weights.reference_variables(model))


@pytest.mark.parametrize("classes", [0, 3])
def test_other_classes(classes, tmp_path, capsys):
    source, model_dir = str(DATA / "reference_32.npz"), tmp_path / "run"
    import_tool.import_checkpoint(source, str(model_dir), {}, classes=classes, golden=source)
    shown = capsys.readouterr().out
    assert "left out, for --classes: 10 of the file's classifiers" in shown
    assert ("started afresh: 9" in shown) == (classes == 3)
    assert "logits" not in shown  # which fresh classifiers cannot have
    assert amdim_tf.load_model(model_dir).classes == classes
    export_tool.export_checkpoint(str(model_dir), str(tmp_path / "back.npz"))
    back, (state, _) = read_all(tmp_path / "back.npz"), golden_state()
    encoder = {name: value for name, value in state.items() if name.startswith("encoder.")}
    assert_same({name: value for name, value in back.items() if name in encoder}, encoder)
    assert sum(name.startswith("evaluator.") for name in back) == (10 if classes else 0)


def test_a_run_that_began_here_can_be_exported(tmp_path):
    config = config_lib.make({"ndf": 4, "n_rkhs": 32, "n_depth": 2, "dataset": "cifar10"})
    (tmp_path / "run").mkdir()
    config_file.save(config, config_file.path_in(tmp_path / "run"), {"classes": list("0123456789")})
    checkpoints.Checkpoints(tmp_path / "run", checkpoints.build_model(config, 10)).save(5)
    export_tool.export_checkpoint(str(tmp_path / "run"), str(tmp_path / "a.npz"))
    back, (state, _) = read_all(tmp_path / "a.npz"), golden_state()
    assert {n: (v.shape, v.dtype) for n, v in back.items()} == {
        n: (v.shape, v.dtype) for n, v in state.items()
    }
    idle = "encoder.module.layer_list.1.bn1.bn"
    for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
        assert (back[f"{idle}.{name}"] == value).all()
    import_tool.import_checkpoint(str(tmp_path / "a.npz"), str(tmp_path / "again"), {})
    export_tool.export_checkpoint(str(tmp_path / "again"), str(tmp_path / "b.npz"))
    assert_same(read_all(tmp_path / "b.npz"), back)


def test_no_clipping_stays_no_clipping(tmp_path):
    settings = {"ndf": 4, "n_rkhs": 32, "n_depth": 2, "dataset": "cifar10", "score_clip": 0.0}
    config, classes = config_lib.make(settings), {"classes": list("0123456789")}
    (tmp_path / "run").mkdir()
    config_file.save(config, config_file.path_in(tmp_path / "run"), classes)
    model = checkpoints.build_model(config, 10)
    assert export_tool.hyperparameters_of(model)["tclip"] is None
    checkpoints.Checkpoints(tmp_path / "run", model).save(5)
    export_tool.export_checkpoint(str(tmp_path / "run"), str(tmp_path / "a.npz"))
    import_tool.import_checkpoint(str(tmp_path / "a.npz"), str(tmp_path / "again"), {})
    again, _ = config_file.load(config_file.path_in(tmp_path / "again"))
    assert again.model.score_clip == 0


def test_verify_refuses_other_embeddings(tmp_path):
    other = tmp_path / "other.npz"
    golden = Golden("reference_32")
    import_tool.verify(golden.model, str(DATA / "reference_32.npz"), True)
    for change in (np.nan, 2e-4):
        numbers = {name: value.copy() for name, value in golden.numbers.items()}
        numbers["eval/x1/r5"][1, 2, 3, 4] += change
        np.savez(other, **numbers)
        line = refused(import_tool.verify, golden.model, str(other), True)
        assert "to within 0.0001. Received differences of r1" in line
        assert f" r5 {change:.1e}" in line
    arguments = (str(DATA / "reference_32.npz"), str(tmp_path / "run"), {}, None, 0, str(other))
    assert "Nothing is written" in refused(import_tool.import_checkpoint, *arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"other.npz"}


def test_verify_with_another_file(tmp_path):
    model = checkpoints.build_model(config_lib.make({"ndf": 4, "n_rkhs": 32}), 0)
    line = refused(import_tool.verify, model, str(DATA / "reference_64.npz"), False)
    assert "expected images [N, 32, 32, 3] as x1" in line
    state, _ = golden_state()
    line = refused(import_tool.verify, model, str(write_npz(tmp_path / "a.npz", state)), False)
    assert "--verify: expected numbers x1 in" in line


def run(tool, directory, *flags, code=0):
    command = [sys.executable, str(TOOLS / f"{tool}_torch_checkpoint.py"), *flags]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done


def program_refuses(tool, directory, *flags):
    done = run(tool, directory, *flags, code=2)
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.slow
def test_the_programs(tmp_path):
    golden = DATA / "reference_32_bn.npz"
    flags = (f"--checkpoint={golden}", "--model_dir=deep/run")
    done = run("import", tmp_path, *flags, f"--verify={golden}", "--dataset=cifar100", "--step=3")
    assert "deep/run: written, at step 3" in done.stdout
    assert not done.stderr
    document, _ = config_file.load(tmp_path / "deep/run/config.json")
    assert document.data.dataset == "cifar100"
    run("export", tmp_path, "--model_dir=deep/run", "--output=back.npz")
    assert_same(read_all(tmp_path / "back.npz"), golden_state("reference_32_bn")[0])
    assert "holds something already" in program_refuses("import", tmp_path, *flags)
    assert {path.name for path in tmp_path.iterdir()} == {"deep", "back.npz"}
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint="], "--checkpoint: expected the .pth or .npz file"),
        (["--model_dir="], "--model_dir: expected a directory"),
        (["--model_dir=file"], "--model_dir: expected a new or an empty directory"),
        (["--checkpoint=none.pth"], "none.pth: No such file or directory"),
        (["--checkpoint=."], "Is a directory"),
        (["--checkpoint=file"], "file: expected a PyTorch checkpoint"),
        (["--checkpoint=hostile.pth"], "names posix.system, which tensors do not need"),
        (["--checkpoint=pipe"], "Received: a pipe or a device, which is not read"),
        (["--checkpoint=/dev/zero"], "Received: a pipe or a device, which is not read"),
        (["--step=3000000000"], "--step: expected"),
        (["--ndf=8"], "--ndf: expected 4, as"),
        (["stray"], "stray"),
    ],
)
def test_mistakes_of_import(flags, message, tmp_path):
    (tmp_path / "file").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    write_zip(tmp_path / "hostile.pth", hostile_programs(tmp_path / "marker")["os.system"])
    given = [f"--checkpoint={DATA / 'reference_32.npz'}", "--model_dir=run", *flags]
    assert message in program_refuses("import", tmp_path, *given)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "hostile.pth", "pipe"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model_dir="], "--model_dir: expected the directory of a training run"),
        (["--output="], "--output: expected the file to write"),
        (["--output=a.pkl"], "--output: expected a file that ends in .pth or .npz"),
        (["--output=none/a.npz"], "--output: expected a file in a directory that is there"),
        (["--model_dir=.", "--output=reference_tensors.npz"], "expected a file that is not the"),
    ],
)
def test_mistakes_of_export(flags, message, tmp_path):
    given = ["--model_dir=run", "--output=a.npz", *flags]
    assert message in program_refuses("export", tmp_path, *given)
    assert not list(tmp_path.iterdir())


def test_export_without_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    line = refused(export_tool.check_output, "a.pth", "run")
    assert (
        "it is not installed. Run pip install -r requirements-torch.txt, or write an .npz" in line
    )
    export_tool.check_output("a.npz", "run")


@pytest.mark.parametrize(
    "output",
    [
        "run/reference_tensors.npz",
        "link/reference_tensors.npz",
        "moved/kept.npz",
        "run/checkpoints/step-3/loop.npz",
        "run/checkpoints/../checkpoints/a.npz",
        "link/checkpoints/a.npz",
        "moved/a.npz",
        "run/export/a.npz",
        "run/evaluation/features/a.npz",
        "run/logs/a.pth",
    ],
)
def test_files_of_the_run_are_not_overwritten(output, tmp_path, monkeypatch):
    for name in ("checkpoints/step-3", "evaluation/features", "logs"):
        (tmp_path / "run" / name).mkdir(parents=True)
    (tmp_path / "moved").mkdir()
    (tmp_path / "run" / "export").symlink_to(tmp_path / "moved")
    (tmp_path / "run" / "reference_tensors.npz").symlink_to(tmp_path / "moved" / "kept.npz")
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path)
    for model_dir in ("run", "link", str(tmp_path / "run")):
        line = refused(export_tool.check_output, output, model_dir)
        assert f"--output: expected a file that is not the run's own, outside {model_dir}" in line
    for other in ("run/a.npz", "a.npz", "run/reference_tensors_2.npz"):
        export_tool.check_output(other, "run")


def test_nothing_half_written_stays(tmp_path):
    source, model_dir = str(DATA / "reference_32.npz"), tmp_path / "run"
    import_tool.import_checkpoint(source, str(model_dir), {})
    (tmp_path / "a.npz").mkdir()
    with pytest.raises(UserError, match=r"--output: .*a\.npz \(Is a directory\)"):
        export_tool.export_checkpoint(str(model_dir), str(tmp_path / "a.npz"))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a.npz"}


def test_links_in_the_way_of_an_export_are_not_followed(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for name in ("a.npz", "a.npz.partial"):
        (tmp_path / name).symlink_to(tmp_path / "mine.txt")
    with export_tool.written_aside(str(tmp_path / "a.npz")) as file:
        file.write(b"new")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert (tmp_path / "a.npz").read_bytes() == b"new" and not (tmp_path / "a.npz").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "mine.txt"}


@pytest.mark.parametrize("kind", [pytest.param("pth", marks=needs_torch), "npz"])
def test_a_full_disk_is_one_line_of_export(kind, tmp_path):
    state, (path, limits) = golden_state()[0], (tmp_path / "a", resource.getrlimit(FILE_SIZE))
    write = {
        "pth": lambda file: export_tool.write_pth(file, state, {"tclip": 1.0}, 3),
        "npz": lambda file: export_tool.write_npz(file, state, {"tclip": 1.0}),
    }[kind]

    def export():
        with export_tool.written_aside(str(path)) as file:
            write(file)

    if kind == "pth":
        import torch  # noqa: F401
    resource.setrlimit(FILE_SIZE, (20_000, limits[1]))
    try:
        line = refused(export)
    finally:
        resource.setrlimit(FILE_SIZE, limits)
    assert f"--output: expected a file with room and permission to write. Received: {path}" in line
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_import_left_is_removed(tmp_path):
    source, model_dir = DATA / "reference_32.npz", tmp_path / "run"
    leftover = tmp_path / "run.partial"
    (leftover / "checkpoints").mkdir(parents=True)
    (leftover / "config.json").write_text("{")
    import_tool.import_checkpoint(str(source), str(model_dir), {"dataset": "folder"})
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_something_else_with_the_name_of_a_leftover_stays(tmp_path):
    (tmp_path / "run.partial").mkdir()
    (tmp_path / "run.partial" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"run\.partial first.*something else"):
        import_tool.import_checkpoint(
            str(DATA / "reference_32.npz"), str(tmp_path / "run"), {"dataset": "folder"}
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["run.partial", "notes.txt"]


def test_a_damaged_file_of_kept_tensors(tmp_path):
    model = checkpoints.build_model(config_lib.make({"ndf": 4, "n_rkhs": 32, "n_depth": 2}), 10)
    kept = reference_weights.tensors_kept_in(tmp_path)
    shapes = reference_weights.reference_shapes(reference_weights.architecture_of(model))
    idle = {
        name: np.ones(shape, np.float32)
        for name, shape in shapes.items()
        if name not in reference_weights.reference_variables(model)
        and not name.endswith("num_batches_tracked")
    }
    np.savez(kept, **idle)  # counters may be missing
    reference_weights.reference_state(model, tmp_path)
    for changed, received in (
        (
            {**idle, "encoder.module.layer_list.1.bn1.bn.weight": np.ones(5, np.float32)},
            "bn1.bn.weight of shape (4,). Received: (5,)",
        ),
        ({"loop": np.ones(3)}, "Received: no encoder.module.layer_list."),
        ({}, "Received: no encoder.module.layer_list."),
        ({**idle, "other": np.ones(3, np.float32)}, "Received: other. Import again, or remove"),
        ({**idle, list(idle)[2]: np.array(["x"] * 4)}, "of float32. Received: <U1. Import"),
    ):
        np.savez(kept, **changed)
        assert received in refused(reference_weights.reference_state, model, tmp_path)
    kept.write_bytes(b"nothing")
    assert str(kept) in refused(reference_weights.reference_state, model, tmp_path)
