"""Figures of what the model sees and has learned, as PNG, PDF and in TensorBoard."""

from __future__ import annotations

import dataclasses
import errno
import functools
import pathlib

import numpy as np
import tensorflow as tf
from matplotlib import pyplot

from amdim_tf import (
    charts,
    checkpoints,
    embedding_figure,
    input_pipeline,
    pair_figures,
    retrieval_figure,
    segmentation_probe,
    sources,
    views,
)
from amdim_tf.config import Config, DataConfig
from amdim_tf.errors import UserError, tensorflow_reason
from amdim_tf.examples import Source, subset
from amdim_tf.model import AMDIM
from amdim_tf.progress import Progress
from amdim_tf.retrieval_figure import Gallery
from amdim_tf.summaries import image_grid

FIGURES = ("views", "retrieval", "similarity", "segmentation", "embedding")
# Small images are enlarged to about this many pixels, for people.
_SHOWN_SIDE = 96
_TITLE_PIXELS = 40
# Images that queries find their neighbours among, and images of the embedding.
_GALLERY, _EMBEDDED, _FEWEST_EMBEDDED = 4000, 1500, 3
_BATCH = 250


@dataclasses.dataclass(frozen=True)
class FigureSettings:
    """What to draw, and where to.

    Attributes:
        names: among FIGURES.
        output_dir: made if need be.
        model_dir: the run whose model is shown; views needs none.
        pairs: how many pairs of views `views` shows.
        rows: queries of `retrieval`, pairs of `similarity`, half the pairs of `segmentation`.
    """

    names: tuple[str, ...]
    output_dir: str
    model_dir: str = ""
    pairs: int = 48
    rows: int = 6

    def __post_init__(self):
        """Refuses names that do not exist, and those that need a model where there is none."""
        if not self.names:
            raise UserError(f"--figures: expected some of {', '.join(FIGURES)}. Received: nothing.")
        for name in self.names:
            if name not in FIGURES:
                raise UserError(f"--figures: expected {', '.join(FIGURES)}. Received: {name!r}.")
            if name != "views" and not self.model_dir:
                raise UserError(
                    f"--model_dir: expected a training run for --figures={name}. Received: nothing."
                )


def draw(settings: FigureSettings, config: Config) -> None:
    """Draws the named figures into a directory, and logs them for TensorBoard beside the run.

    Args:
        settings: what to draw.
        config: data, views and seed; the seed chooses images, views and cells.
    """
    model, step = None, 0
    if set(settings.names) - {"views"}:
        model, step = checkpoints.load_model(settings.model_dir, step_wanted=True)
    if "segmentation" in settings.names:
        segmentation_probe.require_mixture(model, "--figures=segmentation")
    figures = _Figures(settings, config, model, step)
    for name in settings.names:
        try:
            figure = getattr(figures, name)()
            if name != "views":
                whence = f"({config.data.dataset}, step {step})"
                figure.suptitle(f"{figure.get_suptitle()} {whence}", fontsize=10)
            paths = _write(figure, name, settings.output_dir)
            if settings.model_dir:
                _log(settings.model_dir, name, paths[0], step)
        except (tf.errors.FailedPreconditionError, tf.errors.PermissionDeniedError) as error:
            raise UserError(
                f"{settings.model_dir}/logs: expected a directory for TensorBoard's files. "
                f"Received: {tensorflow_reason(error)}."
            ) from None
        print(f"Wrote {paths[0]} and {paths[1].name}.")


class _Figures:
    """A method for each figure; what several of them need is made once."""

    def __init__(self, settings: FigureSettings, config: Config, model: AMDIM | None, step: int):
        self._settings, self._config, self._model, self._step = settings, config, model, step

    def views(self):
        """Pairs of views for the given flags."""
        sheet = views_sheet(self._config, self._settings.pairs)
        title = f"Pairs of views, as training makes them ({self._config.data.dataset})"
        return _sheet_figure(sheet, title)

    def retrieval(self):
        """Nearest images by f1."""
        gallery = self._gallery
        rows = self._settings.rows
        if len(gallery.labels) <= max(rows, retrieval_figure.NEIGHBOURS):
            raise UserError(
                f"--figures=retrieval: expected more than {retrieval_figure.NEIGHBOURS} images and "
                f"than --rows={rows}. Received: {len(gallery.labels)}."
            )
        random = np.random.default_rng(self._config.training.seed)
        queries = random.permutation(len(gallery.labels))[:rows]

        def normalize(images):
            return views.normalize(self._config.views, images)

        phi7_of = retrieval_figure.phi7_function(self._model, normalize, gallery.pictures)
        found = retrieval_figure.retrieve(gallery, queries, self._model.antecedents, phi7_of)
        return retrieval_figure.draw(gallery, found)

    def similarity(self):
        """Features of one view compared with the cells of the other."""
        pictures, encoded = self._pairs()
        found = pair_figures.similarities(
            *({name: part[name] for name in ("phi5", "phi7")} for part in encoded),
            self._model.antecedents(encoded[0]["f1"]),
        )
        return pair_figures.draw_similarities(*pictures, found)

    def segmentation(self):
        """Mixture posteriors."""
        pictures, encoded = self._pairs(in_a_row=2)
        posterior = pair_figures.posteriors(self._model, *encoded)
        return pair_figures.draw_segmentation(*pictures, posterior)

    def embedding(self):
        """The plane of principal components; the projector's files go to the run's logs."""
        whole = self._gallery
        if len(whole.labels) < _FEWEST_EMBEDDED:
            raise UserError(
                f"--figures=embedding: expected at least {_FEWEST_EMBEDDED} images, for a plane. "
                f"Received: {len(whole.labels)}."
            )
        few = Gallery(
            whole.pictures[:_EMBEDDED], whole.labels[:_EMBEDDED], whole.f1[:_EMBEDDED],
            whole.class_names,
        )  # fmt: skip
        directory = pathlib.Path(self._settings.model_dir) / "logs" / "projector"
        embedding_figure.write_projector(few, directory, self._step)
        return embedding_figure.draw(few)

    def _pairs(self, in_a_row: int = 1):
        """(pictures, encodings), each of two augmented views of test images."""
        rows = self._settings.rows
        both = _two_views(self._source, self._config, "rows", rows, in_a_row)
        pictures = [views.denormalize(self._config.views, view).numpy() for view in both]
        return pictures, [self._model.encode(view) for view in both]

    @functools.cached_property
    def _source(self) -> Source:
        return _test_source(self._config.data)

    @functools.cached_property
    def _gallery(self) -> Gallery:
        """Test images with their f1, chosen by the seed, in a random order."""
        config, source = self._config, self._source
        random = np.random.default_rng(config.training.seed)
        chosen = subset(source, random.permutation(len(source))[:_GALLERY])
        pictures, labels, f1 = [], [], []
        with Progress(len(chosen), "encode", "image") as progress:
            for images, numbers in input_pipeline.evaluation_batches(chosen, config, _BATCH):
                pictures.append(views.denormalize(config.views, images).numpy())
                labels.append(numbers.numpy())
                f1.append(self._model.encoder(images, training=False)["f1"].numpy())
                progress.advance(len(images))
        chosen.skipped.check()
        if not f1:
            raise UserError(
                f"--data_dir: expected test images. Received: {len(chosen)} that cannot be decoded."
            )
        parts = (np.concatenate(part) for part in (pictures, labels, f1))
        return Gallery(*parts, tuple(source.class_names))


def _test_source(data: DataConfig) -> Source:
    """Test images; where a folder has none, the images that there are."""
    if "test" in sources.splits_of(data):
        return sources.load(data, "test")
    source = sources.load(data, "train")
    print(f"{data.data_dir} has no test images: training images are shown.")
    return source


def _two_views(source: Source, config: Config, flag: str, number: int, images_each: int = 1):
    """Two views of the first images of training's order, as training makes them.

    Args:
        source, config: images and recipe.
        flag: by which the user says how many images are shown.
        number: the flag's value.
        images_each: how many images it stands for.
    """
    most = len(source) // images_each
    if not most:
        raise UserError(
            f"--data_dir: expected at least {images_each} images. Received: {len(source)}."
        )
    if number > most:
        raise UserError(
            f"--{flag}: expected at most {most}, for {len(source)} images. Received: {number}."
        )
    training = dataclasses.replace(config.training, batch_size=number * images_each)
    config = dataclasses.replace(config, training=training)
    try:
        batch = next(iter(input_pipeline.training_batches(source, config, 0, 1)))
    except tf.errors.InvalidArgumentError:  # so many bad images that none could take their place
        names = source.skipped.names
        raise UserError(
            f"--data_dir: expected images. Received: {len(names)} that cannot be decoded, the "
            f"first being {names[0]}."
        ) from None
    source.skipped.check()
    return batch["view1"], batch["view2"]


def _write(figure, name: str, output_dir) -> list[pathlib.Path]:
    """OUTPUT_DIR/NAME.png and .pdf."""
    paths = [pathlib.Path(output_dir) / f"{name}.{kind}" for kind in ("png", "pdf")]
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if path.is_dir():  # before either is written
                raise IsADirectoryError(errno.EISDIR, "a directory is in the way", str(path))
        for path in paths:
            charts.save(figure, path)
    except OSError as error:
        raise UserError(
            f"--output_dir: expected a directory that can be written. Received: "
            f"{error.filename or output_dir} ({error.strerror})."
        ) from None
    finally:
        pyplot.close(figure)
    return paths


def _log(model_dir, name: str, path: pathlib.Path, step: int) -> None:
    """Shows a figure in TensorBoard, at the checkpoint's step."""
    directory = pathlib.Path(model_dir) / "logs" / "figures"
    with tf.summary.create_file_writer(str(directory)).as_default(step=step):
        tf.summary.image(name, tf.io.decode_png(path.read_bytes(), channels=3)[None])


def _sheet_figure(sheet: np.ndarray, title: str):
    """Pixels [H, W, 3] one to one, with a title above."""
    height, width, _ = sheet.shape
    whole = height + _TITLE_PIXELS
    figure = pyplot.figure(figsize=(width / charts.DPI, whole / charts.DPI))
    axes = figure.add_axes((0, 0, 1, height / whole))
    axes.imshow(sheet, interpolation="nearest", aspect="auto")
    axes.set_axis_off()
    figure.suptitle(title, fontsize=10, y=1 - 0.35 * _TITLE_PIXELS / whole, va="center")
    return figure


def views_sheet(config: Config, pairs: int) -> np.ndarray:
    """Pairs of views of training images: uint8 [H, W, 3]."""
    source = sources.load(config.data, "train")
    both = [
        views.denormalize(config.views, view).numpy()
        for view in _two_views(source, config, "pairs", pairs)
    ]
    factor = max(1, round(_SHOWN_SIDE / config.data.image_size))
    pictures = np.concatenate(both, axis=2)  # [pairs, S, 2S, 3]
    pictures = pictures.repeat(factor, axis=1).repeat(factor, axis=2)
    return image_grid(pictures, columns=max(1, 1200 // pictures.shape[2]))
