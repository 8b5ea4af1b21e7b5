"""What a model's folder says is made of an encoder's states: labels of a text, labels of its tokens, or an embedding.

Which of them it is follows from the files alone: sentence-transformers' modules.json, or the architecture in
config.json. Neither torch nor transformers is imported: the gateway uses this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pliant.errors import ModelError
from pliant.models.decoder_info import read_json
from pliant.models.encoder_shape import activation

Task = Literal["classify", "tokens", "embed"]

MODULES = "modules.json"
_ENDINGS: dict[str, Task] = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tokens",
    "Model": "embed",
    "ForMaskedLM": "embed",
}
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""How states of tokens become one of their text, by sentence-transformers' names."""
_LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_MODULE_ACTIVATIONS = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
    "Mish": "mish",
    "Sigmoid": "sigmoid",
}
"""By the name of torch's module."""
_OF_TEXT = "sentence_embedding"
_HEAD_ACTIVATIONS = {
    "bert": "tanh",
    "roberta": "tanh",
    "distilbert": "relu",
    "electra": "gelu",
    "mpnet": "tanh",
    "modernbert": "gelu",
    "deberta": "gelu",
}
_HEAD_KEYS = {"deberta": "pooler_hidden_act", "modernbert": "classifier_activation"}
"""What a config calls the activation of its classifier, where it can choose."""


@dataclass(frozen=True)
class Stage:
    """A linear layer of a head, and what follows it."""

    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "none"
    """Also "sigmoid", besides those of `EncoderShape`."""
    norm_eps: float | None = None
    """Of the norm that comes last; None if there is none."""
    weights: str = ""
    """Where its weights are if not with the encoder's: the folder, within the model's, of a module's own file."""


@dataclass(frozen=True)
class HeadShape:
    """What is made of the states of a text's tokens."""

    task: Task
    pooling: tuple[str, ...]
    """How tokens' states become one of the text, side by side if in several ways; () if each token has its answer."""
    stages: tuple[Stage, ...]
    normalized: bool
    """Whether answers are divided by their lengths."""
    outputs: int
    """Numbers in an answer: labels, or dimensions of an embedding."""


@dataclass(frozen=True)
class Sizes:
    """What a head must know of its encoder."""

    family: str
    hidden: int
    norm_eps: float


def head_of(folder: Path, config: Mapping[str, Any], sizes: Sizes) -> HeadShape:
    """The head that a folder describes; `config` is what its config.json holds. Raises ModelError."""
    task = task_of(folder, config)
    if task == "embed":
        return _embedding(folder, sizes.hidden)
    labels = count_labels(config)
    last = Stage(sizes.hidden, labels)
    kind = _HEAD_ACTIVATIONS.get(sizes.family, "none")
    if key := _HEAD_KEYS.get(sizes.family):
        chosen = activation(config.get(key, kind))
        if chosen is None:
            raise ModelError(f"{folder}: its config.json gives {config[key]!r} as {key}, which is not known")
        kind = chosen
    if sizes.family == "modernbert":
        dense = Stage(sizes.hidden, sizes.hidden, bias=False, activation=kind, norm_eps=sizes.norm_eps)
    else:
        dense = Stage(sizes.hidden, sizes.hidden, activation=kind)
    if task == "classify":
        pooling = config.get("classifier_pooling", "cls") if sizes.family == "modernbert" else "cls"
        return HeadShape(task, (pooling,), (dense, last), False, labels)
    stages = (dense, last) if sizes.family == "modernbert" else (last,)
    return HeadShape(task, (), stages, False, labels)


def task_of(folder: Path, config: Mapping[str, Any]) -> Task:
    """What the model in a folder is for. Raises ModelError if that is nothing that an encoder does here."""
    if any(kind == "Pooling" for kind, _ in _modules(folder)):
        return "embed"
    architecture = next(iter(config.get("architectures") or ["nothing"]))
    for ending, task in _ENDINGS.items():
        if architecture.endswith(ending):
            return task
    raise ModelError(
        f"{folder}: its architecture is {architecture}; choose one that ends in {', '.join(list(_ENDINGS)[:2])} or "
        f"Model, or a folder of sentence-transformers'"
    )


def count_labels(config: Mapping[str, Any]) -> int:
    """How many labels a classifier has."""
    return len(config.get("id2label") or range(config.get("num_labels", 2)))


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The modules of a sentence-transformers folder: the last part of each one's type, or all of it if it is of another
    package, and its own folder."""
    file = folder / MODULES
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        return [(_kind(str(module["type"])), str(module.get("path", ""))) for module in found]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ModelError(f"{folder}: its {MODULES} is no list of modules with types; save the model again") from None


def _kind(module: str) -> str:
    return module.rpartition(".")[2] if module.startswith("sentence_transformers.") else module


def _embedding(folder: Path, hidden: int) -> HeadShape:
    """By modules.json, or, as sentence-transformers does without one, the mean of all tokens."""
    modules = _modules(folder)
    if modules and "Pooling" not in dict(modules):
        raise ModelError(f"{folder}: its {MODULES} has no Pooling: a vector for each token is not supported")
    pooling: tuple[str, ...] = ("mean",)
    stages: list[Stage] = []
    normalized = False
    width = hidden
    for kind, path in modules:
        settings = read_json(folder / path / "config.json") if path else {}
        if kind == "Pooling":
            pooling = _pooling(folder, settings)
            width = hidden * len(pooling)
        elif kind == "Dense":
            stages.append(_dense(folder, path, settings, width))
            width = stages[-1].outputs
        elif kind == "Normalize":
            normalized = True
        elif kind not in ("Transformer", "Dropout"):
            raise ModelError(
                f"{folder}: its {MODULES} has a {kind}; only Transformer, Pooling, Dense and Normalize are supported"
            )
        if normalized and kind == "Dense":
            raise ModelError(f"{folder}: its {MODULES} has a Dense after Normalize, which is not supported")
    return HeadShape("embed", pooling, tuple(stages), normalized, width)


def _pooling(folder: Path, settings: Mapping[str, Any]) -> tuple[str, ...]:
    given = settings.get("pooling_mode") or [name for key, name in _LEGACY_POOLINGS.items() if settings.get(key)]
    modes = (given,) if isinstance(given, str) else tuple(given) or ("mean",)
    if unknown := [mode for mode in modes if mode not in POOLINGS]:
        raise ModelError(f"{folder}: pools by {unknown[0]!r}; supported are {', '.join(POOLINGS)}")
    if settings.get("include_prompt") is False:
        raise ModelError(f"{folder}: leaves prompts out when it pools (include_prompt), which is not supported")
    return modes


def _dense(folder: Path, path: str, settings: Mapping[str, Any], width: int) -> Stage:
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    sizes = settings.get("in_features"), settings.get("out_features")
    if settings.get("use_residual") or settings.get("module_input_name", _OF_TEXT) != _OF_TEXT:
        raise ModelError(f"{folder / path}: a Dense with a residual, or of tokens, is not supported")
    if name not in _MODULE_ACTIVATIONS or sizes[0] != width or not isinstance(sizes[1], int):
        raise ModelError(
            f"{folder / path}: a Dense of {sizes[0]} to {sizes[1]} numbers by {name}; it must take {width}, and use "
            f"one of {', '.join(_MODULE_ACTIVATIONS)}"
        )
    return Stage(width, sizes[1], bool(settings.get("bias", True)), _MODULE_ACTIVATIONS[name], weights=path)
