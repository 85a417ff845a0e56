"""What `classify` does with a model of images: a label for each file."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from manyheads.commands.shared import say, write
from manyheads.errors import UserError

if TYPE_CHECKING:
    from manyheads.loading import LoadedRun


def classify_pictures(opened: "LoadedRun", files: list[Path], scores: bool, as_json: bool) -> None:
    """One line a file; one that cannot be read is said, and the others are answered.

    Of a folder all pictures are labelled, also those in folders inside it, in order of their names.
    """
    from manyheads.data.image_files import pictures_in
    from manyheads.data.images import read_picture
    from manyheads.tasks.images import class_chances

    model = opened.labeller()
    if not files:
        raise UserError(
            f"{opened.folder} holds a model of images: name the files, classify RUN a.png b.png"
        )
    if not model.config.pixel_mean:
        say("the model does not say what its pixels are normalised by: −1 to 1 is supposed")
    if model.config.unseen:
        say(f"the model does not see the last {model.config.unseen} rows and columns of a picture")
    failed = 0
    for file in [one for path in files for one in pictures_in(path)]:
        try:
            pixels = read_picture(file, model.config.image_size, model.config.channels)
        except UserError as mistake:  # the others are answered all the same
            say(f"manyheads: {mistake}")
            failed = mistake.exit_code
            continue
        chances = class_chances(model, pixels[None])[0]
        label = max(chances, key=chances.__getitem__)
        if as_json:
            row = {"file": str(file), "label": label, "scores": chances}
            write(json.dumps(row, ensure_ascii=False) + "\n")
            continue
        every = [f"{name}={value:.4f}" for name, value in chances.items()]
        write(
            "\t".join([label, *(every if scores else [f"{chances[label]:.4f}"]), str(file)]) + "\n"
        )
    if failed:
        raise typer.Exit(failed)
