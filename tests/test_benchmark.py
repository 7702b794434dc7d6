"""Each suite of tools/benchmark.py runs; what it measures is for people to read."""

import pathlib
import subprocess
import sys

import pytest
from pictures import picture, write_tree

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ("--ndf=4", "--n_rkhs=16", "--n_depth=1", "--batch_size=4")


def _run(*words):
    return subprocess.run(
        [sys.executable, ROOT / "tools" / "benchmark.py", *words],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, expected",
    [
        (("train", *TINY, "--steps=1"), "peak memory"),
        (("inference", *TINY, "--steps=1"), "PyTorch"),
        (("input", *TINY, "--seconds=0.1"), "ratio"),
        (("startup", *TINY, "--steps=1"), "train, to the first step"),
    ],
)
def test_suites(words, expected):
    done = _run(*words)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


def test_learning_is_compared_with_pytorch_only():
    done = _run("learning", *TINY, "--use_bn", "--train_steps=2")
    assert done.returncode == 2
    assert (
        done.stderr.count("\n") == 1
        and "learning: expected a run that PyTorch makes" in done.stderr
    )


@pytest.mark.slow
def test_learning(tmp_path):
    pytest.importorskip("torch", reason="PyTorch is compared with only where installed")
    files = {
        f"{split}/class{index % 2}/{index}.jpg": picture(32, 32, index)
        for split, count in (("train", 8), ("test", 4))
        for index in range(count)
    }
    write_tree(tmp_path, files)
    done = _run(
        "learning", *TINY, "--dataset=folder", f"--data_dir={tmp_path}", "--image_size=32",
        "--evaluation_resize=32", "--epochs=2", "--milestones=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "4 steps" in line]
    assert [row.split()[0] for row in rows] == ["PyTorch", "amdim_tf"]
    assert all("linear accuracy" in row and "nan" not in row for row in rows)


def test_the_step_s_benchmark_is_of_one_device():
    done = _run("train", *TINY, "--replicas=2")
    assert done.returncode == 2 and "--strategy: expected one device here" in done.stderr


@pytest.mark.parametrize("words", [("speed",), (), ("train", "input")])
def test_an_unknown_suite(words):
    done = _run(*words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "expected one of train, inference, input" in done.stderr


def test_the_compared_pytorch_model_computes_the_same(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is compared with only where installed")
    import numpy as np
    import tensorflow as tf

    from amdim_tf.encoder import Encoder

    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks import torch_model

    theirs = torch_model.Encoder(4, 24, 2).eval()
    for module in theirs.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.normal_(module.weight, std=0.2)
    ours = Encoder(32, ndf=4, n_rkhs=24, n_depth=2)
    ours.build((None, 32, 32, 3))
    kernels = [w for w in ours.trainable_weights if len(w.shape) == 4]
    convolutions = [m for m in theirs.modules() if isinstance(m, torch.nn.Conv2d)]
    for kernel, convolution in zip(kernels, convolutions, strict=True):
        kernel.assign(convolution.weight.detach().numpy().transpose(2, 3, 1, 0))
    images = np.random.default_rng(0).normal(size=(3, 32, 32, 3)).astype(np.float32)
    for bias in (w for w in ours.trainable_weights if w.path.endswith("bias")):
        bias.assign(theirs.stem[0].bias.detach().numpy())
        break
    found = theirs(torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))
    expected = ours(tf.constant(images), training=False)
    for name, value in zip(("f7", "f5", "f1"), found, strict=True):
        value = value.detach().numpy()
        value = value.transpose(0, 2, 3, 1) if value.ndim == 4 else value
        np.testing.assert_allclose(value, expected[name].numpy(), rtol=1e-4, atol=1e-4)


def test_the_compared_pytorch_step_learns_the_same(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is compared with only where installed")
    import tensorflow as tf

    from amdim_tf import config as config_lib
    from amdim_tf import distribution, stepping, training_loop

    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from benchmarks import measuring, rivals, torch_model

    config = config_lib.make({
        "dataset": "scenes", "ndf": 4, "n_rkhs": 16, "n_depth": 2, "batch_size": 6,
        "warmup_steps": 1, "learning_rate": 1e-3,
    })  # fmt: skip
    devices = distribution.resolve(config)
    ours = training_loop.compiled_model(config, measuring.CLASSES, 1000, devices)
    theirs = rivals.model_of(config, torch.channels_last)

    def tensors(module, kind):
        return [m.weight.detach().numpy() for m in module.modules() if isinstance(m, kind)]

    for part, module in (
        (ours.encoder, theirs.encoder),
        (ours.embedding5, theirs.embedding5),
        (ours.embedding7, theirs.embedding7),
    ):
        kernels = [w for w in part.trainable_weights if len(w.shape) == 4]
        # By shape too: the order of an embedding's layers differs.
        for theirs_kernel in tensors(module, torch.nn.Conv2d):
            value = theirs_kernel.transpose(2, 3, 1, 0)
            kernel = next(k for k in kernels if tuple(k.shape) == value.shape)
            kernels = [k for k in kernels if k is not kernel]
            kernel.assign(value)
        biases = [w for w in part.trainable_weights if w.path.endswith("bias")]
        others = [p for name, p in module.named_parameters() if name.endswith("bias")]
        others = [p for p in others if p.abs().max() > 0]  # but for those of batch norm, zeros
        for bias, other in zip(biases, others, strict=True):
            bias.assign(other.detach().numpy())
    # The same place of every map: location 12 is the middle of 5×5.
    monkeypatch.setattr(ours, "draw_locations", lambda batch, step: {5: tf.fill([2, batch], 12)})
    monkeypatch.setattr(
        torch_model, "_antecedents", lambda e: e if e.dim() == 2 else e.flatten(2)[:, :, 12]
    )
    data = measuring.random_batch(config)
    step = stepping.step_function(ours, devices)
    views = [rivals.to_torch(data[name], torch.channels_last) for name in ("view1", "view2")]
    labels = torch.from_numpy(data["label"].numpy()).long()
    theirs.set_learning_rate(1e-3)
    for _ in range(5):
        expected = theirs.train_step(*views, labels)
        assert float(step(data, False)["loss"]) == pytest.approx(expected, abs=2e-4)


def test_endless_turns_are_refused():
    done = _run("input", *TINY, "--seconds=inf")
    assert done.returncode == 2 and "--seconds: expected" in done.stderr


def test_suites_with_sizes_of_their_own():
    done = _run("nce", "--batch_size=32")
    assert done.returncode == 2 and "nce: expected no settings" in done.stderr
