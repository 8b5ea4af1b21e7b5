"""Reads an adapter's weights from its PEFT folder into a blob, ready to be copied among others (Chameleon §4.1).

Blobs for a GPU wait in pinned memory of the CPU, and the copy from there into the arena is the only one that the GPU
holds: whoever shares out its memory has nothing to set aside for loads. That copy runs beside steps that do not use the
adapter, at the bus's speed: of 84 MB, an adapter of rank 16 for a model of 8 billion parameters, in some 2 to 4 ms.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pliant.formats.adapter_info import AdapterError, AdapterInfo
from pliant.kernels.decoder.weights import part
from pliant.models.adapter_files import TensorFile, opened_tensors
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import SITES, LoraLayout, module_size

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@torch.inference_mode()
def stage(
    info: AdapterInfo, shape: DecoderShape, dtype: torch.dtype, device: torch.device, rank: int = 0, ranks: int = 1
) -> Tensor:
    """The weights of `info` as one flat tensor on the CPU, laid out as `LoraLayout` says; pinned for a GPU as `device`.

    Scalings are folded into B, in float32. Layers that lack a module, or have it at a smaller rank than the greatest,
    get zeros for what is missing. Of `ranks` that compute a decoder of `shape` together, this is the share of `rank`:
    A and B are split as their layers are. May be called on any thread. Raises AdapterError if the file is no longer
    what it was when `info` was read, changes or becomes a link meanwhile, or holds numbers not finite in `dtype`.
    """
    own = shape.of_rank(ranks)
    blob = torch.zeros(LoraLayout(own, info.ranks).values, dtype=dtype, pin_memory=device.type == "cuda")
    places = dict(_places(blob, info.ranks, own))
    try:
        with opened_tensors(info.weights) as file:
            for module in info.modules:
                a, b = (place[: module.rank] for place in places[module.layer, module.module])
                inputs, out = module_size(shape, module.module)
                a.copy_(part(_read(file, module.a, (module.rank, inputs)), tuple(a.shape), rank, ranks))
                whole = _read(file, module.b, (out, module.rank)).float().T * module.scaling
                b.copy_(part(whole, tuple(b.shape), rank, ranks))
    except (OSError, ValueError) as error:
        raise AdapterError(f"adapter {info.folder}: {info.weights.name} {error}; load it again") from None
    if not bool(blob.isfinite().all()):
        raise AdapterError(f"adapter {info.folder}: its weights are not all finite in {dtype}; train it again")
    return blob


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


def _read(file: TensorFile, name: str, size: tuple[int, int]) -> Tensor:
    raw = file.read(name)
    stored = file.tensors[name]
    if stored.shape != size:
        raise ValueError(f"has {name} as {list(stored.shape)} instead of {list(size)}")
    return torch.frombuffer(raw, dtype=_DTYPES[stored.dtype]).view(size)
