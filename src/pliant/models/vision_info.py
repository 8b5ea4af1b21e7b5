"""What timm's files say of a vision transformer: the images that it wants, its labels, and the sizes of its tokens.

Such a folder holds config.json and model.safetensors, as timm's `save_for_hf` writes them and `timm/…` on the Hugging
Face Hub has them. Of the weights only the header and a sample are read; neither torch nor timm is imported: the gateway
uses this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pliant.errors import ModelError
from pliant.models.adapter_files import read_object, read_tensors, shown

CONFIG, WEIGHTS = "config.json", "model.safetensors"
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "lanczos", "box", "hamming")
"""How images can be resized: names of Pillow's `Image.Resampling`, in lower case."""
CHANNELS = (1, 3)
"""Grey and RGB."""
_MERGED_SHARES = (1.2, 0.9, 0.6, 0.3)
"""What the paper's 20, 15, 10 and 5 tokens in each of 12 layers are of 197 tokens, rounded (OTAS §V)."""
_LARGEST_SIDE = 4096
_LARGEST = 1_000_000
_MOST_LABELS = 100_000
_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "BOOL": 1}
_MOST_DIMENSIONS = 5
_SAVE = "save the model again with timm's save_for_hf"
_CHOOSE = "choose one of timm's VisionTransformer models"


@dataclass(frozen=True)
class VisionInput:
    """What config.json says: how an image becomes the model's input, and what its own head answers."""

    architecture: str
    """timm's name for it, such as vit_base_patch16_224."""
    height: int
    """Of the input, in pixels."""
    width: int
    channels: int
    mean: tuple[float, ...]
    """By channel, of values in [0, 1]."""
    std: tuple[float, ...]
    interpolation: str
    """One of `INTERPOLATIONS`."""
    crop_pct: float
    """The share of the resized image's sides that the input is cut from, at its centre."""
    squash: bool
    """Whether an image is resized to the input's aspect ratio; otherwise it keeps its own, and more is cut off."""
    labels: tuple[str, ...]
    """Of the model's own head, in the order of its outputs; () if it has none."""


@dataclass(frozen=True)
class VisionInfo(VisionInput):
    """A vision transformer as its folder describes it."""

    layers: int
    hidden: int
    """Numbers in a token."""
    patch: int
    """Pixels on a side of the square that becomes a token."""
    prefix: int
    """Tokens that belong to no patch: the class token and registers. They are never merged."""

    @property
    def patches(self) -> int:
        """Tokens that belong to a patch of the image."""
        return (self.height // self.patch) * (self.width // self.patch)

    @property
    def tokens(self) -> int:
        """All tokens of an image when none is added or merged."""
        return self.prefix + self.patches


def read_vision(folder: Path) -> VisionInfo:
    """The vision transformer in a folder. Raises ModelError, in one line, for all others."""
    try:
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).exists():
                raise ModelError(f"{folder}: has no {name}; {_SAVE}")
        image = vision_input(_read_config((folder / CONFIG).resolve()), str(folder))
        return _with_sizes(image, (folder / WEIGHTS).resolve())
    except ValueError as error:
        raise ModelError(f"{folder}: its {error}") from None


def vision_input(config: Mapping[str, Any], model: str) -> VisionInput:
    """What a config.json in timm's format says, in today's form or in that of 2022.

    Raises ModelError that names `model` if it is none.
    """
    try:
        return _parsed(config)
    except ValueError as error:
        raise ModelError(f"{model}: its {CONFIG} {error}") from None


def merging_gammas(info: VisionInfo) -> tuple[int, ...]:
    """How many tokens to merge in every layer, as negative gammas, ascending: the paper's list for this token count.

    The paper merges up to 20 of 197 tokens in each of 12 layers, which is more than there are in the end: no layer
    merges more than half of what is left. (OTAS §V)
    """
    merged = {min(round(share * info.tokens / info.layers), info.patches // 2) for share in _MERGED_SHARES}
    return tuple(sorted(-count for count in merged if count > 0))


def _read_config(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)[0]
    except ValueError as error:
        raise ValueError(f"{CONFIG} {error}; {_SAVE}") from None


def _parsed(config: Mapping[str, Any]) -> VisionInput:
    architecture = config.get("architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ValueError(f"names no timm architecture; {_CHOOSE}")
    pretrained = _object("pretrained_cfg", config.get("pretrained_cfg", config))
    arguments = _object("model_args", config.get("model_args") or {})
    channels, height, width = _input_size(pretrained, arguments)
    crop_pct = pretrained.get("crop_pct", 0.875)
    if not _is_number(crop_pct) or not 0 < crop_pct <= 1:
        raise ValueError(f"gives {shown(crop_pct)} as crop_pct; it must be above 0 and at most 1")
    crop_mode = pretrained.get("crop_mode", "center")
    if crop_mode not in ("center", "squash"):
        raise ValueError(f"gives {shown(crop_mode)} as crop_mode; only center and squash are supported")
    interpolation = pretrained.get("interpolation", "bicubic")
    if interpolation not in INTERPOLATIONS:
        raise ValueError(f"gives {shown(interpolation)} as interpolation; choose one of {', '.join(INTERPOLATIONS)}")
    return VisionInput(
        architecture=architecture,
        height=height,
        width=width,
        channels=channels,
        mean=_by_channel("mean", pretrained.get("mean", (0.485, 0.456, 0.406)), channels),
        std=_by_channel("std", pretrained.get("std", (0.229, 0.224, 0.225)), channels),
        interpolation=interpolation,
        crop_pct=float(crop_pct),
        squash=crop_mode == "squash",
        labels=_labels(config, pretrained),
    )


def _object(key: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ValueError(f"gives {shown(found)} as {key}, which is no JSON object; {_SAVE}")
    return found


def _input_size(pretrained: Mapping[str, Any], arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width. Where the model was built for another size than its architecture's, that counts."""
    size = pretrained.get("input_size", (3, 224, 224))
    if not isinstance(size, list | tuple) or len(size) != 3:
        raise ValueError(f"gives {shown(size)} as input_size; it must be channels, height and width")
    channels, sides = arguments.get("in_chans") or size[0], size[1:]
    if pretrained.get("fixed_input_size") and (built_for := arguments.get("img_size")):
        sides = built_for if isinstance(built_for, list | tuple) else (built_for, built_for)
    if type(channels) is not int or channels not in CHANNELS:
        raise ValueError(f"wants images of {shown(channels)} channels; only 1 (grey) and 3 (RGB) are supported")
    if len(sides) != 2 or not all(type(side) is int and 0 < side <= _LARGEST_SIDE for side in sides):
        raise ValueError(f"wants images of {shown(sides)} pixels; each side must be from 1 to {_LARGEST_SIDE:,}")
    return channels, sides[0], sides[1]


def _by_channel(key: str, values: Any, channels: int) -> tuple[float, ...]:
    if not isinstance(values, list | tuple) or len(values) not in (1, channels) or not all(map(_is_number, values)):
        raise ValueError(f"gives {shown(values)} as {key}; it must be a number for each of {channels} channels")
    if key == "std" and min(values) <= 0:
        raise ValueError(f"gives {shown(values)} as std; it must be above 0")
    return tuple(float(value) for value in values) * (channels // len(values))


def _labels(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> tuple[str, ...]:
    def found(*keys: str) -> Any:
        return next((part[key] for part in (config, pretrained) for key in keys if part.get(key) is not None), None)

    count = found("num_classes")
    count = 1000 if count is None else count
    if type(count) is not int or not 0 <= count <= _MOST_LABELS:
        raise ValueError(f"gives {shown(count)} as num_classes; it must be from 0 to {_MOST_LABELS:,}")
    names = found("label_names", "labels") or {}
    if isinstance(names, list | tuple):
        names = dict(enumerate(names))
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"gives {shown(names)} as label_names; it must be a name for each of {count} outputs")
    by_index = {str(index): name for index, name in names.items()}
    if unknown := by_index.keys() - set(map(str, range(count))):
        raise ValueError(f"names the label {shown(min(unknown))}, while num_classes is {count}; {_SAVE}")
    return tuple(by_index.get(str(index), f"LABEL_{index}") for index in range(count))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _with_sizes(image: VisionInput, file: Path) -> VisionInfo:
    try:
        shapes = read_tensors(file, _DTYPES, _MOST_DIMENSIONS).shapes
        layers, hidden, patch, prefix = _sizes(shapes, image.channels)
        info = VisionInfo(**vars(image), layers=layers, hidden=hidden, patch=patch, prefix=prefix)
        _check_fits(info, shapes)
    except ValueError as error:
        raise ValueError(f"{WEIGHTS} {error}") from None
    return info


def _sizes(shapes: Mapping[str, tuple[int, ...]], channels: int) -> tuple[int, int, int, int]:
    """Layers, hidden, patch and prefix, as the tensors of a VisionTransformer show them."""
    embedding = shapes.get("patch_embed.proj.weight", ())
    if len(embedding) != 4:
        raise ValueError(f"has no patch_embed.proj.weight of 4 dimensions; {_CHOOSE}")
    hidden, found, patch, other = embedding
    if not 0 < patch == other or not hidden:
        raise ValueError(f"makes tokens of {hidden} numbers from patches of {patch} x {other} pixels; {_CHOOSE}")
    if found != channels:
        raise ValueError(f"is for images of {found} channels, and its {CONFIG} for {channels}; {_SAVE}")
    layers = 0
    while shapes.get(f"blocks.{layers}.attn.qkv.weight") == (3 * hidden, hidden):
        layers += 1
    if not layers or any(name.startswith(f"blocks.{layers}.") for name in shapes):
        raise ValueError(f"has no blocks.{layers}.attn.qkv.weight of {3 * hidden} x {hidden}; {_CHOOSE}")
    registers = shapes.get("reg_token", (1, 0, hidden))
    if len(registers) != 3 or "dist_token" in shapes:
        raise ValueError(f"has a distillation token, or registers of {shown(registers)}; {_CHOOSE}")
    return layers, hidden, patch, ("cls_token" in shapes) + registers[1]


def _check_fits(info: VisionInfo, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that are for other images or other labels than the config."""
    if info.height % info.patch or info.width % info.patch:
        raise ValueError(
            f"makes tokens of {info.patch} x {info.patch} pixels, which do not divide images of "
            f"{info.height} x {info.width}; {_SAVE}"
        )
    places = shapes.get("pos_embed", (1, info.tokens, info.hidden))
    if places not in ((1, info.tokens, info.hidden), (1, info.patches, info.hidden)):
        raise ValueError(
            f"has a pos_embed of {' x '.join(map(str, places))}, while images of {info.height} x {info.width} make "
            f"{info.patches} patches and {info.prefix} other tokens of {info.hidden} numbers; {_SAVE}"
        )
    outputs = shapes.get("head.weight", (0,))[0]
    if outputs != len(info.labels):
        raise ValueError(f"has a head of {outputs} outputs, and its {CONFIG} {len(info.labels)} labels; {_SAVE}")
