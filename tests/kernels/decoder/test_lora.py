"""Adapted rows say what PEFT's own model says, whatever else is in their batch and however prompts are cut."""

from __future__ import annotations

import copy
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.decoders import logits, make, save
from support.lora_adapters import KINDS, adapt
from torch import Tensor

from pliant.formats.adapter_info import read_adapter
from pliant.kernels import c_compiler
from pliant.kernels.c_compiler import THIS_MACHINE
from pliant.kernels.decoder import adapter_weights
from pliant.kernels.decoder.cpu_kernels import CpuKernels
from pliant.kernels.decoder.kernels import DecoderKernels, TorchKernels
from pliant.kernels.decoder.kv_pages import PAGE, KVPages
from pliant.kernels.decoder.lora import LoraBatch, LoraGroup, rows_of
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.ragged import Span, ragged
from pliant.kernels.decoder.weights import SavedWeights
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import SITES, LoraLayout

CPU = torch.device("cpu")
STEPS = 3
KERNELS = {"torch": TorchKernels, "c": partial(CpuKernels, 2)}
needs_compiler = pytest.mark.skipif(c_compiler.compiler() is None, reason="no C compiler")
every_kernels = pytest.mark.parametrize("kernels", ["torch", pytest.param("c", marks=needs_compiler)])


class Saved:
    """A decoder with an adapter of every kind, and their texts: one of the bare decoder, then one for each adapter."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self.texts = texts(1 + len(KINDS))
        save(family, folder / "base")
        self.models = [make(family), *(adapt(family, kind, folder / kind, seed) for seed, kind in enumerate(KINDS))]
        self.expected = self.answers(torch.float32)

    def answers(self, dtype: torch.dtype) -> list[Tensor]:
        """What PEFT says after each text's prompt, and after each of the last tokens."""
        models = [copy.deepcopy(model).to(dtype) for model in self.models]
        return [logits(m, text.tolist())[-STEPS - 1 :].float() for m, text in zip(models, self.texts, strict=True)]


@pytest.fixture(scope="module", params=["llama3", "qwen2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp(request.param))


class Adapted:
    """The same, computed by our kernels from one arena."""

    def __init__(self, saved: Saved, kernels: DecoderKernels, dtype: torch.dtype) -> None:
        weights = SavedWeights(saved.folder / "base", dtype, CPU)
        shape = weights.shape
        self.texts = saved.texts
        self.decoder = Decoder(weights, kernels, KVPages(shape, len(self.texts), 96, dtype, CPU, kernels))
        infos = {kind: read_adapter(saved.folder / kind, shape) for kind in KINDS}
        self.arena, self.places = torch.full((64,), torch.nan, dtype=dtype), {}
        for kind, info in infos.items():
            self.places[kind] = len(self.arena), LoraLayout(shape, info.ranks)
            self.arena = torch.cat([self.arena, adapter_weights.stage(info, shape, dtype, CPU)])

    def batch(self, sizes: list[int]) -> LoraBatch:
        """For so many rows of each text."""
        rows = rows_of([None, *KINDS], sizes)
        return LoraBatch(self.arena, [LoraGroup(at, *self.places[kind]) for kind, at in rows.items()])

    def run(self, lengths: list[int], starts: list[int], ends: list[int]) -> Tensor:
        """In one pass: a token of each text behind its first `lengths`, as far as these go; chunks of all others."""
        n = len(lengths)
        tables = np.arange(2 * len(self.texts), dtype=np.int32).reshape(-1, 2) + 1
        spans = [(Span(start, end - start), table) for start, end, table in zip(starts, ends, tables[n:], strict=True)]
        cuts = [*((length, length + 1) for length in lengths), *zip(starts, ends, strict=True)]
        tokens = np.concatenate([text[slice(*cut)] for text, cut in zip(self.texts, cuts, strict=True)])
        batch = ragged(np.array(lengths, np.int32), tables[:n], spans, PAGE, CPU)
        stops = np.cumsum([end - start for start, end in cuts]) - 1
        sizes = [end - start for start, end in cuts]
        return self.decoder.run(torch.from_numpy(tokens), batch, torch.from_numpy(stops), self.batch(sizes)).clone()

    @torch.inference_mode()
    def answers(self) -> list[Tensor]:
        """As `Saved.answers`, from prompts in two uneven rounds, of which the second goes with tokens of some texts."""
        ends = [len(text) - STEPS for text in self.texts]
        cuts = [end // 3 for end in ends]
        half = len(ends) // 2
        self.run([], [0] * len(cuts), cuts)
        first = self.run([], cuts, [*ends[:half], *(cut + 1 for cut in cuts[half:])])[:half]
        second = self.run(ends[:half], [cut + 1 for cut in cuts[half:]], ends[half:])
        found = [torch.cat([first, second[half:]]), second[:half]]
        found.append(self.run([end + 1 for end in ends[:half]], ends[half:], [end + 1 for end in ends[half:]]))
        found[1] = torch.cat([found[1], found[2][half:]])
        found[2] = found[2][:half]
        third = self.run([end + 2 for end in ends[:half]] + [end + 1 for end in ends[half:]], [], [])
        fourth = self.run([end + 2 for end in ends], [], [])
        found[2] = torch.cat([found[2], third[half:]])
        return [one.float() for one in torch.stack([*found, fourth], 1)]


def texts(count: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 97, rng.integers(7, 75), dtype=np.int32) for _ in range(count)]


def differences(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]


@every_kernels
def test_logits_are_those_of_peft(saved: Saved, kernels: str) -> None:
    found = Adapted(saved, KERNELS[kernels](), torch.float32).answers()
    assert max(differences(found, saved.expected)) < 1e-4


@every_kernels
def test_bfloat16_is_as_near_to_float32_as_peft_is(saved: Saved, kernels: str) -> None:
    theirs = differences(saved.answers(torch.bfloat16), saved.expected)
    ours = differences(Adapted(saved, KERNELS[kernels](), torch.bfloat16).answers(), saved.expected)
    assert max(ours) < 1.5 * max(theirs)
    assert sum(ours) < 1.2 * sum(theirs)


def test_adapters_matter(saved: Saved) -> None:
    """Or else the tests above would pass without them."""
    for model, text, expected in zip(saved.models[1:], saved.texts[1:], saved.expected[1:], strict=True):
        assert float((logits(saved.models[0], text.tolist())[-STEPS - 1 :] - expected).abs().max()) > 0.3, model


SHAPE = DecoderShape.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 50,
        "intermediate_size": 1090,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 8,
        "max_position_embeddings": 8,
    }
)
RANKS = [[1, 3, 8, 64, 20, 5, 256], [0, 0, 16, 0, 0, 7, 0], [33, 0, 1, 8, 1, 0, 3], [4] * 7, [128] * 7]
BUILDS = {"this machine": THIS_MACHINE}
if platform.machine() == "x86_64":
    BUILDS["without AMX"] = (*THIS_MACHINE, "-mno-amx-tile", "-mno-amx-bf16")
    BUILDS["any x86-64"] = ("-march=x86-64",)


def random_batch(sizes: Sequence[int], shape: DecoderShape = SHAPE) -> LoraBatch:
    """Groups of so many rows, scattered among one more that has no adapter, in a float32 arena.

    What lies between adapters is not a number.
    """
    rng = np.random.default_rng(0)
    order = rng.permutation(sum(sizes) + 1).astype(np.int32)
    groups, offset = [], 64
    for rows, ranks in zip(np.split(order, np.cumsum(sizes))[: len(sizes)], RANKS, strict=False):
        layout = LoraLayout(shape, ranks)
        groups.append(LoraGroup(np.sort(rows), offset, layout))
        offset += layout.values + 64
    arena = torch.full((offset,), torch.nan)
    for group in groups:
        arena[group.offset :][: group.layout.values] = torch.randn(group.layout.values) / 10
    return LoraBatch(arena, groups)


def assert_adds_the_same(kernels: DecoderKernels, batch: LoraBatch, dtype: torch.dtype) -> None:
    """As torch does in float32, within rounding of `dtype`, to every site of both layers."""
    ours = LoraBatch(batch.arena.to(dtype), batch.groups)
    exact = TorchKernels().lora(LoraBatch(ours.arena.float(), batch.groups))
    add, rows = kernels.lora(ours), len(batch.rows) + 1
    for layer, site in product((0, 1), SITES):
        sizes = batch.sites[site]
        x = torch.randn(rows, sizes.inputs).to(dtype)
        before = torch.randn(rows, sum(module.out for module in sizes.modules)).to(dtype)
        found, expected = before.clone(), before.float().clone()
        add(found, x, layer, site)
        exact(expected, x.float(), layer, site)
        tolerance = (1e-5 if dtype == torch.float32 else 1.6e-2) * float(expected.abs().max())
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)
        alone = sorted(set(range(rows)) - set(batch.rows.tolist()))
        assert torch.equal(found[alone], before[alone])


@pytest.fixture(scope="module", params=list(BUILDS))
def c_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return CpuKernels(2, BUILDS[request.param])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[1], [2, 1, 3], [5, 40, 1, 7], [70], [32, 33, 1, 1, 1]], ids=str)
def test_kernels_in_c_add_what_torch_adds(c_kernels: CpuKernels, sizes: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_adds_the_same(c_kernels, random_batch(sizes), dtype)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes_are_left_to_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert_adds_the_same(CpuKernels(1), random_batch([2, 40], replace(SHAPE, hidden=37, intermediate=33)), dtype)


def test_rows_are_grouped_by_adapter() -> None:
    found = rows_of(["a", None, "b", "a"], [2, 1, 1, 3])
    assert {key: rows.tolist() for key, rows in found.items()} == {"a": [0, 1, 4, 5, 6], "b": [3]}
    assert rows_of([None, None], [3, 1]) == {}


def test_tables_for_kernels_say_where_everything_lies() -> None:
    batch = random_batch([2, 1])
    assert batch.starts.tolist() == [0, 2, 3]
    assert batch.outs.tolist() == [[64, 32, 32], [50, 0, 0], [1090, 1090, 0], [50, 0, 0]]
    first, second = batch.groups
    block, a, *modules = batch.places[1, 0].tolist()
    site = second.layout.sites["qkv"]
    assert (block, a) == (second.layout.block, second.offset + site.a)
    assert modules[::2] == [0, 0, 16]
    assert modules[1::2] == [second.offset + module.b for module in site.modules]
    assert batch.places[0, 3].tolist()[4:] == [0] * 4
    assert second.offset >= first.offset + first.layout.values
