"""Answers any number of texts at once, each at its own length: they lie one behind the other, without padding.

On a CPU it is faster than what is compiled for one length or for any, it needs no compiling for either, and it holds
the weights once. Linear layers of few rows wait for weights, so that short texts gain most from being together.

torch is imported only where the C code cannot compute the model.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pliant.kernels import c_compiler
from pliant.kernels.encoder import weights
from pliant.kernels.encoder.cpu_encoder import CpuEncoder
from pliant.kernels.encoder.exits import EarlyExit, Exits, LayeredEncoder
from pliant.kernels.encoder.texts import Accepted, Output, Stop, Text
from pliant.models.decoder_info import read_json
from pliant.models.encoder_shape import EncoderShape

if TYPE_CHECKING:
    from pliant.formats.pass_times import PassTimes

Encode = Callable[[np.ndarray, np.ndarray | None, Sequence[int], bool], tuple[np.ndarray, np.ndarray | None]]
"""Of packed ids and types of texts of these lengths: answers, and importance if that is wanted (see `CpuEncoder`)."""

_warn_once = functools.cache(logging.getLogger("pliant").warning)


class PackedRuntime:
    """An encoder that answers any number of inputs of up to `max_length` tokens at a time.

    `backend` is "c" (a CPU, float32), "torch" (any device and dtype), "cuda-graph" (the same, recorded), or
    "transformers" (models that are not ours to compute, each text alone). Any thread may call it, but one at a time.
    """

    dynamic = True

    def __init__(
        self,
        encode: Encode,
        backend: str,
        accepted: Accepted,
        *,
        labels_tokens: bool,
        encoder: LayeredEncoder | None = None,
    ) -> None:
        self.backend = backend
        self.max_length = accepted.max_length
        self.encoder = encoder
        """That computes layer by layer; None of models that are not ours to compute."""
        self._encode = encode
        self._accepted = accepted
        self._labels_tokens = labels_tokens
        self._early: EarlyExit | None = None
        self._stops: tuple[Stop, ...] = ()
        """Where texts may leave that do not say so."""
        self.times: PassTimes | None = None
        """What passes were measured to take; None until they are."""

    def __call__(self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """The logits (see `Output`) of the text with these token ids. Raises ValueError as `run_all` does."""
        return self.run_all([Text(ids, types)])[0].logits

    def leave_early(self, exits: Exits, *, unasked: bool = True) -> None:
        """From now on, have texts leave at `exits`; only those that say where if not `unasked`.

        Raises ValueError if the model is not ours to compute.
        """
        if self.encoder is None:
            raise ValueError(f"texts leave only what pliant computes itself, not what {self.backend} does")
        self._early, self._stops = EarlyExit(self.encoder, exits), exits.stops if unasked else ()

    def run_all(self, texts: Sequence[Text], *, importance: bool = False) -> list[Output]:
        """What there is to say of each text, with the importance of its tokens if that is wanted; none knows of others.

        With importance, no text leaves early: it is that of all layers.

        Raises ValueError if there are no texts, for a stop where there is no exit, and as `Accepted.check` does.
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
        stops = [text.stops or self._stops for text in texts]
        if any(stops) and not importance:
            if self._early is None:
                raise ValueError("there are no exits, which are for services that say so")
            return self._early.run(ids, types, lengths, stops)
        found, received = self._encode(ids, types, lengths, importance)
        ends = np.cumsum(lengths)[:-1]
        answers = np.split(found, ends) if self._labels_tokens else list(found)
        if received is None:
            return [Output(answer, None) for answer in answers]
        return [Output(*both) for both in zip(answers, np.split(received, ends), strict=True)]


def load(
    folder: Path, max_length: int, *, device: str = "cpu", dtype: str = "float32", threads: int = 1
) -> PackedRuntime:
    """The encoder in `folder` for inputs of up to `max_length` tokens.

    Where the C code cannot be compiled the "pliant" logger warns, and torch computes instead, for which this process's
    number of torch threads is set to `threads`. Raises ModelError as `eager_classifier.load_model`.
    """
    if _in_c(folder, device, dtype):
        config = read_json(folder / "config.json")
        shape = EncoderShape.from_config(config)
        assert shape
        read = weights.read(folder, config, shape)
        try:
            encoder = CpuEncoder(read, threads)
        except c_compiler.CompilerError as reason:
            _warn_once("Encoders compute in torch, which takes up to four times as long: %s.", str(reason))
        else:
            accepted = Accepted(max_length, shape.vocab, shape.token_types)
            encode = functools.partial(_encode, encoder)
            labels_tokens = read.head.task == "tokens"
            return PackedRuntime(encode, "c", accepted, labels_tokens=labels_tokens, encoder=encoder)
    from pliant.kernels.encoder import packed_in_torch

    return packed_in_torch.load(folder, max_length, device, dtype, threads)


def suits(folder: Path, *, device: str, dtype: str) -> bool:
    """Whether `load` gives a runtime that computes texts together, on a CPU in C: it knows the model, and the compiler
    is there."""
    if device != "cpu":
        return EncoderShape.from_config(read_json(folder / "config.json")) is not None
    return _in_c(folder, device, dtype) and c_compiler.compiler() is not None


def _in_c(folder: Path, device: str, dtype: str) -> bool:
    """Whether the model is the C code's to compute, once that is compiled."""
    shape = EncoderShape.from_config(read_json(folder / "config.json"))
    return shape is not None and CpuEncoder.takes(shape) and (device, dtype) == ("cpu", "float32")


def _encode(
    encoder: CpuEncoder, ids: np.ndarray, types: np.ndarray | None, lengths: Sequence[int], importance: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    return encoder(ids, types, lengths, importance=importance)
