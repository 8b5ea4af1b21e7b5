"""Whether a device's kernels compute what the readable ones do, in the widths of the model that is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pliant.bench.llm.our_kernels import tables_of
from pliant.errors import PliantError
from pliant.kernels.decoder.decode_step import Prefill, Step
from pliant.kernels.decoder.executor import Executor, kernels_for
from pliant.kernels.decoder.kernels import DecoderKernels, TorchKernels
from pliant.kernels.decoder.kv_pages import PAGE, KVPages, pages_of
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.ragged import Span, ragged
from pliant.kernels.decoder.sampling import Sampler
from pliant.kernels.decoder.weights import RandomWeights
from pliant.models.decoder_shape import DecoderShape
from pliant.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
_NO_ROWS, _NO_INDICES = np.empty(0, np.int32), np.empty(0, np.int64)


class WrongNumbersError(PliantError):
    """Kernels that do not compute what the readable ones compute."""


class Rounded(RandomWeights):
    """The same numbers in every dtype: those that bfloat16 can hold."""

    def copy(self, name: str, into: Tensor) -> None:
        rounded = torch.empty_like(into, dtype=torch.bfloat16)
        super().copy(name, rounded)
        into.copy_(rounded)


@torch.inference_mode()
def check(shape: DecoderShape, device: torch.device) -> dict[str, float]:
    """Relative errors of two layers' logits. Raises WrongNumbersError if they are more than rounding explains."""
    small = replace(shape, layers=2, windows=(None, 64))
    seed = time.time_ns() % 2**32
    theirs, _ = kernels_for(device, threads=1)
    expected = _logits(small, TorchKernels(), torch.float32, device, seed)
    variants: dict[str, tuple[DecoderKernels, torch.dtype]] = {
        "float32": (theirs, torch.float32),
        "bfloat16": (theirs, torch.bfloat16),
        "bfloat16 in plain torch": (TorchKernels(), torch.bfloat16),
    }
    errors = {}
    for name, (kernels, dtype) in variants.items():
        found = _logits(small, kernels, dtype, device, seed).double()
        errors[name] = float((found - expected.double()).norm() / expected.double().norm())
    allowed = {"float32": 1e-4, "bfloat16": 1.5 * errors["bfloat16 in plain torch"]}
    if wrong := [
        f"{name}: {errors[name]:.2g} instead of {most:.2g} at most"
        for name, most in allowed.items()
        if not errors[name] <= most
    ]:
        raise WrongNumbersError(f"with seed {seed}, the logits' relative error is too large for {'; '.join(wrong)}")
    _check_tokens(small, device, seed)
    return errors


def _logits(
    shape: DecoderShape, kernels: DecoderKernels, dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """Of prompts of many lengths, computed in two chunks, and of three steps that follow."""
    decoder, _ = parts(shape, kernels, dtype, device, 7, 512, seed)
    texts = random_texts(shape, (1, 2, 64, 65, 500), seed)
    tables = np.arange(1, 5 * pages_of(512) + 1, dtype=np.int32).reshape(5, -1)
    sizes = [len(ids) for ids in texts]
    cuts = [size // 3 for size in sizes]
    found = []
    for begins, ends in (([0] * 5, cuts), (cuts, sizes)):
        spans = [(Span(a, b - a), table) for a, b, table in zip(begins, ends, tables, strict=True) if b > a]
        ids = np.concatenate([text[a:b] for text, a, b in zip(texts, begins, ends, strict=True)])
        batch = ragged(_NO_ROWS, tables[:0], spans, PAGE, device)
        found.append(decoder.run(torch.from_numpy(ids).long().to(device), batch).to(torch.float32, copy=True))
    for step, tokens in enumerate(random_texts(shape, (5, 5, 5), seed + 1)):
        batch = ragged(np.array(sizes, np.int32) + np.int32(step), tables, [], PAGE, device)
        found.append(decoder.run(torch.from_numpy(tokens).long().to(device), batch).to(torch.float32, copy=True))
    return torch.cat(found)


def _check_tokens(shape: DecoderShape, device: torch.device, seed: int) -> None:
    """The device's executor, whose steps may be recorded and pipelined, gives the tokens of the plain one."""
    answers = []
    theirs, kind_there = kernels_for(device, threads=1)
    for kind, kernels in ((Executor, TorchKernels()), (kind_there, theirs)):
        executor = kind(*parts(shape, kernels, torch.float32, device, 7, 512, seed))
        answers.append(_answers(executor, random_texts(shape, (1, 2, 64, 65, 400), seed), offset=2, steps=24))
    if answers[0] != answers[1]:
        raise WrongNumbersError(f"with seed {seed}, its steps give other tokens than plain ones: {answers}")


def parts(
    shape: DecoderShape,
    kernels: DecoderKernels,
    dtype: torch.dtype,
    device: torch.device,
    slots: int,
    max_length: int,
    seed: int,
) -> tuple[Decoder, Sampler]:
    """Whose weights depend on `seed` alone, up to rounding; keys and values are random, as zeros compute faster."""
    with torch.inference_mode():
        torch.manual_seed(seed)
        kv = KVPages(shape, slots, max_length, dtype, device, kernels)
        decoder = Decoder(Rounded(shape, dtype, device), kernels, kv)
        kv.keys.normal_()
        kv.values.normal_()
        return decoder, Sampler(slots, shape.vocab, device, kv.max_length)


def random_texts(shape: DecoderShape, lengths: Sequence[int], seed: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(shape.vocab, size=length, dtype=np.int32) for length in lengths]


def _answers(executor: Executor, prompts: Sequence[NDArray[np.int32]], offset: int, steps: int) -> list[list[int]]:
    """Greedy tokens by step."""
    for slot in range(offset, offset + len(prompts)):
        executor.admit(slot, GREEDY)
    first = np.zeros(len(prompts), np.int64)
    tables = tables_of(executor)
    prefills = tuple(Prefill(slot, 0, ids, True, tables[slot]) for slot, ids in enumerate(prompts, offset))
    launched = [executor.launch(Step(prefills, 0, _NO_ROWS, tables[:0], _NO_INDICES, first))]
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    launched += [executor.launch(decode_step(executor, offset, lengths + step)) for step in range(steps)]
    prefilled, *decoded = [one.result() for one in launched]
    return [prefilled.first.tolist(), *(output.tokens.tolist() for output in decoded)]


def decode_step(executor: Executor, offset: int, lengths: NDArray[np.int32]) -> Step:
    tables = tables_of(executor)[offset : offset + len(lengths)]
    return Step((), offset, lengths.astype(np.int32), tables, np.zeros(len(lengths), np.int64), _NO_INDICES)
