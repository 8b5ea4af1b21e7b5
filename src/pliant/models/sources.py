"""Resolves a model's name to a folder: the one way by which every part of pliant finds a model.

A name is `zoo/NAME`, a local folder, or a Hugging Face id. Neither torch nor transformers is imported, except to
convert an old tokenizer, once: the gateway uses this module.
"""

import hashlib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pliant import zoo
from pliant.cache import cache_folder, made_once
from pliant.errors import ModelError
from pliant.models import decoder_info, encoder_exits, encoder_info, hub, vision_info
from pliant.models.decoder_info import DecoderInfo as DecoderInfo
from pliant.models.decoder_shape import DecoderShape
from pliant.models.encoder_exits import ExitsInfo
from pliant.models.encoder_info import EncoderInfo as EncoderInfo
from pliant.models.hub import Progress as Progress
from pliant.models.vision_info import VisionInput
from pliant.zoo import shapes

_HELD = f"{hub.CONFIG}, {hub.WEIGHTS}, {hub.TOKENIZER}"
_VISION_HELD = f"{hub.CONFIG}, {hub.WEIGHTS}"


def fetch(model: str, *, progress: Progress | None = None) -> Path:
    """A folder with the model's config.json, tokenizer.json and weights, in one safetensors file or in several.

    A model of the zoo is trained on first use, and a Hugging Face model is downloaded; both are kept, and found again
    without a network. A kept download is not compared with newer versions on the hub. Several processes may call it at
    once. Raises ModelError.
    """
    if model.startswith("zoo/"):
        return _trained(_zoo_name(model), progress)
    report = progress or (lambda _text, _done: None)
    folder = _local_folder(model) or hub.download(model, report)
    if missing := hub.missing(folder):
        raise ModelError(
            f"{model}: {folder} has no {' and no '.join(missing)}; choose a model that is saved whole, as by "
            "transformers' save_pretrained"
        )
    if (folder / hub.TOKENIZER).is_file():
        return folder
    return _with_converted_tokenizer(model, folder, report)


def fetch_vision(model: str, *, progress: Progress | None = None) -> Path:
    """A folder with the config.json and weights of a vision transformer, in timm's format; otherwise as `fetch`."""
    if model.startswith("zoo/"):
        folder = _trained(_zoo_name(model), progress)
    else:
        report = progress or (lambda _text, _done: None)
        folder = _local_folder(model, _VISION_HELD) or hub.download(model, report, tokenizer=False)
    vision_info.read_vision(folder)
    return folder


def fetch_adapters(folder: str, progress: Progress | None = None) -> Path:
    """The folder that holds what `folder` names, zoo/adapters or a local folder: adapters, a PEFT folder each.

    The zoo's are trained on first use, as its models are, and with their model if that is not there. Raises ModelError.
    """
    check_adapters(folder)
    return _fetch_collection(folder, progress)


def check_adapters(folder: str) -> None:
    """Raise ModelError if there is nothing that `folder` may name as adapters; trains nothing."""
    _check_collection(folder, zoo.ADAPTERS, "adapters, a PEFT folder each")


def adapter_names(folder: str) -> list[str]:
    """What the adapters are called that `folder` names; trains nothing. Raises ModelError as `check_adapters`."""
    check_adapters(folder)
    if folder.startswith("zoo/"):
        return list(shapes.ADAPTERS)
    return [entry.name for entry in folders_in(Path(folder).expanduser())]


def fetch_tasks(folder: str, progress: Progress | None = None) -> Path:
    """The folder that holds what `folder` names, zoo/digits-tasks or a local folder: tasks of a vision transformer, a
    folder each (`vision_task`); otherwise as `fetch_adapters`.
    """
    check_tasks(folder)
    return _fetch_collection(folder, progress)


def task_folders(folder: str, progress: Progress | None = None) -> list[Path]:
    """The folders in what `folder` names, a task each, by name; otherwise as `fetch_tasks`. Raises OSError, too."""
    return folders_in(fetch_tasks(folder, progress))


def folders_in(folder: Path) -> list[Path]:
    """Those of a collection, by name; what notes how they were made is none. Raises OSError."""
    return [entry for entry in sorted(folder.iterdir()) if entry.is_dir() and not entry.name.startswith(".")]


def check_tasks(folder: str) -> None:
    """Raise ModelError if there is nothing that `folder` may name as tasks; trains nothing."""
    _check_collection(folder, zoo.TASKS, "tasks, a folder each")


def _fetch_collection(folder: str, progress: Progress | None) -> Path:
    if folder.startswith("zoo/"):
        return _trained(folder.removeprefix("zoo/"), progress)
    return Path(folder).expanduser().resolve()


def _check_collection(folder: str, known: str, held: str) -> None:
    """`known` is the zoo's only one of this kind."""
    if folder.startswith("zoo/"):
        if folder != f"zoo/{known}":
            raise ModelError(f"{folder}: the zoo has no such {held.split(',')[0]}; choose zoo/{known}, or a folder")
    elif not Path(folder).expanduser().is_dir():
        raise ModelError(f"{folder}: there is no such folder; choose one that holds {held}")


def check(model: str) -> EncoderInfo:
    """What the encoder `model` is for; fetches no weights and trains nothing.

    Raises ModelError if there is no such model, or if it is none that is served.
    """
    if model.startswith("zoo/"):
        with TemporaryDirectory() as described:
            zoo.describe(_zoo_name(model), Path(described))
            return _described(Path(described), model)
    return _described(_local_folder(model, _HELD) or hub.download_description(model), model)


def check_exits(model: str) -> ExitsInfo:
    """Those of the encoder `model`, of which no weights are fetched. Raises ModelError if it has none."""
    if model.startswith("zoo/"):
        raise ModelError(f"{model}: has no exits; {encoder_exits.TRAIN}")
    return encoder_exits.read(_local_folder(model, _HELD) or hub.download_description(model))


def _described(folder: Path, model: str) -> EncoderInfo:
    try:
        return describe(folder)
    except ModelError as error:
        raise ModelError(str(error).replace(str(folder), model)) from None


def describe(folder: Path) -> EncoderInfo:
    """What the files in an encoder's folder say it is for. Raises ModelError if that is nothing that is served."""
    _read(folder, str(folder))
    return encoder_info.read_encoder(folder)


def check_decoder(model: str) -> DecoderShape:
    """The shape of the language model `model`; fetches no weights and trains nothing.

    Raises ModelError if there is no such model, or if it is no decoder that is supported.
    """
    return decoder_info.shape_of(_config(model), model)


def describe_decoder(folder: Path) -> DecoderInfo:
    """What the files in a language model's folder say. Raises ModelError if it is no decoder that is supported."""
    _read(folder, str(folder))
    return decoder_info.read(folder)


def check_vision(model: str) -> VisionInput:
    """What images the vision transformer `model` wants, and its own labels; fetches no weights and trains nothing.

    Raises ModelError if there is no such model, or if its config.json is none of timm's.
    """
    return vision_info.vision_input(_config(model, _VISION_HELD), model)


def _config(model: str, held: str = _HELD) -> dict[str, Any]:
    """The config.json of `model`, fetched alone if it is on the hub; a folder of it should hold `held`."""
    if model.startswith("zoo/"):
        return zoo.config(_zoo_name(model))
    return _read(_local_folder(model, held) or hub.download_config(model).parent, model, held)


def _zoo_name(model: str) -> str:
    name = model.removeprefix("zoo/")
    if name not in zoo.NAMES:
        raise ModelError(
            f"{model}: the zoo has no such model; choose one of {', '.join(f'zoo/{n}' for n in zoo.NAMES)}"
        )
    return name


def _trained(name: str, progress: Progress | None) -> Path:
    return zoo.ensure(name, progress or (lambda _text, _done: None))


def _local_folder(model: str, held: str = _HELD) -> Path | None:
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if model.startswith((".", "/", "~")):
        raise ModelError(f"{model}: there is no such folder; choose one that holds {held}")
    return None


def _with_converted_tokenizer(model: str, folder: Path, report: Progress) -> Path:
    """A folder in the cache that links to the model's files and adds the tokenizer.json that it lacks."""
    if not hub.has_tokenizer(folder):
        raise ModelError(f"{model}: {folder} has no tokenizer.json; save the model's tokenizer there too")

    def convert(made: Path) -> None:
        report(f"converting the tokenizer of {model}", 0.0)
        from pliant.torchvision_ops import declare

        declare()
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(folder).save_pretrained(made)
        except (OSError, ValueError, ImportError) as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ModelError(f"{model}: no tokenizer.json, and none can be made: {reason}; add one") from error
        if not (made / hub.TOKENIZER).is_file():
            raise ModelError(f"{model}: no tokenizer.json, and its tokenizer cannot be saved as one; add one")
        for file in {file for pattern in hub.FILES for file in folder.glob(pattern)}:
            link = made / file.relative_to(folder)
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(file)

    weights = next(file for name in (hub.WEIGHTS, hub.INDEX) if (file := folder / name).is_file()).stat()
    identity = hashlib.sha256(f"{folder.resolve()} {weights.st_mtime_ns} {weights.st_size}".encode()).hexdigest()
    return made_once(cache_folder() / "models" / identity[:16], convert)


def _read(folder: Path, model: str, held: str = _HELD) -> dict[str, Any]:
    if not (folder / hub.CONFIG).is_file():
        raise ModelError(f"{model}: has no config.json; choose a folder that holds {held}")
    return decoder_info.read_json(folder / hub.CONFIG)
