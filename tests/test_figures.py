"""Figures: what they show, that they repeat, and that TensorBoard can read them."""

import io
import json
import os
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from matplotlib import pyplot
from pictures import picture, write_tree
from PIL import Image
from tensorboard.backend.event_processing import (
    data_provider,
    plugin_event_accumulator,
    plugin_event_multiplexer,
)
from tensorboard.plugins.projector.projector_plugin import ProjectorPlugin
from test_model import make_batch, make_model
from test_train import ROOT, refused, run

from amdim_tf import (
    charts,
    config_file,
    embedding_figure,
    figures,
    heat_maps,
    pair_figures,
    policies,
    retrieval_figure,
    sources,
    training_loop,
)
from amdim_tf import config as config_lib
from amdim_tf.errors import UserError
from amdim_tf.figures import FIGURES, FigureSettings
from amdim_tf.retrieval_figure import Gallery


def test_sheet_shows_pairs_side_by_side():
    config = config_lib.make({"dataset": "scenes", "batch_size": 8, "augmentation": "none"})
    sheet = figures.views_sheet(config, 5)
    # Two views of 96 pixels, a line of 1 on each side; six pairs fit into a row.
    assert sheet.shape == (98, 6 * 194, 3)
    for pair in range(5):
        first, second = (
            sheet[1:97, 194 * pair + 1 + 96 * view : 194 * pair + 97 + 96 * view] for view in (0, 1)
        )
        np.testing.assert_array_equal(first, second)
        assert first.std() > 5
    augmented = figures.views_sheet(config_lib.make({"dataset": "scenes", "batch_size": 8}), 5)
    assert np.any(augmented[1:97, 1:97] != augmented[1:97, 97:193])


def _folder(root, **counts):
    """A configuration for a folder with so many small images in each split."""
    for split, count in counts.items():
        write_tree(root / split / "c", {f"{i}.jpg": picture(40, 40, i) for i in range(count)})
    return config_lib.make({"dataset": "folder", "data_dir": str(root), "augmentation": "none"})


def test_few_images(tmp_path):
    config = _folder(tmp_path, train=3)
    with pytest.raises(UserError, match=r"--pairs: expected at most 3, for 3 images. Received: 4"):
        figures.views_sheet(config, 4)
    source = sources.load(config.data, "train")
    with pytest.raises(UserError, match=r"--rows: expected at most 1, for 3 images. Received: 2"):
        figures._two_views(source, config, "rows", 2, images_each=2)
    first, second = figures._two_views(source, config, "rows", 1)
    assert first.shape == second.shape == (1, 128, 128, 3)


def test_training_images_are_shown_only_where_there_are_no_others(tmp_path, capsys):
    without = _folder(tmp_path / "without", train=3)
    assert len(figures._test_source(without.data)) == 3
    assert f"{tmp_path / 'without'} has no test images" in capsys.readouterr().out
    broken = _folder(tmp_path / "broken", train=3)
    (tmp_path / "broken" / "test").mkdir()
    with pytest.raises(UserError, match="expected images"):
        figures._test_source(broken.data)
    _folder(tmp_path / "broken", test=2)
    assert len(figures._test_source(broken.data)) == 2
    assert capsys.readouterr().out == ""


def _shown_settings(model_dir, *givens):
    """The settings that the program makes of a run's and of given ones."""
    code = (
        "import json, sys; from amdim_tf import config, visualize;"
        "made = (visualize.settings_of_run(sys.argv[1], each) for each in json.loads(sys.argv[2]));"
        "print(json.dumps([config.settings_of(each) for each in made]))"
    )
    words = [sys.executable, "-c", code, str(model_dir), json.dumps(givens)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _save_run(model_dir, **settings):
    config = config_lib.make({"dataset": "folder", "data_dir": "photos", **settings})
    model_dir.mkdir()
    config_file.save(config, config_file.path_in(model_dir), {"classes": [], "starts": []})
    return model_dir


def test_flags_change_what_follows_from_them(tmp_path):
    run = _save_run(tmp_path / "basic", policy="moved.json", flip=0.1)
    policies.save(policies.load("randaugment(1,5)"), policies.path_in(run))
    strong = {"augmentation": "strong"}
    plain, other_policy, other_data, made_strong, brighter = _shown_settings(
        run, {}, {"policy": "mine.json"}, {"dataset": "scenes"}, strong, {**strong, "lighting": 0.2}
    )  # fmt: skip
    assert plain["policy"] == str(run / "policy.json") and plain["data_dir"] == "photos"
    assert other_policy["policy"] == "mine.json"
    assert other_data["data_dir"] == "" and other_data["mean"] == plain["mean"]
    for name, value in config_lib.STRONG_DEFAULTS.items():
        assert made_strong[name] == (list(value) if isinstance(value, tuple) else value)
    assert made_strong["flip"] == 0.1 and brighter["lighting"] == 0.2


def test_another_augmentation_has_its_own_recipe(tmp_path):
    run = _save_run(tmp_path / "strong", augmentation="strong", crop_scale=(0.4, 0.6))
    same, basic = _shown_settings(run, {"augmentation": "strong"}, {"augmentation": "basic"})
    assert same["crop_scale"] == [0.4, 0.6] and same["policy"] == "autoaugment_imagenet"
    assert basic["crop_scale"] == [0.3, 1.0] and basic["policy"] == "" and basic["lighting"] == 0


def _gallery(count=30, seed=0):
    rng = np.random.default_rng(seed)
    return Gallery(
        rng.integers(0, 256, [count, 32, 32, 3]).astype(np.uint8),
        rng.integers(0, 3, count).astype(np.int32),
        rng.standard_normal([count, 6]).astype(np.float32),
        ("ant", "bee", "cat"),
    )


def test_retrieval_finds_the_most_similar_without_the_query():
    gallery = _gallery()
    maps = np.random.default_rng(1).standard_normal([30, 7, 7, 6])
    queries = np.array([4, 17])
    found = retrieval_figure.retrieve(
        gallery, queries, lambda f1: f1[:, None], lambda places: maps[places]
    )
    for row, query in enumerate(queries):
        similar = []
        for other in range(30):
            a, b = gallery.f1[query], gallery.f1[other]
            similar.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        order = [other for other in np.argsort(similar)[::-1] if other != query][:7]
        np.testing.assert_array_equal(found.neighbours[row], order)
        np.testing.assert_allclose(found.cosines[row], np.array(similar)[order], rtol=1e-5)
        for column, number in enumerate([query, *order]):
            expected = maps[number, 2, 5] @ gallery.f1[query] / np.sqrt(6)
            np.testing.assert_allclose(found.scores[row, column, 2, 5], expected, rtol=1e-5)
    pyplot.close(retrieval_figure.draw(gallery, found))


def test_of_a_mixture_the_best_component_is_shown():
    rng = np.random.default_rng(1)
    gallery, maps = _gallery(), rng.standard_normal([30, 7, 7, 6])
    components = rng.standard_normal([1, 3, 6])
    found = retrieval_figure.retrieve(
        gallery, np.array([4]), lambda f1: components, lambda places: maps[places]
    )
    expected = max(maps[4, 2, 5] @ component / np.sqrt(6) for component in components[0])
    np.testing.assert_allclose(found.scores[0, 0, 2, 5], expected)
    pyplot.close(retrieval_figure.draw(gallery, found))
    maps = {"phi5": rng.standard_normal([1, 5, 5, 6]), "phi7": rng.standard_normal([1, 7, 7, 6])}
    found = pair_figures.similarities(maps, maps, components)
    cell = maps["phi7"][0, 1, 2]
    lengths = np.linalg.norm(components[0], axis=1) * np.linalg.norm(cell)
    np.testing.assert_allclose(found.f1_f7[0, 1, 2], (components[0] @ cell / lengths).max())


def test_similarities_compare_the_cells_that_differ_most():
    rng = np.random.default_rng(0)
    first, second = (
        {"phi5": rng.standard_normal([2, 5, 5, 8]), "phi7": rng.standard_normal([2, 7, 7, 8])}
        for _ in range(2)
    )  # fmt: skip
    first["phi7"][1, 2, 4], first["phi7"][1, 5, 1] = np.eye(8)[0], -np.eye(8)[0]
    antecedents = rng.standard_normal([2, 1, 8])
    found = pair_figures.similarities(first, second, antecedents)
    assert {tuple(place) for place in found.chosen[1].tolist()} == {(2, 4), (5, 1)}

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    row, column = found.chosen[1, 0]
    expected = cosine(first["phi7"][1, row, column], second["phi7"][1, 6, 0])
    np.testing.assert_allclose(found.f7_f7[1, 0, 6, 0], expected)
    expected = cosine(first["phi5"][1, row - 1, column - 1], second["phi5"][1, 3, 2])
    np.testing.assert_allclose(found.f5_f5[1, 0, 3, 2], expected)
    expected = cosine(antecedents[0, 0], second["phi7"][0, 1, 2])
    np.testing.assert_allclose(found.f1_f7[0, 1, 2], expected)


def test_components_have_colours_of_their_own():
    colours = heat_maps.component_colours(64)
    assert len(np.unique(colours.round(), axis=0)) == 64 and colours.max() <= 255
    np.testing.assert_array_equal(heat_maps.component_colours(1), [[0x00, 0x72, 0xB2]])


def test_overlay_has_the_components_colours():
    shares = np.zeros([1, 4, 4, 3], np.float32)
    shares[0, :, :2, 1] = shares[0, :, 2:, 2] = 1
    tinted = pair_figures.overlay(np.full([1, 4, 4, 3], 128, np.uint8), shares)[0].astype(int)
    colours = heat_maps.component_colours(3)
    for column, component in ((0, 1), (3, 2)):
        np.testing.assert_allclose(
            tinted[0, column], 0.25 * 128 + 0.75 * colours[component], atol=1
        )
    # Told apart in grey, too.
    assert abs(tinted[0, 0].mean() - tinted[0, 3].mean()) > 3


def test_posterior_is_of_the_second_view_given_the_first():
    model, batch = make_model(mixture_components=2), make_batch()
    tf.function(model.train_step)(batch)
    first, second = (model.encode(batch[view]) for view in ("view1", "view2"))
    shares = pair_figures.posteriors(model, first, second)
    np.testing.assert_allclose(shares, model.posterior(first["f1"], second["phi7"]))
    pictures = _gallery(8).pictures
    figure = pair_figures.draw_segmentation(pictures, pictures, shares)
    legend = figure.legends[0].get_texts()
    assert [text.get_text() for text in legend] == ["component 0", "component 1"]
    pyplot.close(figure)


def test_principal_components_of_a_flat_cloud():
    rng = np.random.default_rng(0)
    values = rng.standard_normal([500, 5]) * np.array([0.1, 5, 0.1, 2, 0.1]) + 7
    places, shares = embedding_figure.principal_components(values)
    for column, axis in ((0, 1), (1, 3)):
        correlation = np.corrcoef(places[:, column], values[:, axis])[0, 1]
        assert abs(correlation) > 0.99
    np.testing.assert_allclose(shares, [25 / 29.03, 4 / 29.03], atol=0.05)


def test_files_repeat_to_the_byte(tmp_path):
    gallery = _gallery()
    for kind in ("png", "pdf"):
        paths = [tmp_path / f"{number}.{kind}" for number in range(2)]
        for path in paths:
            figure = embedding_figure.draw(gallery)
            charts.save(figure, path)
            pyplot.close(figure)
        assert paths[0].read_bytes() == paths[1].read_bytes()


def test_projector_shows_vectors_labels_and_pictures(tmp_path):
    """What TensorBoard's own plugin makes of the files, pointed at the logs of the run."""
    gallery = _gallery(10)
    directory = tmp_path / "logs" / "projector"
    embedding_figure.write_projector(gallery, directory, step=7)
    sheet = np.asarray(Image.open(directory / "sprites.png"))
    assert sheet.shape == (4 * 32, 4 * 32, 3)
    np.testing.assert_array_equal(sheet[32:64, 64:96], gallery.pictures[6])
    runs = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "logs"))
    provider = data_provider.MultiplexerDataProvider(runs.Reload(), str(tmp_path / "logs"))
    context = types.SimpleNamespace(data_provider=provider, logdir=str(tmp_path / "logs"))
    plugin = ProjectorPlugin(context)
    plugin._update_configs()
    assert list(plugin._configs) == ["projector"]
    (embedding,) = plugin._configs["projector"].embeddings
    assert list(embedding.tensor_shape) == [10, 6]
    assert list(embedding.sprite.single_image_dim) == [32, 32]
    labels = (directory / "labels.tsv").read_text().splitlines()
    assert labels[0] == "class\tnumber" and labels[3] == f"{gallery.name(2)}\t2"


def test_a_heat_map_is_as_bright_in_the_pdf():
    """Of a transparency given to matplotlib as such, a PDF would have the square."""
    figure, axes = heat_maps.grid([1], 1, "title")
    scaled = heat_maps.show_heat(axes[0, 0], np.zeros([8, 8, 3], np.uint8), np.ones([7, 7]), (0, 1))
    grey, heat = axes[0, 0].images
    assert grey.get_alpha() is None and heat.get_alpha() is None
    np.testing.assert_allclose(heat.get_array()[3, 3], [*scaled.to_rgba(1.0)[:3], 0.8], atol=1e-6)
    contents = io.BytesIO()
    figure.savefig(contents, format="pdf")
    pyplot.close(figure)
    assert not re.search(rb"/ca 0?\.8", contents.getvalue())


def test_components_differ_in_lightness():
    """Of the usual few, so that no two look alike to eyes that take red for green."""
    lightness = np.sort(heat_maps.component_colours(4) @ [0.2126, 0.7152, 0.0722])
    assert np.diff(lightness).min() > 15


def test_large_pictures_are_shrunk_for_the_projector():
    pictures = np.full([3, 128, 128, 3], 77, np.uint8)
    small = embedding_figure.sprite_pictures(pictures)
    assert small.shape == (3, 64, 64, 3) and (small == 77).all()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a mixture's run of two steps."""
    model_dir = tmp_path_factory.mktemp("run") / "run"
    settings = {"ndf": 4, "n_rkhs": 16, "n_depth": 1, "batch_size": 8, "train_steps": 2}
    training_loop.train(config_lib.make({**settings, "mixture_components": 3}), model_dir)
    return model_dir


@pytest.mark.slow
def test_program_draws_everything_the_same_way_twice(trained, tmp_path):
    flags = [f"--model_dir={trained}", f"--figures={','.join(FIGURES)}", "--rows=2", "--pairs=7"]
    done = run("visualize", *flags, f"--output_dir={tmp_path / 'first'}")
    config, _ = config_file.load(config_file.path_in(trained))

    def draw(names, folder, seed):
        given = config_lib.update(config, {"batch_size": 7, "seed": seed})
        figures.draw(FigureSettings(names, str(folder), str(trained), pairs=7, rows=2), given)

    draw(FIGURES, tmp_path / "second", 0)
    for name in FIGURES:
        assert str(tmp_path / "first" / f"{name}.png") in done.stdout
        for kind in ("png", "pdf"):
            first, second = (tmp_path / folder / f"{name}.{kind}" for folder in ("first", "second"))
            assert first.read_bytes() == second.read_bytes()
            assert first.read_bytes()[:4] == (b"\x89PNG" if kind == "png" else b"%PDF")
    # A sheet of pixels one to one, six pairs in a row, below a title.
    assert Image.open(tmp_path / "first" / "views.png").size == (6 * 194, 2 * 98 + 40)
    events = plugin_event_accumulator.EventAccumulator(str(trained / "logs" / "figures"))
    events.Reload()
    assert set(events.Tags()["tensors"]) == set(FIGURES)
    assert (trained / "logs" / "projector" / "projector_config.pbtxt").exists()
    draw(["similarity"], tmp_path, 5)
    assert (tmp_path / "similarity.png").read_bytes() != (
        tmp_path / "first" / "similarity.png"
    ).read_bytes()


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--output_dir"),
        (["--output_dir=OUT", "--figures=heat"], "--figures"),
        (["--output_dir=OUT", "--figures="], "--figures: expected some of"),
        (["--output_dir=OUT", "--figures=retrieval"], "--model_dir"),
        (["--output_dir=OUT", "--pairs=501"], "--pairs: expected an integer in the range [1, 500]"),
        (["--output_dir=OUT", "--model_dir=OUT"], "config.json"),
        (["--output_dir=OUT", "--policy=nothing"], "--policy"),
    ],
)
def test_mistakes_get_one_line(flags, named, tmp_path):
    flags = [flag.replace("OUT", str(tmp_path / "out")) for flag in flags]
    assert named in refused("visualize", *flags)
    assert not (tmp_path / "out").exists()


def test_names_that_are_no_unicode_are_drawn(tmp_path):
    gallery = _gallery()._replace(class_names=("caf\udce9", "_hidden", "$_{"))
    pyplot.close(embedding_figure.draw(gallery))
    embedding_figure.write_projector(gallery, tmp_path, 1)
    assert "caf?" in (tmp_path / "labels.tsv").read_text()
    figure, axes = heat_maps.grid([1], 1, "title")
    heat_maps.show(axes[0, 0], gallery.pictures[0], "query caf\udce9")
    charts.save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size


def test_no_test_image_that_can_be_decoded(tmp_path):
    config = _folder(tmp_path, train=3)
    write_tree(tmp_path, {f"test/c/{n}.jpg": b"\xff\xd8\xff no" for n in range(3)})
    settings = FigureSettings(("embedding",), str(tmp_path / "out"), str(tmp_path))
    with pytest.raises(UserError, match="expected at most 5% of 3 images"):
        figures._Figures(settings, config, None, 0)._gallery  # noqa: B018


def test_pairs_of_what_cannot_be_decoded(tmp_path):
    """Whatever the number of images, there is one line and no picture."""
    config = _folder(tmp_path, train=3)
    write_tree(tmp_path, {f"test/c/{n}.jpg": b"\xff\xd8\xff no" for n in range(3)})
    source = sources.load(config.data, "test")
    with pytest.raises(UserError, match="--data_dir: expected images") as error:
        figures._two_views(source, config, "rows", 2)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="--pairs: expected at most 3, for 3 images"):
        figures._two_views(source, config, "pairs", 4)


def test_long_names_and_names_of_several_lines(tmp_path):
    names = ("n" * 500, "two\nlines\tand a tab", "c")
    gallery = _gallery()._replace(class_names=names)
    pyplot.close(embedding_figure.draw(gallery))
    embedding_figure.write_projector(gallery, tmp_path, 1)
    assert len((tmp_path / "labels.tsv").read_text().splitlines()) == 1 + len(gallery.labels)
    assert len(charts.drawable(names[0], 30)) <= 30
    assert "\n" not in charts.one_line(names[1])
