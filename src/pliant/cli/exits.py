"""The command that trains exits of a text classifier."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from pliant.cli.terminal import console, progress
from pliant.errors import ConfigError
from pliant.models import sources
from pliant.models.decoder_info import read_json
from pliant.models.encoder_shape import EncoderShape
from pliant.training import labelled_texts

_SEED = 0


def train_exits(
    model: Annotated[str, typer.Argument(help="A text classifier: zoo/NAME, a folder, or a name on the hub.")],
    out: Annotated[Path, typer.Argument(help="Becomes the folder of the model with exits.")],
    *,
    train: Annotated[str, typer.Option(help="Labelled texts to train on; the model may have learned from them.")],
    data: Annotated[str, typer.Option(help="Others, which it has not: to calibrate, and to choose the cut-off on.")],
    after: Annotated[str, typer.Option(help="Behind how many layers, from 0 on, with commas.")] = "half of them",
    accuracy_loss: Annotated[float, typer.Option(min=0, max=1, help="By how much less accurate it may get.")] = 0.01,
    epochs: Annotated[int, typer.Option(min=0, help="For which all layers learn, too; 0: they stay as they are.")] = 0,
    fragments: Annotated[int, typer.Option(min=0, help="Of each text, that layers learn from in each epoch.")] = 1,
    lr: Annotated[float, typer.Option(min=1e-9, help="Learning rate of the layers at its peak.")] = 1e-4,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the layers learn.")] = "cpu",
) -> None:
    """Train exits of a text classifier: sure texts then leave after some of its layers."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError([f"{out}: is there already; choose a folder that is not"])
    import torch

    from pliant.cli import exit_training
    from pliant.training.early_layers import Recipe

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(["--device: got cuda, but there is no GPU that torch can use; choose cpu"])
    recipe = Recipe(epochs, fragments, lr, device=device) if epochs else None
    with progress() as update:
        folder = sources.fetch(model, progress=update)
        info = sources.describe(folder)
        shape = EncoderShape.from_config(read_json(folder / "config.json"))
        chosen = _layers(after) if after != "half of them" else [max(1, shape.layers // 2 if shape else 1)]
        held_out = labelled_texts.read(data, info.labels)
        kept = {text.text for text in held_out}
        learned = [text for text in labelled_texts.read(train, info.labels) if text.text not in kept]
        if not learned:
            raise ConfigError(["--train: has no texts that --data has not; give others"])
        splits = exit_training.Splits(learned, *labelled_texts.split(held_out, _SEED))
        try:
            found = exit_training.train(folder, info, chosen, splits, accuracy_loss, out, update, recipe)
        except OSError as error:
            raise ConfigError([f"{out}: cannot be written: {error.strerror}"]) from None
    table = Table("layers", "accuracy of all texts there", "texts that leave there")
    for layers, accuracy, share in zip((*found.after, "all"), found.accuracies, found.shares, strict=True):
        table.add_row(str(layers), f"{accuracy:.1%}", f"{share:.0%}")
    console.print(table)
    console.print(
        f"Accuracy {found.accuracy:.1%} with exits where confidence is above {found.cut_off:g}, and "
        f"{found.model_accuracy:.1%} of {model}, on {len(splits.choose)} texts."
    )
    console.print(f"Written to {out}. Serve it: model: {out.resolve()}, exits: true", markup=False, soft_wrap=True)


def _layers(given: str) -> list[int]:
    try:
        return [int(each) for each in given.split(",")]
    except ValueError:
        raise ConfigError([f"--after: got {given}; must be numbers of layers, such as 2,4"]) from None
