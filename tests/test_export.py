"""Exports: the model's features in every way they are served, and nothing half-written."""

import base64
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from pictures import encoded, picture
from PIL import Image
from test_model import make_batch, make_config, make_model
from test_train import ROOT, refused, run

import amdim_tf
from amdim_tf import checkpoints, config_file, directory_locks, exporting, feature_model, views
from amdim_tf.checkpoints import Checkpoints
from amdim_tf.errors import UserError

TOLERANCE = 1e-5
OUTPUTS = {"f1", "f5", "f7", "phi1", "phi5", "phi7"}
TINY = {"n_depth": 1, "evaluation_resize": 36}
FILES = {"amdim_tf.json", "f1.tflite", "saved_model.pb", "fingerprint.pb", "variables", "assets"}


def _write_run(directory, model, step, **settings):
    config_file.save(
        make_config(**settings), config_file.path_in(directory), {"classes": ["a", "b", "c"]}
    )
    Checkpoints(directory, model).save(step)
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A run of a tiny model; its evaluation view cuts 32 pixels out of 36."""
    settings = {**TINY, "warmup_steps": 0, "learning_rate": 1e-2}
    model = make_model(**settings)
    step = tf.function(model.train_step)
    for seed in range(3):
        step(make_batch(seed=seed))
    return _write_run(tmp_path_factory.mktemp("run"), model, 3, **settings)


@pytest.fixture(scope="module")
def model(model_dir):
    return amdim_tf.load_model(model_dir)


@pytest.fixture(scope="module")
def done(model_dir):
    """The program, run once with all that it can write."""
    return run("export", f"--model_dir={model_dir}", "--tflite")


@pytest.fixture(scope="module")
def directory(model_dir, done):
    return model_dir / "export"


@pytest.fixture(scope="module")
def signatures(directory):
    loaded = tf.saved_model.load(str(directory))  # the signatures do not keep its variables alive
    yield loaded.signatures


def _images(count=3, height=33, width=47, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, [count, height, width, 3]).astype(np.uint8)


def _features(model, images):
    return np.asarray(model.encode(model.preprocess(images))["f1"])


def _assert_close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=TOLERANCE)


def test_what_the_program_writes_and_says(directory, done):
    assert {path.name for path in directory.iterdir()} == FILES
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Checked SavedModel: largest difference from the model ")
    assert lines[1].startswith("Checked f1.tflite: largest difference from the model ")
    assert lines[2] == f"Wrote {directory}: step 3, serving_default, encoded, maps."
    assert [path.name for path in directory.parent.glob("*.partial*")] == []


@pytest.mark.parametrize(
    "count, height, width",
    [(3, 32, 32), (3, 36, 36), (3, 33, 47), (2, 200, 51), (1, 1, 1), (1, 1, 90), (1000, 32, 32)],
)
def test_features_of_images_of_any_size_and_number(count, height, width, signatures, model):
    images = _images(count, height, width)
    outputs = signatures["serving_default"](images=images)
    assert set(outputs) == {"f1"}
    _assert_close(outputs["f1"], _features(model, images))


def test_maps_are_all_that_encode_gives(signatures, model):
    images = _images()
    outputs = signatures["maps"](images=images)
    assert set(outputs) == OUTPUTS
    for name, expected in model.encode(model.preprocess(images)).items():
        _assert_close(outputs[name], expected)


@pytest.mark.parametrize("name, shape", [("serving_default", (0, 8, 9, 3)), ("encoded", (0,))])
def test_no_images_have_no_features(name, shape, signatures):
    (spec,) = signatures[name].structured_input_signature[1].values()
    outputs = signatures[name](**{spec.name: tf.zeros(shape, spec.dtype)})
    assert outputs["f1"].shape == (0, 32)


@pytest.mark.parametrize("shape", [(3, 32, 32, 1), (2, 9, 9, 4), (32, 32, 3), (1, 2, 9, 9, 3)])
@pytest.mark.parametrize("name", ["serving_default", "maps"])
def test_images_of_other_shapes_are_refused(name, shape, signatures):
    received = " ".join(map(str, shape))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=rf"expected the shape \[N, H, W, 3\].*\[{received}\]"
    ):
        signatures[name](images=tf.zeros(shape, tf.uint8))


def test_images_without_pixels_are_refused(signatures):
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"at least 1 pixel.*\[0 9\]"):
        signatures["serving_default"](images=tf.zeros([2, 0, 9, 3], tf.uint8))


FORMATS = {
    "jpeg": ("RGB", "JPEG", {}),
    "progressive jpeg": ("RGB", "JPEG", {"progressive": True}),
    "grayscale jpeg": ("L", "JPEG", {}),
    "cmyk jpeg": ("CMYK", "JPEG", {}),
    "png": ("RGB", "PNG", {}),
    "rgba png": ("RGBA", "PNG", {}),
    "grayscale png": ("L", "PNG", {}),
    "palette png": ("P", "PNG", {}),
    "bmp": ("RGB", "BMP", {}),
    "webp": ("RGB", "WEBP", {}),
    "rgba webp": ("RGBA", "WEBP", {"lossless": True}),
    "gif": ("P", "GIF", {}),
    "animated gif": ("RGB", "GIF", {"save_all": True, "append_images": [picture(seed=9)]}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_encoded_images_equal_pillows_pixels(name, signatures, model):
    mode, kind, options = FORMATS[name]
    image = picture(60, 80).convert(mode)
    if mode == "RGBA":
        image.putalpha(image.getchannel("R").point(lambda level: max(level, 1)))
    contents = encoded(image, kind, **options)
    pixels = np.asarray(Image.open(io.BytesIO(contents)).convert("RGB"))
    outputs = signatures["encoded"](encoded_images=tf.constant([contents]))
    _assert_close(outputs["f1"], _features(model, pixels[np.newaxis]))


def test_encoded_images_of_different_sizes_keep_their_order(signatures, model):
    pictures = [picture(*sides, seed=sides[0]) for sides in ((33, 47), (1, 1), (200, 51), (32, 32))]
    contents = tf.constant([encoded(image, "PNG") for image in pictures])
    expected = [_features(model, np.asarray(image)[np.newaxis])[0] for image in pictures]
    _assert_close(signatures["encoded"](encoded_images=contents)["f1"], expected)


def test_an_undecodable_image_is_named(signatures):
    good = encoded(picture())
    contents = tf.constant([good, good, good, b"no image", good, good[:200]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"image 3, 5 \(2 of 6; positions"):
        signatures["encoded"](encoded_images=contents)


# None in sys.modules means that a module cannot be imported, wherever it may be installed.
_FRESH_PROCESS = """
import sys
sys.modules.update(dict.fromkeys(("amdim_tf", "keras", "tf_keras")))
try:
    import amdim_tf.decode
except ModuleNotFoundError:
    import numpy as np
    import tensorflow as tf

directory, given, result = sys.argv[1:]
loaded = tf.saved_model.load(directory)
signatures = loaded.signatures
with np.load(given) as arrays:
    images, files = arrays["images"], arrays["files"].tolist()
features = {name: signatures[name](images=images)["f1"] for name in ("serving_default", "maps")}
features["encoded"] = signatures["encoded"](encoded_images=tf.constant(files))["f1"]
dataset = tf.data.Dataset.from_tensor_slices(files).batch(2)
dataset = dataset.map(lambda batch: signatures["encoded"](encoded_images=batch)["f1"])
features["dataset"] = np.concatenate(list(dataset))
try:
    signatures["encoded"](encoded_images=tf.constant([files[0], b"nothing"]))
except tf.errors.InvalidArgumentError as error:
    assert "image 1 (1 of 2" in str(error), error
else:
    raise AssertionError("an undecodable file was decoded")
own = {name for name in sys.modules if name.partition(".")[0] in ("amdim_tf", "keras", "tf_keras")}
assert all(sys.modules[name] is None for name in own), own
np.savez(result, **features)
"""


def _run_alone(script, *arguments, cwd):
    """Runs a script outside this checkout and its path; returns what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        [sys.executable, "-I", "-c", script, *map(str, arguments)],
        capture_output=True, text=True, cwd=cwd, env=environment,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_it_loads_with_tensorflow_alone(directory, model, tmp_path):
    images = _images()
    files = [encoded(Image.fromarray(image), "PNG") for image in images]
    np.savez(tmp_path / "given.npz", images=images, files=np.array(files))
    alone = shutil.copytree(directory, tmp_path / "elsewhere")
    _run_alone(_FRESH_PROCESS, alone, tmp_path / "given.npz", tmp_path / "f.npz", cwd=tmp_path)
    with np.load(tmp_path / "f.npz") as features:
        assert set(features) == {"serving_default", "maps", "encoded", "dataset"}
        for values in features.values():
            _assert_close(values, _features(model, images))


def test_a_keras_layer_under_a_classifier(directory, model):
    images = _images()
    inputs = keras.Input([None, None, 3], dtype="uint8")
    layer = keras.layers.TFSMLayer(str(directory), call_endpoint="serving_default", trainable=False)
    features = keras.Model(inputs, layer(inputs)["f1"])
    classifier = keras.Sequential([features, keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    classifier.compile("adam", loss)
    history = classifier.fit(images, np.arange(3), epochs=2, verbose=0).history
    assert history["loss"][1] < history["loss"][0]
    _assert_close(features.predict(images, verbose=0), _features(model, images))


def _saved_model_cli(*arguments):
    module = "tensorflow.python.tools.saved_model_cli"
    finished = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_saved_model_cli_shows_the_signatures(directory):
    shown = _saved_model_cli("show", "--dir", directory, "--all")
    for name in ("serving_default", "encoded", "maps"):
        assert f"signature_def['{name}']" in shown
    for name in ("images", "encoded_images"):
        assert f"inputs['{name}']" in shown
    assert all(f"outputs['{name}']" in shown for name in OUTPUTS)


def test_saved_model_cli_runs_a_signature(directory, model, tmp_path):
    images = _images()
    np.save(tmp_path / "images.npy", images)
    _saved_model_cli(
        "run", "--dir", directory, "--tag_set", "serve", "--signature_def", "serving_default",
        "--inputs", f"images={tmp_path / 'images.npy'}", "--outdir", tmp_path,
    )  # fmt: skip
    _assert_close(np.load(tmp_path / "f1.npy"), _features(model, images))


def _serve(directory, signature, tensors):
    """Answers a request the way TensorFlow Serving does: by graph and session, without functions.

    Args:
        directory: of the export.
        signature: its name in the request.
        tensors: {input name: array} of the request.
    """
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        graph = tf.compat.v1.saved_model.load(session, ["serve"], str(directory))
        served = graph.signature_def[signature]
        feeds = {served.inputs[name].name: value for name, value in tensors.items()}
        return session.run({name: info.name for name, info in served.outputs.items()}, feeds)


def test_a_predict_request(directory, model):
    predict_pb2 = pytest.importorskip("tensorflow_serving.apis.predict_pb2")
    images = _images()
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "amdim"
    request.model_spec.signature_name = "serving_default"
    request.inputs["images"].CopyFrom(tf.make_tensor_proto(images))
    received = predict_pb2.PredictRequest.FromString(request.SerializeToString())
    tensors = {name: tf.make_ndarray(value) for name, value in received.inputs.items()}
    answer = _serve(directory, received.model_spec.signature_name, tensors)
    _assert_close(answer["f1"], _features(model, images))


def test_a_rest_request(directory, model):
    images = _images()
    files = [encoded(Image.fromarray(image), "PNG") for image in images]
    body = json.dumps(
        {
            "signature_name": "encoded",
            "instances": [{"b64": base64.b64encode(contents).decode()} for contents in files],
        }
    )
    received = json.loads(body)
    values = [base64.b64decode(instance["b64"]) for instance in received["instances"]]
    tensors = {"encoded_images": np.array(values, object)}
    answer = _serve(directory, received["signature_name"], tensors)
    _assert_close(answer["f1"], _features(model, images))


def test_what_is_known_about_an_export(directory, model_dir, model):
    metadata = json.loads((directory / "amdim_tf.json").read_text())
    assert (metadata["format"], metadata["step"], metadata["dtype"]) == (
        "amdim_tf export", 3, "float32",
    )  # fmt: skip
    assert metadata["classes"] == ["a", "b", "c"]
    assert metadata["config"]["views"]["evaluation_resize"] == 36
    assert metadata["versions"]["tensorflow"] == tf.__version__
    folder = model_dir / "checkpoints" / "step-00000003"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(manifest["files"]) == 3 and len(manifest["sha256"]) == 64
    assert metadata["checkpoint_sha256"] == manifest["sha256"]
    described = metadata["signatures"]
    assert described["encoded"] == {
        "inputs": {"encoded_images": {"dtype": "string", "shape": [None]}},
        "outputs": {"f1": {"dtype": "float32", "shape": [None, 32]}},
    }
    assert described["serving_default"]["inputs"]["images"] == {
        "dtype": "uint8", "shape": [None, None, None, 3],
    }  # fmt: skip
    shapes = {name: output["shape"] for name, output in described["maps"]["outputs"].items()}
    outputs = model.encode(model.preprocess(_images())).items()
    assert shapes == {name: [None, *value.shape[1:]] for name, value in outputs}


def test_a_checkpoint_that_training_removes_meanwhile(model_dir, model, tmp_path, monkeypatch):
    shutil.copytree(model_dir, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    load_model, loaded = checkpoints.load_model, []

    def load(*arguments, **options):
        loaded.append(load_model(*arguments, **options))
        if len(loaded) == 1:
            Checkpoints(tmp_path / "run", model, kept=1).save(4)  # and step 3 goes
        return loaded[-1]

    monkeypatch.setattr(checkpoints, "load_model", load)
    _, step, digest = exporting._load(tmp_path / "run")
    manifest = tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    assert step == 4 and digest == json.loads(manifest.read_text())["sha256"]


def test_signatures_of_another_model_are_refused(signatures):
    with pytest.raises(UserError, match="float32 export: expected features within"):
        exporting.check_signatures(signatures, make_model(**TINY), "float32")


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
@pytest.mark.parametrize("count", [1, 5])
def test_the_lite_file(count, directory, model):
    interpreter = tf.lite.Interpreter(str(directory / "f1.tflite"))
    images = _images(count, 32, 32)
    normalized = views.normalize(model.view_settings, tf.cast(images, tf.float32))
    features = interpreter.get_signature_runner()(images=images)["f1"]
    np.testing.assert_allclose(features, model.encode(normalized)["f1"], rtol=0, atol=1e-4)


def test_a_lite_file_of_another_model_is_refused(directory):
    contents = (directory / "f1.tflite").read_bytes()
    with pytest.raises(UserError, match="LiteRT export: expected features within"):
        exporting.check_lite_model(contents, make_model(**TINY))


# The program, then what it wrote: in one process, as the program keeps oneDNN from dying of AMX.
_BFLOAT16 = """
import runpy, sys

root, model_dir, target, given, result = sys.argv[1:]
sys.path.insert(0, root)
sys.argv = ["export", f"--model_dir={model_dir}", f"--output_dir={target}", "--dtype=bfloat16"]
try:
    runpy.run_module("amdim_tf.export", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
import numpy as np
import tensorflow as tf

outputs = tf.saved_model.load(target).signatures["maps"](images=np.load(given))
np.savez(result, **outputs)
"""


def test_bfloat16(model_dir, model, tmp_path):
    images, target = _images(), tmp_path / "export"
    np.save(tmp_path / "given.npy", images)
    arguments = (ROOT, model_dir, target, tmp_path / "given.npy", tmp_path / "outputs.npz")
    assert f"Wrote {target}" in _run_alone(_BFLOAT16, *arguments, cwd=tmp_path)
    types = tf.train.load_checkpoint(str(target / "variables" / "variables"))
    types = types.get_variable_to_dtype_map()
    assert {kind for name, kind in types.items() if "kernel" in name} == {tf.bfloat16}
    assert {kind for name, kind in types.items() if "moving" in name} == {tf.float32}
    assert json.loads((target / "amdim_tf.json").read_text())["dtype"] == "bfloat16"
    expected = model.encode(model.preprocess(images))
    with np.load(tmp_path / "outputs.npz") as outputs:
        assert set(outputs) == OUTPUTS
        for name, output in outputs.items():
            assert output.dtype == np.float32
            error = np.linalg.norm(output - expected[name]) / np.linalg.norm(expected[name])
            assert 1e-4 < error < 0.05


def test_an_earlier_export_is_replaced(model_dir, directory, tmp_path, capsys):
    target = tmp_path / "export"
    shutil.copytree(directory, target)
    (target / "saved_model.pb").write_text("old")
    exporting.export(model_dir, target)
    assert "step 3, serving_default, encoded, maps. It replaces" in capsys.readouterr().out
    assert {path.name for path in target.iterdir()} == FILES - {"f1.tflite"}
    assert (target / "saved_model.pb").stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_others_may_read_an_export(directory):
    mask = os.umask(0)
    os.umask(mask)
    assert directory.stat().st_mode & 0o777 == 0o777 & ~mask


def _all_bytes(directory):
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_a_failed_check_leaves_the_earlier_export(model_dir, directory, tmp_path):
    broken = shutil.copytree(model_dir, tmp_path / "run")
    diverged = make_model(**TINY)
    # Finite weights, or they would be refused before; what comes of them is not.
    diverged.encoder.stages[-1].gamma.assign(np.full(32, 3e38, np.float32))
    diverged.encoder.stages[-1].moving_variance.assign(np.zeros(32, np.float32))
    Checkpoints(broken, diverged, kept=2).save(4)
    before = _all_bytes(broken)
    with pytest.raises(UserError, match=r"within .* Received: a difference of nan"):
        exporting.export(broken)
    assert _all_bytes(broken) == before


def test_a_full_disk_leaves_nothing(model_dir, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match="--output_dir: expected room and permission"):
            exporting.export(model_dir, tmp_path / "new" / "export")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_leaves_nothing(model_dir, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "amdim_tf.export", f"--model_dir={model_dir}",
         f"--output_dir={tmp_path / 'export'}"],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    while process.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "Stopped by SIGTERM. Nothing was written." in errors and "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_left_is_removed(model_dir, directory, tmp_path):
    """One that was killed between its two renames, and one that is still running."""
    target = tmp_path / "export"
    killed, running, other = (
        tmp_path / f"export.partial-{name}" for name in ("a" * 8, "b" * 8, "me")
    )
    shutil.copytree(directory, killed / "replaced")
    (killed / "new").mkdir()
    for path in (running / "new", other):
        path.mkdir(parents=True)
    with directory_locks.locked(running):
        exporting._clear_leftovers(target)
        assert sorted(tmp_path.iterdir()) == [target, running, other]
        assert _all_bytes(target) == _all_bytes(directory)
    exporting.export(model_dir, target)
    assert sorted(tmp_path.iterdir()) == [target, other]


@pytest.mark.parametrize(
    "place, received",
    [
        ("holds_notes", "holds notes.txt"),
        ("export_with_notes", "holds notes.txt"),
        ("export_with_weights", "holds assets/deep, assets/mine.txt, variables/old.index"),
        ("file", "is a file"),
        ("file/export", "Not a directory"),
        ("run", "holds checkpoints, config.json"),
        ("run/checkpoints/export", "checkpoints/export"),
        ("export/inner", "which is inside"),
        ("run[1]", "run[1]"),
        ("gs://bucket/export", "gs://bucket/export"),
    ],
)
def test_places_that_are_refused(place, received, model_dir, directory, tmp_path):
    shutil.copytree(model_dir, tmp_path / "run", ignore=shutil.ignore_patterns("export"))
    shutil.copytree(directory, tmp_path / "export")
    shutil.copytree(directory, tmp_path / "export_with_notes")
    (tmp_path / "holds_notes").mkdir()
    for name in ("holds_notes", "export_with_notes"):
        (tmp_path / name / "notes.txt").write_text("mine")
    inside = shutil.copytree(directory, tmp_path / "export_with_weights")
    (inside / "assets" / "deep").mkdir(parents=True)
    (inside / "assets" / "mine.txt").write_text("mine")
    (inside / "variables" / "old.index").write_text("mine")
    (tmp_path / "file").write_text("")
    before = _all_bytes(tmp_path)
    target = place if "://" in place else tmp_path / place
    with pytest.raises(UserError, match="--output_dir: expected") as error:
        exporting.export(tmp_path / "run", target)
    assert received in str(error.value) and "\n" not in str(error.value)
    assert _all_bytes(tmp_path) == before


def test_metadata_that_is_too_deep_is_none(tmp_path):
    (tmp_path / "amdim_tf.json").write_text("[" * 100_000)
    assert exporting._step_of_export(tmp_path) is None
    assert feature_model.metadata(tmp_path) == {}


def test_metadata_that_never_ends_is_none(tmp_path):
    os.mkfifo(tmp_path / "amdim_tf.json")
    assert exporting._step_of_export(tmp_path) is None
    assert feature_model.metadata(tmp_path) == {}


def test_a_run_without_checkpoint(tmp_path):
    config_file.save(make_config(), config_file.path_in(tmp_path), {"classes": []})
    with pytest.raises(UserError, match="expected a checkpoint; there is none"):
        exporting.export(tmp_path)
    assert not (tmp_path / "export").exists()


def test_no_run_at_all(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: expected .* Check --model_dir"):
        exporting.export(tmp_path / "typo")
    assert list(tmp_path.iterdir()) == []


def test_a_lite_file_has_no_bfloat16(model_dir, tmp_path):
    with pytest.raises(UserError, match="--tflite: expected --dtype=float32"):
        exporting.export(model_dir, tmp_path / "export", dtype="bfloat16", tflite=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float16", "LiteRT", None])
def test_other_dtypes_are_refused(dtype, model_dir, tmp_path):
    with pytest.raises(UserError, match=r"--dtype: expected float32 or bfloat16\. Received: "):
        exporting.export(model_dir, tmp_path / "export", dtype=dtype, tflite=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags, named",
    [
        ([], "--model_dir"),
        (["--model_dir=NOWHERE", "--dtype=float16"], "dtype"),
        (["--model_dir=NOWHERE", "--tflite=perhaps"], "tflite"),
    ],
)
def test_mistakes_get_one_line(flags, named, tmp_path):
    flags = [flag.replace("NOWHERE", str(tmp_path / "none")) for flag in flags]
    assert named in refused("export", *flags)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_mixture_has_a_signature_of_its_own(tmp_path):
    settings = {**TINY, "mixture_components": 3, "mixture_temperature": 2.0}
    model = make_model(**settings)
    tf.function(model.train_step)(make_batch())
    directory = exporting.export(_write_run(tmp_path, model, 1, **settings))
    loaded = tf.saved_model.load(str(directory))
    signature = loaded.signatures["mixture"]
    images, others = _images(), _images(height=40, width=36, seed=1)
    outputs = signature(images=images, other_images=others)
    f1 = model.encode(model.preprocess(images))["f1"]
    _assert_close(outputs["components"], np.asarray(model.mixture(f1)))
    phi7 = model.encode(model.preprocess(others))["phi7"]
    posterior = np.asarray(model.posterior(f1, phi7))
    np.testing.assert_allclose(outputs["posterior"], posterior, atol=1e-3)
    assert posterior.shape == (3, 7, 7, 3)
    alone = signature(images=images[:1], other_images=others[:1])["posterior"]
    np.testing.assert_allclose(alone, posterior[:1], atol=1e-3)
    nothing = tf.zeros([0, 8, 9, 3], tf.uint8)
    assert signature(images=nothing, other_images=nothing)["posterior"].shape == (0, 7, 7, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="as many as images"):
        signature(images=images, other_images=others[:2])
    target = f"--output_dir={tmp_path / 'small'}"
    run("export", f"--model_dir={tmp_path}", target, "--dtype=bfloat16")
