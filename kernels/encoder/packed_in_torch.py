"""Packed runtimes of what the C code does not compute: GPUs, bfloat16, a machine without a compiler, other models."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.kernels.encoder.eager_classifier import Model, load_model
from pliant.kernels.encoder.layout import Packed
from pliant.kernels.encoder.model import EncoderModel
from pliant.kernels.encoder.packed_runtime import Encode, PackedRuntime
from pliant.kernels.encoder.texts import Accepted


def load(folder: Path, max_length: int, device: str, dtype: str, threads: int) -> PackedRuntime:
    """See `packed_runtime.load`."""
    torch.set_num_threads(threads)
    model = load_model(folder, device, getattr(torch, dtype))
    encode: Encode
    if isinstance(model, EncoderModel):
        encode, backend = functools.partial(_together, model, device), "torch"
    else:
        encode, backend = functools.partial(_each_alone, model, device), "transformers"
    accepted = Accepted(max_length, model.vocabulary, model.token_types)
    return PackedRuntime(encode, backend, accepted, labels_tokens=model.labels_tokens)


@torch.inference_mode()
def _together(
    model: EncoderModel,
    device: str,
    ids: np.ndarray,
    types: np.ndarray | None,
    lengths: Sequence[int],
    importance: bool,
) -> tuple[np.ndarray, np.ndarray | None]:
    if importance:
        return _each_alone(model, device, ids, types, lengths, importance)
    given = None if types is None else torch.from_numpy(types).to(device)
    found: Tensor = model(torch.from_numpy(ids).to(device), given, Packed(lengths, device))
    return found.cpu().numpy(), None


@torch.inference_mode()
def _each_alone(
    model: Model, device: str, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], importance: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    answers: list[Tensor] = []
    received: list[Tensor] = []
    for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        one = slice(end - length, end)
        given = None if types is None else torch.from_numpy(types[one]).to(device)[None]
        found = model.padded(torch.from_numpy(ids[one]).to(device)[None], types=given, importance=importance)[0].cpu()
        if importance:
            found, weights = found[:-length], found[-length:]
            received.append(weights)
        answers.append(found)
    together = torch.cat(answers) if model.labels_tokens else torch.stack(answers)
    return together.numpy(), torch.cat(received).numpy() if importance else None
