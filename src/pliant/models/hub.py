"""Fetches models from the Hugging Face Hub, and knows which files make a model complete.

Imports no torch, and the hub's client, which takes 18 MB, only where a model is on the hub.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from pliant.cache import cache_folder
from pliant.errors import ModelError

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = "model.safetensors.index.json"
"""Names the files that hold the weights, where they are too large for one."""
_SHARDS = "model-*-of-*.safetensors"
_OLD_TOKENIZERS = ("vocab.*", "*.model")
_BESIDE_TOKENIZERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
DESCRIPTION = (
    *(CONFIG, "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("tokenizer_config.json", "[0-9]*_*/config.json", "exits/config.json"),
)
"""Patterns of what says what an encoder is for."""
_MODULE_WEIGHTS = "[0-9]*_*/model.safetensors"
"""Of a sentence-transformers module."""
FILES = (
    *DESCRIPTION,
    *("generation_config.json", WEIGHTS, INDEX, _SHARDS, _MODULE_WEIGHTS, "exits/model.safetensors"),
    *(TOKENIZER, *_OLD_TOKENIZERS, *_BESIDE_TOKENIZERS),
)
"""Patterns of all that is read of a model."""

Progress = Callable[[str, float], object]
"""Called with what is being done and the fraction done."""


def download(model: str, report: Progress, *, tokenizer: bool = True) -> Path:
    """The folder of a model on the hub, found again without a network; `tokenizer` tells whether it must have one.

    Raises ModelError.
    """
    if kept := _kept(model, tokenizer):
        return kept
    from huggingface_hub import snapshot_download

    lock = cache_folder() / "downloads" / f"{model.replace('/', '--')}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock), _errors(model):
        report(f"downloading {model}", 0.0)
        folder = snapshot_download(model, allow_patterns=list(FILES))
        report(f"downloading {model}", 1.0)
    return Path(folder)


def download_config(model: str) -> Path:
    """The config.json of a model on the hub, alone. Raises ModelError."""
    from huggingface_hub import hf_hub_download

    with _errors(model):
        return Path(hf_hub_download(model, CONFIG))


def download_description(model: str) -> Path:
    """A folder with what says what an encoder on the hub is for, without weights. Raises ModelError."""
    from huggingface_hub import snapshot_download

    download_config(model)
    with _errors(model):
        return Path(snapshot_download(model, allow_patterns=list(DESCRIPTION)))


def missing(folder: Path) -> list[str]:
    """Which files of configuration and weights a model's folder lacks. The weights may be in one file or in several.

    Raises ModelError for an index that cannot be read.
    """
    files = [folder / CONFIG, *weight_files(folder)]
    return [file.name for file in files if not file.is_file()]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold, or should hold, a model's weights. Raises ModelError for an index that cannot be read."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    try:
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(f"{folder / INDEX} is no index of weights; download or save the model again") from None
    return [folder / name for name in sorted(names)]


def module_files(folder: Path) -> list[Path]:
    """What a folder has beyond a model of transformers': sentence-transformers' modules and their files."""
    patterns = ("modules.json", "[0-9]*_*/config.json", _MODULE_WEIGHTS)
    return [file for pattern in patterns for file in sorted(folder.glob(pattern))]


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer, if only an old one that has to be converted."""
    return any(next(folder.glob(pattern), None) for pattern in (TOKENIZER, *_OLD_TOKENIZERS))


def _kept(model: str, tokenizer: bool) -> Path | None:
    """The folder of an earlier download, if it was completed: `download_config` gets the config.json alone."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model, local_files_only=True))
        return folder if (has_tokenizer(folder) or not tokenizer) and not missing(folder) else None
    except (OSError, ValueError, ModelError):
        return None


@contextmanager
def _errors(model: str) -> Iterator[None]:
    """Turns what the hub's client raises, its HTTP library's errors included, into one line for a person."""
    from huggingface_hub import errors

    given = f"{model}: neither a local folder nor"
    try:
        yield
    except errors.HFValidationError:
        raise ModelError(f"{given} a Hugging Face id; choose zoo/NAME, a folder, or OWNER/NAME") from None
    except errors.GatedRepoError:
        raise ModelError(
            f"{model}: gated on the Hugging Face Hub; accept its terms there and log in with `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{given} found on the Hugging Face Hub; check the spelling, or `hf auth login` if it is private"
        ) from None
    except errors.RemoteEntryNotFoundError:
        raise ModelError(f"{model}: has no config.json on the Hugging Face Hub; choose a transformers model") from None
    except errors.LocalEntryNotFoundError:
        raise ModelError(
            f"{given} downloaded before, and the Hugging Face Hub cannot be reached; check the spelling, "
            "the network and HF_HUB_OFFLINE, or name a folder"
        ) from None
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{model}: cannot be fetched from the Hugging Face Hub: {reason}; try again later") from error
