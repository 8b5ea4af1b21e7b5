"""What an encoder's folder says of its exits: classifiers behind some of its layers (`pliant train-exits`).

They lie in the folder's own `exits`. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pliant.errors import ModelError
from pliant.models.decoder_info import read_json

FOLDER = "exits"
TRAIN = "train some with pliant train-exits, and serve the folder that it writes"
_CONFIG = "config.json"


@dataclass(frozen=True)
class ExitsInfo:
    """Raises ValueError if it cannot be."""

    after: tuple[int, ...]
    """Behind how many layers there is an exit, in rising order; one behind none reads the embeddings alone."""
    cut_off: float
    """A text leaves at the first exit whose confidence is above that, from 0 up to below 1."""

    def __post_init__(self) -> None:
        if not self.after or self.after[0] < 0 or list(self.after) != sorted(set(self.after)):
            raise ValueError(f"after: must be numbers of layers, from 0 on, in rising order; got {list(self.after)}")
        if not 0 <= self.cut_off < 1:
            raise ValueError(f"cut_off: must be from 0 up to below 1; got {self.cut_off}")


def read(folder: Path) -> ExitsInfo:
    """Of the model in `folder`. Raises ModelError if it has no exits, or none that can be read."""
    file = folder / FOLDER / _CONFIG
    if not file.is_file():
        raise ModelError(f"{folder}: has no exits; {TRAIN}")
    found = read_json(file)
    try:
        return ExitsInfo(tuple(found["after"]), found["cut_off"])
    except KeyError as error:
        raise ModelError(f"{file}: has no {error.args[0]}; {TRAIN}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"{file}: {error}; {TRAIN}") from None


def write(folder: Path, info: ExitsInfo) -> None:
    """To the model's `folder`, whose `exits` is there already."""
    (folder / FOLDER / _CONFIG).write_text(json.dumps(asdict(info), indent=1) + "\n")
