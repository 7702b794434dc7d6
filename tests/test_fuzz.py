"""Ten thousand damaged files: each is read, or refused in one line, and none hangs or crashes."""

import json
import random

import pytest
import tensorflow as tf
from pictures import encoded, picture

from amdim_tf import checkpoint_files, config_file, decode, policies
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError
from amdim_tf.summaries import MetricsLog

# Files of each kind; together 10,000.
COUNTS = {"config": 3500, "policy": 3000, "metrics": 500, "manifest": 2000, "images": 1000}
_TOKENS = (
    b"NaN", b"-1", b"1e999", b"null", b"true", b"[]", b"{}", b'""', b'"\\ud800"', b"9" * 5000,
    b"\x00", b"\xff\xfe", b"[" * 2000, b",", b'"', b"\n", b"1" * 30, b"../../x",
)  # fmt: skip


def mutated(contents: bytes, rng: random.Random) -> bytes:
    """The contents with one to four changes: bits, cuts, copies, and tokens put in."""
    for _ in range(rng.randint(1, 4)):
        place, other = sorted(rng.choices(range(len(contents) + 1), k=2))
        kind = rng.randrange(5)
        if kind == 0 and contents:
            place = rng.randrange(len(contents))
            flipped = bytes([contents[place] ^ (1 << rng.randrange(8))])
            contents = contents[:place] + flipped + contents[place + 1 :]
        elif kind == 1:
            contents = contents[:place]
        elif kind == 2:
            contents = contents[:place] + contents[other:]
        elif kind == 3:
            contents = contents[:other] + contents[place:]
        else:
            contents = contents[:place] + rng.choice(_TOKENS) + contents[place:]
    return contents


def _check_refusal(error):
    assert "\n" not in str(error) and len(str(error)) < 3000


def test_ten_thousand():
    assert sum(COUNTS.values()) == 10_000


def test_config_files(tmp_path):
    path, rng = config_file.path_in(tmp_path), random.Random(0)
    facts = {"classes": ["a", "b"], "images": 5, "starts": [{"step": 0}]}
    config_file.save(config_lib.Config(), path, facts)
    whole, refused = path.read_bytes(), 0
    for _ in range(COUNTS["config"]):
        path.write_bytes(mutated(whole, rng))
        try:
            config_file.load(path)
        except UserError as error:
            _check_refusal(error)
            refused += 1
    assert refused > COUNTS["config"] / 2


def test_policy_files(tmp_path):
    path, rng, refused = tmp_path / "policy.json", random.Random(1), 0
    policies.save(policies.load("autoaugment_cifar10"), path)
    whole = path.read_bytes()
    for _ in range(COUNTS["policy"]):
        path.write_bytes(mutated(whole, rng))
        try:
            policies.load(str(path))
        except UserError as error:
            _check_refusal(error)
            refused += 1
    assert refused > COUNTS["policy"] / 2


def test_metrics_files(tmp_path):
    rng = random.Random(2)
    header = "step,seconds,loss\r\n"
    rows = "".join(f"{10 * i},{i / 7:.6g},{1 / (i + 1):.6g}\r\n" for i in range(20))
    for number in range(COUNTS["metrics"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "metrics.csv").write_bytes(mutated((header + rows).encode(), rng))
        log = MetricsLog(folder, 100)
        log.write(101, {"loss": 1.0}, 1.0)
        log.close()
        lines = (folder / "metrics.csv").read_text().splitlines()
        assert lines[-1].split(",")[0] == "101" or "step" not in lines[0].split(",")[:1]


def test_manifests(tmp_path):
    rng = random.Random(3)
    checkpoint_files.write(tmp_path, 1, {}, {"architecture": {"ndf": "4"}})
    path = checkpoint_files.path_of(tmp_path, 1) / "manifest.json"
    whole = path.read_bytes()
    for _ in range(COUNTS["manifest"]):
        path.write_bytes(mutated(whole, rng))
        try:
            manifest = checkpoint_files.read_manifest(tmp_path, 1)
        except checkpoint_files.Damaged as error:
            _check_refusal(error)
        else:  # spaces, or a field that was put in twice
            assert manifest == json.loads(whole)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP"])
def test_image_files(kind):
    rng = random.Random(4)
    whole, count = encoded(picture(24, 32), kind), COUNTS["images"] // 4
    files = [mutated(whole, rng) for _ in range(count)]

    def load(contents):
        nothing = tf.zeros([0, 0, 3], tf.uint8)
        image, made = decode.or_else(decode.decode, contents, nothing)
        return tf.shape(image), made

    sizes = [
        (tuple(shape.numpy()), bool(made))
        for shape, made in tf.data.Dataset.from_tensor_slices(files).map(load)
    ]
    assert len(sizes) == count
    assert all(shape[2] == 3 and made == (shape[0] > 0) for shape, made in sizes)
    assert not all(made for _, made in sizes)
