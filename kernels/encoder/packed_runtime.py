"""Answers any number of texts at once, each at its own length: they lie one behind the other, without padding.

On a CPU it is faster than what is compiled for one length or for any, it needs no compiling for either, and it holds
the weights once. Linear layers of few rows wait for weights, so that short texts gain most from being together.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pliant.kernels import c_compiler
from pliant.kernels.encoder.cpu_encoder import HEAD_DIM, CpuEncoder
from pliant.kernels.encoder.eager_classifier import Model, load_model
from pliant.kernels.encoder.layout import Packed
from pliant.kernels.encoder.model import EncoderModel
from pliant.kernels.encoder.texts import Accepted, Output, Text
from pliant.models.decoder_info import read_json
from pliant.models.encoder_shape import EncoderShape

_Encode = Callable[[np.ndarray, np.ndarray | None, Sequence[int], bool], tuple[Tensor, Tensor | None]]
"""Of packed ids and types of texts of these lengths: answers, and importance if that is wanted (see `CpuEncoder`)."""

_warn_once = functools.cache(logging.getLogger("pliant").warning)


class PackedRuntime:
    """An encoder that answers any number of inputs of up to `max_length` tokens at a time.

    `backend` is "c" (a CPU, float32), "torch" (any device and dtype), or "transformers" (models that are not ours to
    compute, each text alone). Any thread may call it, but one at a time.
    """

    dynamic = True

    def __init__(self, encode: _Encode, backend: str, accepted: Accepted, *, labels_tokens: bool) -> None:
        self.backend = backend
        self.max_length = accepted.max_length
        self._encode = encode
        self._accepted = accepted
        self._labels_tokens = labels_tokens

    def __call__(self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """The logits (see `Output`) of the text with these token ids. Raises ValueError as `run_all` does."""
        return self.run_all([Text(ids, types)])[0].logits

    def run_all(self, texts: Sequence[Text], *, importance: bool = False) -> list[Output]:
        """What there is to say of each text, with the importance of its tokens if that is wanted; none knows of others.

        Raises ValueError if there are no texts, and as `Accepted.check` does.
        """
        if not texts:
            raise ValueError("got no texts; this runtime takes 1 or more")
        for text in texts:
            self._accepted.check(text)
        lengths = [len(text.ids) for text in texts]
        ids = np.concatenate([np.asarray(text.ids, np.int64) for text in texts])
        types = None
        if self._accepted.token_types > 1 and any(text.types is not None for text in texts):
            given = (np.zeros(len(text.ids)) if text.types is None else np.asarray(text.types) for text in texts)
            types = np.concatenate(list(given)).astype(np.int64)
        found, received = self._encode(ids, types, lengths, importance)
        ends = np.cumsum(lengths)[:-1]
        answers = np.split(found.numpy(), ends) if self._labels_tokens else list(found.numpy())
        if received is None:
            return [Output(answer, None) for answer in answers]
        return [Output(*both) for both in zip(answers, np.split(received.numpy(), ends), strict=True)]


def load(
    folder: Path, max_length: int, *, device: str = "cpu", dtype: str = "float32", threads: int = 1
) -> PackedRuntime:
    """The encoder in `folder` for inputs of up to `max_length` tokens.

    Where the C code cannot be compiled the "pliant" logger warns, and torch computes instead. Sets this process's
    number of torch threads to `threads`. Raises ModelError as `eager_classifier.load_model`.
    """
    torch.set_num_threads(threads)
    model = load_model(folder, device, getattr(torch, dtype))
    accepted = Accepted(max_length, model.vocabulary, model.token_types)
    encode, backend = _best(model, device, dtype, threads)
    return PackedRuntime(encode, backend, accepted, labels_tokens=model.labels_tokens)


def suits(folder: Path, *, device: str, dtype: str) -> bool:
    """Whether `load` gives a runtime that computes texts together, on a CPU in C: it knows the model, and the compiler
    is there."""
    shape = EncoderShape.from_config(read_json(folder / "config.json"))
    if shape is None or device != "cpu":
        return shape is not None
    return dtype == "float32" and not shape.hidden // shape.heads % HEAD_DIM and c_compiler.compiler() is not None


def _best(model: Model, device: str, dtype: str, threads: int) -> tuple[_Encode, str]:
    if not isinstance(model, EncoderModel):
        return functools.partial(_each_alone, model, device), "transformers"
    if CpuEncoder.takes(model):
        try:
            encoder = CpuEncoder(model, threads)
        except c_compiler.CompilerError as reason:
            _warn_once("Encoders run about half as fast: %s.", str(reason))
        else:
            return lambda ids, types, lengths, importance: encoder(ids, types, lengths, importance=importance), "c"
    return functools.partial(_in_torch, model, device), "torch"


@torch.inference_mode()
def _in_torch(
    model: EncoderModel,
    device: str,
    ids: np.ndarray,
    types: np.ndarray | None,
    lengths: Sequence[int],
    importance: bool,
) -> tuple[Tensor, Tensor | None]:
    if importance:
        return _each_alone(model, device, ids, types, lengths, importance)
    given = None if types is None else torch.from_numpy(types).to(device)
    found: Tensor = model(torch.from_numpy(ids).to(device), given, Packed(lengths, device))
    return found.cpu(), None


@torch.inference_mode()
def _each_alone(
    model: Model, device: str, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], importance: bool
) -> tuple[Tensor, Tensor | None]:
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
    return together, torch.cat(received) if importance else None
