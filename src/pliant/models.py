"""Resolves a model's name to a folder: the one way by which every part of pliant finds a model.

A name is `zoo/NAME`, a local folder, or a Hugging Face id. Neither torch nor transformers is imported, except to train
a model of the zoo or to convert an old tokenizer, once: the gateway uses this module.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)

from pliant import zoo
from pliant.cache import cache_folder, made_once
from pliant.errors import ModelError

Progress = Callable[[str, float], object]
"""Called with what is being done and the fraction done."""

_log = logging.getLogger(__name__)
_CONFIG, _WEIGHTS, _TOKENIZER = _FILES = ("config.json", "model.safetensors", "tokenizer.json")
_OLD_TOKENIZERS = ("vocab.*", "*.model")
_BESIDE_TOKENIZERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json")
_POSITIONS_START_AFTER_PADDING = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet"}
"""Model types that count positions from `pad_token_id + 1`, so that this many fewer tokens fit."""


@dataclass(frozen=True)
class ModelInfo:
    """What a text classifier's config.json says.

    `labels` are in the order of the outputs, `max_length` counts the tokens, special ones included, that the model has
    positions for, and `multi_label` tells whether several labels can be true of one text.
    """

    labels: tuple[str, ...]
    max_length: int
    pad_token_id: int
    architecture: str
    multi_label: bool


def fetch(model: str, *, progress: Progress | None = None) -> Path:
    """A folder with the model's config.json, model.safetensors and tokenizer.json.

    A model of the zoo is trained on first use, and a Hugging Face model is downloaded; both are kept, and found again
    without a network. A kept download is not compared with newer versions on the hub. Several processes may call it at
    once. Raises ModelError.
    """
    report = progress or (lambda _text, _done: None)
    if model.startswith("zoo/"):
        name = _zoo_name(model)
        if progress is None and not zoo.folder(name).exists():
            _log.warning("training %s, once; this takes about a minute", model)
        return zoo.ensure(name, report)
    folder = _local_folder(model) or _download(model, report)
    if missing := [file for file in (_CONFIG, _WEIGHTS) if not (folder / file).is_file()]:
        raise ModelError(
            f"{model}: {folder} has no {' and no '.join(missing)}; choose a model that is saved with both, as "
            "transformers' save_pretrained does"
        )
    if (folder / _TOKENIZER).is_file():
        return folder
    return _with_converted_tokenizer(model, folder, report)


def check(model: str) -> ModelInfo:
    """What `model` is; fetches no weights and trains nothing.

    Raises ModelError if there is no such model, or if it is no text classifier.
    """
    if model.startswith("zoo/"):
        return _info(zoo.config(_zoo_name(model)), model)
    if folder := _local_folder(model):
        return describe(folder)
    with _hub_errors(model):
        config = Path(hf_hub_download(model, _CONFIG))
    return _read(config, model)


def describe(folder: Path) -> ModelInfo:
    """What the config.json in a model's folder says. Raises ModelError if the model is no text classifier."""
    return _read(folder / _CONFIG, str(folder))


def _zoo_name(model: str) -> str:
    name = model.removeprefix("zoo/")
    if name not in zoo.NAMES:
        raise ModelError(
            f"{model}: the zoo has no such model; choose one of {', '.join(f'zoo/{n}' for n in zoo.NAMES)}"
        )
    return name


def _local_folder(model: str) -> Path | None:
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if model.startswith((".", "/", "~")):
        raise ModelError(f"{model}: there is no such folder; choose one that holds {', '.join(_FILES)}")
    return None


def _download(model: str, report: Progress) -> Path:
    if kept := _kept_download(model):
        return kept
    lock = cache_folder() / "downloads" / f"{model.replace('/', '--')}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock), _hub_errors(model):
        report(f"downloading {model}", 0.0)
        folder = snapshot_download(model, allow_patterns=[*_FILES, *_OLD_TOKENIZERS, *_BESIDE_TOKENIZERS])
        report(f"downloading {model}", 1.0)
    return Path(folder)


def _kept_download(model: str) -> Path | None:
    """The folder of an earlier download, if it was completed: `check` downloads the config.json alone."""
    try:
        folder = Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError):
        return None
    return folder if _has_tokenizer(folder) and all((folder / file).is_file() for file in (_CONFIG, _WEIGHTS)) else None


def _has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in (_TOKENIZER, *_OLD_TOKENIZERS))


@contextmanager
def _hub_errors(model: str) -> Iterator[None]:
    """Turns what the hub's client raises, its HTTP library's errors included, into one line for a person."""
    given = f"{model}: neither a local folder nor"
    try:
        yield
    except HFValidationError:
        raise ModelError(f"{given} a Hugging Face id; choose zoo/NAME, a folder, or OWNER/NAME") from None
    except GatedRepoError:
        raise ModelError(
            f"{model}: gated on the Hugging Face Hub; accept its terms there and log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"{given} found on the Hugging Face Hub; check the spelling, or `hf auth login` if it is private"
        ) from None
    except RemoteEntryNotFoundError:
        raise ModelError(f"{model}: has no config.json on the Hugging Face Hub; choose a transformers model") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{given} downloaded before, and the Hugging Face Hub cannot be reached; check the spelling, "
            "the network and HF_HUB_OFFLINE, or name a folder"
        ) from None
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{model}: cannot be fetched from the Hugging Face Hub: {reason}; try again later") from error


def _with_converted_tokenizer(model: str, folder: Path, report: Progress) -> Path:
    """A folder in the cache that links to the model's files and adds the tokenizer.json that it lacks."""
    if not _has_tokenizer(folder):
        raise ModelError(f"{model}: {folder} has no tokenizer.json; save the model's tokenizer there too")

    def convert(made: Path) -> None:
        report(f"converting the tokenizer of {model}", 0.0)
        from pliant.torchvision_mend import mend

        mend()
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(folder).save_pretrained(made)
        except (OSError, ValueError, ImportError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"{model}: no tokenizer.json, and none can be made: {reason}; add one") from error
        if not (made / _TOKENIZER).is_file():
            raise ModelError(f"{model}: no tokenizer.json, and its tokenizer cannot be saved as one; add one")
        for file in (_CONFIG, _WEIGHTS):
            (made / file).symlink_to(folder / file)

    weights = (folder / _WEIGHTS).stat()
    identity = hashlib.sha256(f"{folder.resolve()} {weights.st_mtime_ns} {weights.st_size}".encode()).hexdigest()
    return made_once(cache_folder() / "models" / identity[:16], convert)


def _read(file: Path, model: str) -> ModelInfo:
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(f"{model}: has no config.json; choose a folder that holds {', '.join(_FILES)}") from None
    except ValueError as error:
        raise ModelError(f"{model}: its config.json is not JSON ({error}); save the model again") from None
    return _info(config, model)


def most_tokens(config: dict[str, Any]) -> int | None:
    """How many tokens a model with this config.json has positions for; None if it does not say."""
    positions: int | None = config.get("max_position_embeddings") or config.get("n_positions")
    return positions - _padding(config) - 1 if positions and _starts_after_padding(config) else positions


def _starts_after_padding(config: dict[str, Any]) -> bool:
    return config.get("model_type") in _POSITIONS_START_AFTER_PADDING


def _padding(config: dict[str, Any]) -> int:
    padding: int | None = config.get("pad_token_id")
    return int(_starts_after_padding(config)) if padding is None else padding


def _info(config: dict[str, Any], model: str) -> ModelInfo:
    architecture = next(iter(config.get("architectures") or ["nothing"]))
    if not architecture.endswith("ForSequenceClassification"):
        raise ModelError(
            f"{model}: its architecture is {architecture}; choose one that ends in ForSequenceClassification"
        )
    max_length = most_tokens(config)
    if max_length is None:
        raise ModelError(f"{model}: its config.json has no max_position_embeddings; choose a model with a longest text")
    labels = config.get("id2label") or {index: f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
    return ModelInfo(
        labels=tuple(labels[index] for index in sorted(labels, key=int)),
        max_length=max_length,
        pad_token_id=_padding(config),
        architecture=architecture,
        multi_label=config.get("problem_type") == "multi_label_classification",
    )
