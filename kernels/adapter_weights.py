"""Reads an adapter's weights from its PEFT folder into a blob, ready to be copied among others (Chameleon §4.1)."""

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pliant.adapter_info import AdapterError, AdapterInfo
from pliant.decoder_shape import DecoderShape
from pliant.lora_layout import SITES, LoraLayout, module_size


@torch.inference_mode()
def stage(info: AdapterInfo, shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The weights of `info` as one flat tensor on `device`, laid out as `LoraLayout` says.

    Scalings are folded into B, in float32. Layers that lack a module, or have it at a smaller rank than the greatest,
    get zeros for what is missing. May be called on any thread, and returns when the blob is whole. Raises AdapterError
    if the file changed since `info` was read, or holds numbers that are not finite in `dtype`.
    """
    blob = torch.zeros(LoraLayout(shape, info.ranks).values, dtype=dtype)
    try:
        with safe_open(info.weights, framework="pt") as file:
            _fill(blob, info, shape, file)
    except (OSError, SafetensorError, ValueError) as error:
        raise AdapterError(f"adapter {info.folder}: its weights cannot be read: {error}; load it again") from None
    if not bool(blob.isfinite().all()):
        raise AdapterError(f"adapter {info.folder}: its weights are not all finite in {dtype}; train it again")
    return blob if device.type == "cpu" else _uploaded(blob, device)


def _fill(blob: Tensor, info: AdapterInfo, shape: DecoderShape, file: Any) -> None:
    places = dict(_places(blob, info.ranks, shape))
    for module in info.modules:
        a, b = places[module.layer, module.module]
        inputs, out = module_size(shape, module.module)
        a[: module.rank] = _read(file, module.a, (module.rank, inputs))
        b[: module.rank] = _read(file, module.b, (out, module.rank)).float().T * module.scaling


def _places(
    blob: Tensor, ranks: tuple[int, ...], shape: DecoderShape
) -> Iterator[tuple[tuple[int, int], tuple[Tensor, Tensor]]]:
    """By layer and module: where A [rank, in] and B transposed [rank, out] go."""
    layout = LoraLayout(shape, ranks)
    for layer in range(shape.layers):
        block = blob[layer * layout.block : (layer + 1) * layout.block]
        for name, indices in SITES.items():
            site = layout.sites[name]
            whole = block[site.a :][: site.rank * site.inputs].view(site.rank, site.inputs)
            parts = whole.split_with_sizes([module.rank for module in site.modules])
            for index, a, module in zip(indices, parts, site.modules, strict=True):
                yield (layer, index), (a, block[module.b :][: module.rank * module.out].view(module.rank, module.out))


def _read(file: Any, name: str, size: tuple[int, int]) -> Tensor:
    tensor: Tensor = file.get_tensor(name)
    if tensor.shape != size:
        raise ValueError(f"{name} is {list(tensor.shape)} instead of {list(size)}")
    return tensor


def _uploaded(blob: Tensor, device: torch.device) -> Tensor:
    """A copy on the GPU, made beside what the calling thread's stream does."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        copied = blob.pin_memory().to(device, non_blocking=True)
    stream.synchronize()
    return copied
