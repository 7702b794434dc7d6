"""Similarity search: the index, exact neighbours, the picture, and mistakes."""

import json
import os
import pathlib
import resource
import shutil

import numpy as np
import pytest
from exports import small_files, write_export
from pictures import write_tree
from PIL import Image
from test_train import refused, run

from amdim_tf import extraction, search_index
from amdim_tf.errors import UserError
from amdim_tf.extraction import Request


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with an export, images, their features and an index of them."""
    root = tmp_path_factory.mktemp("search")
    export = write_export(root)
    data = write_tree(root / "data", {**small_files(30), "test/cat/bad.jpg": b"no image"})
    extraction.extract(Request(str(export), "folder", str(data), "test", str(root / "f")))
    search_index.build(root / "f", root / "index")
    return root


def _vectors(place):
    return np.load(place / "index" / "vectors.npy", allow_pickle=False)


def test_what_an_index_holds(place):
    vectors = _vectors(place)
    assert vectors.shape == (30, 32) and vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    lines = [json.loads(line) for line in (place / "index" / "images.jsonl").open()]
    with np.load(place / "f" / "features-00000-of-00001.npz", allow_pickle=False) as columns:
        for name in ("path", "label", "index"):
            assert [line[name] for line in lines] == columns[name].tolist()
        cosine = columns["f1"] / np.linalg.norm(columns["f1"], axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, cosine, atol=1e-6)
    assert 15 not in [line["index"] for line in lines]  # the bad image


@pytest.mark.parametrize("block", [7, 32768])
def test_search_is_exact(block, place, monkeypatch):
    monkeypatch.setattr(search_index, "_BLOCK", block)
    index, vectors = search_index.load(place / "index"), _vectors(place)
    query = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    found = index.search(3 * query, 8)
    scores = vectors @ query / np.linalg.norm(query)
    best = np.argsort(-scores)[:8]
    np.testing.assert_allclose([neighbour.score for neighbour in found], scores[best], atol=1e-6)
    lines = [json.loads(line) for line in (place / "index" / "images.jsonl").open()]
    assert [neighbour.path for neighbour in found] == [lines[row]["path"] for row in best]


def test_an_image_is_its_own_neighbour(place):
    index = search_index.load(place / "index")
    query = str(place / "data" / "test" / "dog" / "008.jpg")
    first = index.search(search_index.features_of_query(index, query), 1)[0]
    assert first.path == query and first.label == 1 and first.score == pytest.approx(1, abs=1e-5)


def test_equal_images_keep_their_order(tmp_path):
    index = search_index.Index(tmp_path, np.ones([5, 4], np.float32) / 2, {})
    lines = [json.dumps({"path": str(row), "label": -1, "index": row}) for row in range(5)]
    (tmp_path / "images.jsonl").write_text("\n".join(lines) + "\n")
    assert [found.index for found in index.search(np.ones(4, np.float32), 3)] == [0, 1, 2]
    assert len(index.search(np.ones(4, np.float32), 9)) == 5


def test_the_program_prints_and_draws(place, tmp_path):
    query = place / "data" / "test" / "cat" / "003.jpg"
    done = run(
        "search", f"--index={place / 'index'}", f"--query={query}", "--k=40",
        f"--picture={tmp_path / 'found.png'}",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0].endswith("has 30 images, fewer than --k=40.")
    assert lines[1] == f"1.0000  {query}"
    assert len(lines) == 32 and lines[-1] == f"Wrote {tmp_path / 'found.png'}."
    scores = [float(line.split()[0]) for line in lines[1:-1]]
    assert scores == sorted(scores, reverse=True)
    with Image.open(tmp_path / "found.png") as image:
        assert image.format == "PNG" and image.width > 1000 and image.height > 500


def test_odd_names_stay_on_their_lines(place, tmp_path):
    index = shutil.copytree(place / "index", tmp_path / "index")
    odd = "a  ü\n1.0000  b\r\x1b[0m\u2028\u202e\udcff.jpg"
    line = json.dumps({"path": odd, "label": 0, "index": 0})
    (index / "images.jsonl").write_text(f"{line}\n" * 30)
    done = run(
        "search", f"--index={index}", f"--query={place / 'data' / 'test' / 'cat' / '003.jpg'}",
        "--k=2", f"--picture={tmp_path / 'found.png'}",
    )  # fmt: skip
    shown = r"a  ü\n1.0000  b\r\x1b[0m\u2028\u202e\udcff.jpg"
    first, second, _ = done.stdout.splitlines()
    assert first == f"1.0000  {shown}" and second.endswith(f"  {shown}")


def test_a_picture_without_room_is_one_line(place):
    query = place / "data" / "test" / "cat" / "003.jpg"
    (place / "found.png").mkdir()
    flags = [f"--index={place / 'index'}", f"--query={query}", f"--picture={place / 'found.png'}"]
    assert "--picture: expected a file with room and permission" in refused("search", *flags)


def test_neighbours_that_are_no_files_are_drawn_from_their_data_set(place):
    index = search_index.load(place / "index")
    index = search_index.Index(index.directory, index.vectors, {**index.facts, "dataset": "scenes"})
    found = search_index.Neighbour(0.5, "scenes/test/7", 0, 7)
    image = search_index.images_of(index, [found])[0]
    assert image.shape == (32, 32, 3) and image.std() > 0


def test_neighbours_of_another_name_leave_a_gap(place):
    index = search_index.load(place / "index")
    index = search_index.Index(index.directory, index.vectors, {**index.facts, "dataset": "scenes"})
    found = search_index.Neighbour(0.5, "scenes/test/8", 0, 7)
    assert search_index.images_of(index, [found]) == [None]


def test_folders_are_not_listed_for_neighbours_that_are_gone(place, monkeypatch):
    def listed(*_):
        raise AssertionError("listed")

    monkeypatch.setattr(extraction, "load_source", listed)
    gone = search_index.Neighbour(0.5, str(place / "gone.jpg"), 0, 3)
    assert search_index.images_of(search_index.load(place / "index"), [gone]) == [None]


def test_neighbours_that_are_gone_leave_a_gap(place):
    index = search_index.load(place / "index")
    gone = search_index.Neighbour(0.5, str(place / "gone.jpg"), 0, 999)
    facts = {**index.facts, "data_dir": str(place / "moved")}
    assert search_index.images_of(
        search_index.Index(index.directory, index.vectors, facts), [gone]
    ) == [None]


@pytest.mark.parametrize(
    "query, received",
    [("bad.jpg", "cannot be decoded"), ("none.jpg", "No such file"), (".", "Is a directory")],
)
def test_queries_that_are_refused(query, received, place):
    index = search_index.load(place / "index")
    with pytest.raises(UserError, match="--query: expected") as error:
        search_index.features_of_query(index, str(place / "data" / "test" / "cat" / query))
    assert received in str(error.value)


def test_queries_that_never_end_are_refused(place, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    index = search_index.load(place / "index")
    for query in (str(tmp_path / "pipe"), "/dev/zero"):
        with pytest.raises(UserError, match=r"--query: expected .* is not a regular file"):
            search_index.features_of_query(index, query)


def test_another_model_is_refused(place, tmp_path):
    moved = shutil.copytree(place / "export", tmp_path / "moved")
    index = search_index.load(place / "index")
    query = str(place / "data" / "test" / "cat" / "003.jpg")
    search_index.features_of_query(index, query, str(moved))
    weights = next((moved / "variables").glob("*.data*"))
    weights.write_bytes(weights.read_bytes() + b"\0")
    (moved / "saved_model.pb").write_bytes(b"not to be loaded")
    with pytest.raises(UserError, match=r"--saved_model: expected the model that .* was made with"):
        search_index.features_of_query(index, query, str(moved))
    (moved / "saved_model.pb").unlink()
    with pytest.raises(UserError, match=r"--saved_model: .* which has no saved_model\.pb"):
        search_index.features_of_query(index, query, str(moved))


def test_an_earlier_index_is_replaced(place, tmp_path):
    target = shutil.copytree(place / "index", tmp_path / "index")
    (target / "images.jsonl").write_text("old")
    (tmp_path / "index.partial").mkdir()  # of a killed run
    search_index.build(place / "f", target)
    for name in ("vectors.npy", "images.jsonl", "index.json"):
        assert (target / name).read_bytes() == (place / "index" / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_a_failed_rename_leaves_the_earlier_index(place, tmp_path, monkeypatch):
    target, rename = shutil.copytree(place / "index", tmp_path / "index"), pathlib.Path.rename

    def failing(path, other):
        if path.name == "new":
            raise OSError(28, "No space left on device")
        return rename(path, other)

    monkeypatch.setattr(pathlib.Path, "rename", failing)
    with pytest.raises(UserError, match=r"--index: .*\(No space left on device\)"):
        search_index.build(place / "f", target)
    assert len(search_index.load(target).vectors) == 30
    assert [path.name for path in tmp_path.iterdir()] == ["index"]


def test_an_index_that_a_killed_run_had_moved_aside_comes_back(place, tmp_path):
    scratch = tmp_path / "index.partial"
    shutil.copytree(place / "index", scratch / "replaced")
    with search_index._scratch_beside(tmp_path / "index"):
        assert list(scratch.iterdir()) == []
    assert len(search_index.load(tmp_path / "index").vectors) == 30
    assert not scratch.exists()


@pytest.mark.parametrize("kind", ["notes", "inside", "link", "file"])
def test_something_else_with_the_name_of_a_leftover_stays(kind, place, tmp_path):
    mine = tmp_path / "mine" / "new" if kind == "inside" else tmp_path / "mine"
    mine.mkdir(parents=True)
    (mine / "notes.txt").write_text("mine")
    scratch = tmp_path / "index.partial"
    if kind == "link":
        (mine / "notes.txt").rename(tmp_path / "notes.txt")
        scratch.symlink_to(mine)
    elif kind == "file":
        scratch.write_text("mine")
    else:
        (tmp_path / "mine").rename(scratch)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=r"--index: expected to write to .*index\.partial first"):
        search_index.build(place / "f", tmp_path / "index")
    assert sorted(tmp_path.rglob("*")) == before


def test_two_builds_at_once_are_refused(place, tmp_path):
    with (
        search_index._scratch_beside(tmp_path / "index") as scratch,
        pytest.raises(UserError, match=r"--index: .* which another process is making"),
    ):
        try:
            search_index.build(place / "f", tmp_path / "index")
        finally:
            assert scratch.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, received",
    [("f/index", "outside --output"), ("data/index", "outside --data_dir"), ("data", "data_dir")],
)
def test_places_that_are_refused(name, received, place):
    request = Request(
        str(place / "export"), "folder", str(place / "data"), "test", str(place / "f")
    )
    with pytest.raises(UserError, match="--index: expected") as error:
        search_index.check_request(place / name, request)
    assert received in str(error.value)


def test_other_things_are_not_replaced(place, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"--index: .* holds notes\.txt"):
        search_index.build(place / "f", tmp_path)


@pytest.mark.parametrize("text", ['{"pages": 3}', "no JSON", "[]"])
def test_an_index_json_of_another_program_is_not_replaced(text, place, tmp_path):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(UserError, match=r"--index: .* holds index\.json"):
        search_index.build(place / "f", tmp_path)
    assert (tmp_path / "index.json").read_text() == text


def test_an_index_needs_f1(place):
    request = Request(str(place), "folder", "", "test", str(place / "g"), outputs=("f5",))
    with pytest.raises(UserError, match="--index: expected f1 among --outputs"):
        search_index.check_request(place / "new", request)


def test_shards_that_the_manifest_does_not_describe(place, tmp_path):
    features = shutil.copytree(place / "f", tmp_path / "f")
    document = json.loads((features / "manifest.json").read_text())
    document["rows"] = document["shards"][0]["rows"] = 36
    (features / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(
        UserError, match=r"36 rows, as manifest\.json says\. Received: 30\. Remove it, and run"
    ):
        search_index.build(features, tmp_path / "index")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_full_disk_is_one_line(place, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"--index: .*\(File too large\)"):
            search_index.build(place / "f", tmp_path / "index")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe\xfa",
        b'{"path": "a", "label": Infinity, "index": 0}',
        b'{"path": "a", "label": 0, "index": 100000000000000000000000}',
        b'{"path": "a", "label": 0, "index": true}',
        b"[" * 100_000,
    ],
)
def test_damaged_lines_are_refused(line, tmp_path):
    index = search_index.Index(tmp_path, np.ones([1, 4], np.float32) / 2, {})
    (tmp_path / "images.jsonl").write_bytes(line + b"\n")
    with pytest.raises(UserError, match=r"images\.jsonl: expected a line per image\. Received: "):
        index.search(np.ones(4, np.float32), 1)


def test_lines_that_never_come_are_refused(tmp_path):
    index = search_index.Index(tmp_path, np.ones([1, 4], np.float32) / 2, {})
    os.mkfifo(tmp_path / "images.jsonl")
    with pytest.raises(UserError, match=r"images\.jsonl is not a regular file"):
        index.search(np.ones(4, np.float32), 1)


def test_vectors_that_are_no_numbers_are_refused(tmp_path):
    index = search_index.Index(tmp_path, np.full([1, 4], np.nan, np.float32), {})
    with pytest.raises(UserError, match=r"vectors\.npy: expected finite numbers"):
        index.search(np.ones(4, np.float32), 1)


@pytest.mark.parametrize("index", [-1, 10**9])
def test_neighbours_that_a_data_set_does_not_have_leave_a_gap(index, place):
    loaded = search_index.load(place / "index")
    facts = {**loaded.facts, "dataset": "scenes"}
    loaded = search_index.Index(loaded.directory, loaded.vectors, facts)
    found = search_index.Neighbour(0.5, "scenes/test/7", 0, index)
    assert search_index.images_of(loaded, [found]) == [None]


@pytest.mark.parametrize(
    "damage",
    [
        "missing", "text", "short", "pickle", "facts", "classes", "empty", "npz", "deep",
        "pipe index.json", "pipe vectors.npy",
    ],
)  # fmt: skip
def test_a_damaged_index_is_refused(damage, place, tmp_path):
    index = shutil.copytree(place / "index", tmp_path / "index")
    if damage == "missing":
        (index / "index.json").unlink()
    elif damage == "text":
        (index / "index.json").write_text("no JSON")
    elif damage in ("facts", "classes"):
        facts = json.loads((index / "index.json").read_text())
        facts |= {"saved_model": None} if damage == "facts" else {"classes": {"cat": 0}}
        (index / "index.json").write_text(json.dumps(facts))
    elif damage == "empty":
        (index / "vectors.npy").write_bytes(b"")
    elif damage == "npz":
        np.savez((index / "vectors.npy").open("wb"), _vectors(place))
    elif damage == "deep":
        (index / "index.json").write_text("[" * 100_000)
    elif damage.startswith("pipe"):
        (index / damage.split()[1]).unlink()
        os.mkfifo(index / damage.split()[1])
    elif damage == "short":
        np.save(index / "vectors.npy", _vectors(place)[:-1])
    else:
        np.save(index / "vectors.npy", np.array([{}] * 30, object), allow_pickle=True)
    with pytest.raises(UserError, match=r"--index: expected what python -m amdim_tf\.extract"):
        search_index.load(index)


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--index"),
        (["--index=i"], "--query"),
        (["--index=i", "--query=q", "--k=0"], "k"),
        (["--index=i", "--query=q", "--picture=found.jpg"], "--picture"),
        (["--index=NOWHERE", "--query=q"], "--index"),
    ],
)
def test_mistakes_get_one_line(flags, named, tmp_path):
    assert named in refused("search", *[flag.replace("NOWHERE", str(tmp_path)) for flag in flags])
