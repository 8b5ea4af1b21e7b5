"""What a PEFT folder says of a LoRA adapter: which matrices it adapts, at which ranks, and whether it fits a decoder.

Such a folder holds adapter_config.json and adapter_model.safetensors. Of the latter only the header and a sample are
read, so that thousands of adapters can be registered for the price of metadata; neither torch nor peft is imported.
Whatever an adapter asks for beyond plain LoRA on linear layers is refused: a decoder that ignored it would answer
wrongly.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pliant.errors import PliantError
from pliant.message import message
from pliant.models.adapter_files import DTYPE_BYTES, MOST_BYTES, read_object, read_tensors, shown
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import MODULES, LoraLayout, module_size
from pliant.models.remote import fetched, is_remote, unpinned

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<path>(?:model\.)?layers\.(?P<layer>[0-9]{1,4})\."
    r"(?:self_attn\.(?P<attention>[qkvo]_proj)|mlp\.(?P<mlp>(?:gate|up|down)_proj)))"
    r"\.lora_(?P<side>[AB])(?:\.\w+)?\.weight",
    re.ASCII,
)
"""PEFT's names of tensors. Other tools leave out the prefix, or leave an adapter's own name before `weight`."""
_FOREIGN = {
    "lora_embedding": "adapts the embeddings",
    "embed_tokens": "adapts the embeddings",
    "lm_head": "adapts the output head",
    "lora_magnitude_vector": "belongs to DoRA",
    "bias": "is a bias",
}
"""What tensors are that no plain adapter has, by a part of their names."""
_VARIANTS = {
    "use_dora": "is DoRA",
    "lora_bias": "has biases (lora_bias)",
    "modules_to_save": "replaces whole modules (modules_to_save)",
    "fan_in_fan_out": "is for transposed matrices (fan_in_fan_out)",
    "trainable_token_indices": "changes embeddings (trainable_token_indices)",
    "target_parameters": "adapts what is no linear layer (target_parameters)",
    "layer_replication": "repeats layers (layer_replication)",
    "alora_invocation_tokens": "acts from some token on only (alora_invocation_tokens)",
    "use_qalora": "is QA-LoRA",
    "use_bdlora": "is block-diagonal (use_bdlora)",
    "arrow_config": "mixes other adapters (arrow_config)",
    "kasa_config": "changes the base model (kasa_config)",
    "monteclora_config": "samples its weights (monteclora_config)",
}
"""What PEFT computes beyond plain LoRA, by the key of the config that asks for it."""
_TAKEN_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that move a part of the base model's weights into the adapter."""
_CHOICE = re.compile(r"[*+?{|]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_MOST_CHOICES = 4
_MOST_PATTERNS = 8
_LARGEST = 1_000_000
Size = tuple[int, ...]
_Read = TypeVar("_Read")


class AdapterError(PliantError):
    """An adapter that cannot be served."""


@message
class AdapterRef(NamedTuple):
    """An adapter as the gateway names it to a replica, which reads the weights when a request needs them."""

    name: str
    folder: str
    revision: str
    ranks: tuple[int, ...]
    """By `MODULES`: the greatest over the layers, 0 where none is adapted."""

    @property
    def key(self) -> str:
        """Another one once the weights are others, even if the name stays."""
        return f"{self.name}@{self.revision}"

    @property
    def rank(self) -> int:
        """The greatest of its ranks."""
        return max(self.ranks)


class AdaptedModule(NamedTuple):
    """One matrix W [out, in] of the decoder, to which scaling * B @ A is added."""

    layer: int
    module: int
    """Index into `MODULES`."""
    a: str
    """The name of the tensor A, [rank, in]."""
    b: str
    """The name of the tensor B, [out, rank]."""
    rank: int
    scaling: float
    """lora_alpha / rank, or lora_alpha / sqrt(rank) of rank-stabilised LoRA."""


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter as its folder describes it."""

    folder: str
    """Of this machine, or a pinned URL: see `pliant.models.remote`."""
    revision: str
    """Another one once the config or the weights were written again."""
    ranks: tuple[int, ...]
    """By `MODULES`: the greatest over the layers, 0 where none is adapted."""
    modules: tuple[AdaptedModule, ...]
    """By layer and module."""
    weights: Path
    base: str | None
    """The model that it was trained on, as whoever trained it called that."""

    def ref(self, name: str) -> AdapterRef:
        """How the gateway names it to a replica."""
        return AdapterRef(name, self.folder, self.revision, self.ranks)


def read_adapter(folder: Path | str, shape: DecoderShape, most_rank: int = 256) -> AdapterInfo:
    """The adapter in a PEFT folder, for a decoder of `shape`. The base model's name is not compared: shapes decide.

    The folder is one of this machine, or the pinned URL of one elsewhere, which is then fetched. Raises AdapterError,
    in one line, for what is no plain LoRA adapter of linear layers, does not fit the shape, has a rank above
    `most_rank`, or cannot be read.
    """
    try:
        local = _local(folder, shape, most_rank)
        _check_complete(local)
        config, raw = _read(local / CONFIG, read_object)
        _check_plain(config)
        tensors = _read(local / WEIGHTS, read_tensors)
        base = config.get("base_model_name_or_path")
        base = base if isinstance(base, str) and base else None
        shapes = {name: tensor.shape for name, tensor in tensors.tensors.items()}
        modules = _modules(shapes, _Scalings(config, shape), shape, most_rank, base)
    except (ValueError, OSError, RuntimeError) as error:
        reason = f"cannot be read ({error.strerror}); check the path" if isinstance(error, OSError) else error
        raise AdapterError(f"adapter {_one_line(folder)}: {reason}") from None
    ranks = tuple(max((each.rank for each in modules if each.module == m), default=0) for m in range(len(MODULES)))
    revision = hashlib.sha256(raw + tensors.identity).hexdigest()[:16]
    name = str(folder if is_remote(str(folder)) else local)
    return AdapterInfo(name, revision, ranks, modules, local / WEIGHTS, base)


def bytes_of(ranks: Sequence[int], shape: DecoderShape, dtype_bytes: int) -> int:
    """What an adapter of such ranks, by `MODULES`, takes in a replica's memory, in bytes."""
    return LoraLayout(shape, ranks).values * dtype_bytes


def _local(folder: Path | str, shape: DecoderShape, most_rank: int) -> Path:
    if not is_remote(str(folder)):
        return Path(folder).resolve()
    most = 2 * MOST_BYTES + bytes_of([most_rank] * len(MODULES), shape, max(DTYPE_BYTES.values()))
    return fetched(str(folder), (CONFIG, WEIGHTS), most)


def _check_complete(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError("there is no such folder; choose one that PEFT's save_pretrained wrote")
    names = {file.name for file in folder.iterdir()}
    if CONFIG not in names:
        raise ValueError(f"has no {CONFIG}; choose a folder that PEFT's save_pretrained wrote")
    if WEIGHTS not in names:
        pickled = f", and {_PICKLED}, being pickled, is not read" * (_PICKLED in names)
        raise ValueError(f"has no {WEIGHTS}{pickled}; save the adapter as safetensors")


def _read(file: Path, read: Callable[[Path], _Read]) -> _Read:
    try:
        return read(file)
    except ValueError as error:
        raise ValueError(f"its {file.name} {error}; save the adapter again with PEFT's save_pretrained") from None


def _check_plain(config: Mapping[str, Any]) -> None:
    """Refuse what is no LoRA, or more than that."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"its peft_type is {shown(kind)}; only LORA is supported")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"it was trained with bias: {shown(bias)}; only adapters without biases are supported")
    if found := next((what for key, what in _VARIANTS.items() if config.get(key)), None):
        raise ValueError(f"it {found}; only plain LoRA is supported: train it without, or merge it into the model")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_TAKEN_FROM_BASE):
        raise ValueError(
            f"it was initialised by {shown(start)}, which changes the base model too; save it again with "
            "path_initial_model_for_weight_conversion, which makes it plain LoRA"
        )


class _Scalings:
    """Ranks and scalings by module, as the config gives them and PEFT reads it."""

    def __init__(self, config: Mapping[str, Any], shape: DecoderShape) -> None:
        self._rank = _number("r", config.get("r", 8))
        self._alpha = _number("lora_alpha", config.get("lora_alpha", 8))
        self._ranks = _patterns("rank_pattern", config, shape)
        self._alphas = _patterns("alpha_pattern", config, shape)
        self._stable = bool(config.get("use_rslora"))

    def of(self, path: str) -> tuple[int, float]:
        """Rank and scaling of the module `path`, such as model.layers.0.mlp.up_proj."""
        rank, alpha = _first(self._ranks, path, self._rank), _first(self._alphas, path, self._alpha)
        if rank < 1 or rank != int(rank):
            raise ValueError(f"its rank is {rank:g} for {path}; it must be a whole number of at least 1")
        return int(rank), alpha / (math.sqrt(rank) if self._stable else rank)


def _first(patterns: Sequence[tuple[re.Pattern[str], float]], path: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(path)), default)


def _patterns(key: str, config: Mapping[str, Any], shape: DecoderShape) -> list[tuple[re.Pattern[str], float]]:
    """Patterns of modules' paths and their values; what matches in several ways is bounded, lest it take forever."""
    given = config.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"its {key} is {shown(given)}; it must give a number for each name of modules")
    most = shape.layers * len(MODULES)
    if len(given) > most:
        raise ValueError(f"its {key} has {len(given)} entries; this model has {most} modules to adapt")
    ambiguous = [pattern for pattern in given if _CHOICE.search(pattern)]
    hard = [p for p in ambiguous if len(_CHOICE.findall(p)) > _MOST_CHOICES or _REPEATED_GROUP.search(p)]
    if len(ambiguous) > _MOST_PATTERNS or hard:
        raise ValueError(
            f"its {key} is too hard to match, with {len(ambiguous)} regular expressions such as "
            f"{shown((hard or ambiguous)[0])}; write the modules' names out"
        )
    try:
        return [(re.compile(rf"(.*\.)?({each})$"), _number(key, value)) for each, value in given.items()]
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"its {key} is no regular expression ({error}); write the modules' names out") from None


def _number(key: str, value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return float(value)
    raise ValueError(f"its {key} is {shown(value)}; it must be a number of at most {_LARGEST:,}")


def _modules(
    shapes: Mapping[str, Size], scalings: _Scalings, shape: DecoderShape, most_rank: int, base: str | None
) -> tuple[AdaptedModule, ...]:
    found = []
    trained = f"trained on this model{f' (it names {shown(base)})' if base else ''}"
    for (layer, module), names in sorted(_pairs(shapes).items()):
        path = names["path"]
        if layer >= shape.layers:
            raise ValueError(f"adapts layer {layer}, this model has {shape.layers}; choose an adapter {trained}")
        if missing := {"A", "B"} - names.keys():
            raise ValueError(f"has no lora_{missing.pop()} for {path}; save the adapter again")
        rank, scaling = scalings.of(path)
        if rank > most_rank:
            raise ValueError(f"has rank {rank} in {path}; at most {most_rank} is served: train it with a smaller r")
        (inputs, outputs), a, b = module_size(shape, module), shapes[names["A"]], shapes[names["B"]]
        if (a, b) != ((rank, inputs), (outputs, rank)):
            raise ValueError(
                f"has A of {_size(a)} and B of {_size(b)} in {path}, where rank {rank} on this model needs "
                f"{rank} x {inputs} and {outputs} x {rank}; choose an adapter {trained}, as it was saved"
            )
        found.append(AdaptedModule(layer, module, names["A"], names["B"], rank, scaling))
    if not found:
        raise ValueError(f"adapts nothing: its {WEIGHTS} holds no tensors; save the adapter again")
    return tuple(found)


def _pairs(shapes: Mapping[str, Size]) -> dict[tuple[int, int], dict[str, str]]:
    """By layer and module: the names of its tensors A and B, and the module's path."""
    pairs: dict[tuple[int, int], dict[str, str]] = {}
    for name in shapes:
        match = _TENSOR.fullmatch(name)
        if not match:
            what = next((what for part, what in _FOREIGN.items() if part in name), "is unknown")
            raise ValueError(
                f"its tensor {shown(name)} {what}; only lora_A and lora_B of {', '.join(MODULES)} are supported"
            )
        module = MODULES.index(match["attention"] or match["mlp"])
        names = pairs.setdefault((int(match["layer"]), module), {"path": match["path"]})
        if match["side"] in names:
            raise ValueError(f"has lora_{match['side']} for {match['path']} twice; save one adapter alone")
        names[match["side"]] = name
    return pairs


def _size(size: Size) -> str:
    return " x ".join(map(str, size)) or "one number"


def _one_line(folder: Path | str) -> str:
    """Its name: clients are told of it, and where it lies is the server's own."""
    name = Path(unpinned(str(folder))).name
    return name if name.isprintable() else shown(name)
