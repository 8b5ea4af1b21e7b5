"""What an encoder's folder says of its exits: classifiers behind some of its layers (`pliant train-exits`).

They lie in the folder's own `exits`. Neither torch nor transformers is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pliant.errors import ModelError

FOLDER = "exits"
TRAIN = "train some with pliant train-exits, and serve the folder that it writes"
_CONFIG = "config.json"


class ExitsInfo(BaseModel):
    model_config = ConfigDict(frozen=True)

    after: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
    """Behind how many layers there is an exit, in rising order."""
    cut_off: Annotated[float, Field(ge=0, lt=1)]
    """A text leaves at the first exit whose confidence is above that."""


def read(folder: Path) -> ExitsInfo:
    """Of the model in `folder`. Raises ModelError if it has no exits, or none that can be read."""
    file = folder / FOLDER / _CONFIG
    if not file.is_file():
        raise ModelError(f"{folder}: has no exits; {TRAIN}")
    try:
        return ExitsInfo.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ModelError(f"{file}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}; {TRAIN}") from None


def write(folder: Path, info: ExitsInfo) -> None:
    """To the model's `folder`, whose `exits` is there already."""
    (folder / FOLDER / _CONFIG).write_text(info.model_dump_json(indent=1) + "\n")
