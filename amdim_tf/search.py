"""Finds the images of an index that are most similar to a photograph.

Usage:
    python -m amdim_tf.search --index=INDEX --query=photo.jpg --k=8

prints cosine similarities and paths, the most similar first, and writes a picture of them,
neighbours.png. INDEX is made by python -m amdim_tf.extract … --index=INDEX.
"""

import pathlib
import unicodedata

from absl import flags

from amdim_tf import cli_flags
from amdim_tf.errors import UserError

flags.DEFINE(
    cli_flags.PATH, "index", None, "Directory that python -m amdim_tf.extract --index has written."
)
flags.DEFINE(cli_flags.PATH, "query", None, "Image file to find similar images of.")
flags.DEFINE_integer("k", 8, "How many.", lower_bound=1, upper_bound=1000)
flags.DEFINE(cli_flags.PATH, "picture", "neighbours.png", "PNG file to write.")
flags.DEFINE(cli_flags.PATH, "saved_model", "", "Where the index's model is, if it has been moved.")
# Unicode's categories: control, format (such as reversed writing), bytes that are no text, and
# separators of lines and paragraphs.
_WRITTEN_OUT = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def _one_line(path: str) -> str:
    """A path, with what would end the line or steer a terminal written out by its code."""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _WRITTEN_OUT
        else character
        for character in path
    )


def main() -> None:
    """Reads the flags, searches, prints and draws."""
    options = cli_flags.FLAGS
    index_dir = cli_flags.require("index", "the directory of an index")
    query = cli_flags.require("query", "an image file")
    picture = pathlib.Path(options.picture)
    if picture.suffix.lower() != ".png" or not picture.parent.is_dir():
        raise UserError(
            "--picture: expected the name of a PNG file in a directory that exists. "
            f"Received: {options.picture}."
        )
    cli_flags.import_tensorflow_quietly()
    from amdim_tf import charts, search_index

    index = search_index.load(index_dir)
    features = search_index.features_of_query(index, query, options.saved_model)
    found = index.search(features, options.k)
    if len(found) < options.k:
        print(f"{index_dir} has {len(found)} images, fewer than --k={options.k}.")
    classes = index.facts["classes"]
    titles = []
    for neighbour in found:
        name = classes[neighbour.label] if 0 <= neighbour.label < len(classes) else ""
        print(f"{neighbour.score:.4f}  {_one_line(neighbour.path)}")
        titles.append(f"{neighbour.score:.3f} {name}".strip())
    pictures = search_index.images_of(index, found)
    pixels = search_index.image_file(query)
    try:
        charts.neighbours(pixels, list(zip(titles, pictures, strict=True)), picture)
    except OSError as error:
        raise UserError(
            "--picture: expected a file with room and permission to write. Received: "
            f"{picture} ({error.strerror or error})."
        ) from None
    print(f"Wrote {picture}.")


if __name__ == "__main__":
    cli_flags.run(main)
