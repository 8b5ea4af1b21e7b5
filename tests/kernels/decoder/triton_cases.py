"""The GPU's kernels against the readable ones: on a GPU, or in Triton's interpreter.

Not collected with the other tests, as the interpreter changes Triton for a whole process: `test_triton_decode` runs
these in one of their own. The interpreter takes about a millisecond for each program and is wrong for bfloat16.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.interpreted_fp8 import rounded_by_torch
from support.pretend_gpu import PretendGpu, WaitsForGpuError, in_the_interpreter
from torch import Tensor

from pliant.kernels.decoder import triton_sampling
from pliant.kernels.decoder.cuda_kernels import CudaKernels
from pliant.kernels.decoder.fp8 import E4M3, LARGEST, quantized, stored_as
from pliant.kernels.decoder.kernels import TorchKernels
from pliant.kernels.decoder.lora import LoraBatch, LoraGroup
from pliant.kernels.decoder.ragged import Span, ragged
from pliant.kernels.decoder.sampling import Sampler, Sampling
from pliant.kernels.decoder.triton_lora import tables_of, tiles_of
from pliant.kernels.decoder.uniform import uniform
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import LoraLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
TORCH = TorchKernels()
OLD = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
needs_fp8 = pytest.mark.skipif(OLD, reason="needs a GPU with fp8")
STORED = [None, pytest.param(E4M3, marks=needs_fp8)]
"""What keys and values are stored in, if not in the dtype."""


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, device=DEVICE).to(dtype)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def kernels(programs: int = 4) -> CudaKernels:
    """Such that attention has so many programs, a multiple of 4, or one for each text if these are more."""
    return CudaKernels(processors=programs // 4)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """To within rounding, relative to the greatest number; NaN is near to nothing."""
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        rounded_by_torch(monkeypatch)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page", "parts", "window"),
    [
        (2, 2, 32, 64, 1, None),
        (6, 2, 10, 16, 4, None),
        (3, 1, 10, 32, 20, 40),
        (8, 2, 64, 64, 2, 5),
        (7, 1, 128, 128, 20, None),
    ],
)
def test_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    parts: int,
    window: int | None,
    dtype: torch.dtype,
    stored: torch.dtype | None,
) -> None:
    """Rows of 150, 67 and 1 tokens, and two chunks behind them, of which one begins its text."""
    pages = -(-150 // page)
    order = 1 + np.random.default_rng(0).permutation(5 * pages).astype(np.int32)
    tables = order.reshape(5, pages)
    keys, values = (random(5 * pages + 1, kv_heads, page, head_dim, dtype=stored or dtype) for _ in range(2))
    chunks = [(Span(60, 20), tables[3]), (Span(0, 37), tables[4])]
    batch = ragged(np.array([149, 66, 0], np.int32), tables[:3], chunks, page, DEVICE)
    q = random(60, heads, head_dim, dtype=dtype)
    expected = TORCH.attention(q.float(), keys.float(), values.float(), batch, window)
    found = kernels(4 * parts * kv_heads).attention(q, keys, values, batch, window)
    for first, end in ((0, 3), (3, 23), (23, 60)):
        assert_near(found[first:end], expected[first:end], dtype)


@pytest.mark.parametrize("parts", [1, 2])
def test_attention_reads_no_more_than_a_text_of_the_pages_that_each_row_names(parts: int) -> None:
    lengths, tables = np.array([0, 15, 16], np.int32), np.array([[3, 0], [5, 0], [4, 1]], np.int32)
    keys, values = (torch.full((6, 2, 16, 16), torch.nan, device=DEVICE) for _ in range(2))
    for length, table in zip(lengths.tolist(), tables, strict=True):
        for at in range(length + 1):
            for buffer in (keys, values):
                buffer[int(table[at // 16]), :, at % 16] = random(2, 16)
    batch, q = ragged(lengths, tables, [], 16, DEVICE), random(3, 4, 16)
    mixed = kernels(parts * 8).attention(q, keys, values, batch, None)
    assert_near(mixed, TORCH.attention(q, keys, values, batch, None), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 10), (2, 2, 32), (7, 1, 128)])
def test_rotation_and_storage(heads: int, kv_heads: int, head_dim: int, normalised: bool, dtype: torch.dtype) -> None:
    qkv = random(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions, pages = ints(0, 8, 3), ints(2, 0, 1)
    angles = random(9, head_dim // 2).repeat(1, 2)
    norms = (random(head_dim, dtype=dtype), random(head_dim, dtype=dtype)) if normalised else None
    arguments = (qkv, positions, pages, (angles.cos(), angles.sin()), norms, 1e-6)
    buffers = [random(4, kv_heads, 4, head_dim, dtype=dtype) for _ in range(2)]
    expected_buffers = [buffer.clone() for buffer in buffers]
    expected = TORCH.rotate_and_store(*arguments, *expected_buffers)
    assert_near(kernels().rotate_and_store(*arguments, *buffers), expected, dtype)
    for buffer, expected_buffer in zip(buffers, expected_buffers, strict=True):
        assert_near(buffer, expected_buffer, dtype)
        assert torch.equal(buffer[3], expected_buffer[3])


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 10), (2, 2, 32), (7, 1, 128)])
def test_storage_as_fp8(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """To within its rounding of what wide pages hold; what is too large is cut off."""
    qkv = random(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    qkv[1] *= 300
    angles = random(9, head_dim // 2).repeat(1, 2)
    arguments = (qkv, ints(0, 8, 3), ints(2, 0, 1), (angles.cos(), angles.sin()), None, 1e-6)
    wide = [random(4, kv_heads, 4, head_dim) for _ in range(2)]
    narrow = [stored_as(buffer, E4M3) for buffer in wide]
    before = narrow[0][3].float()
    expected = TORCH.rotate_and_store(*arguments, *wide)
    assert_near(kernels().rotate_and_store(*arguments, *narrow), expected, dtype)
    for buffer, exact in zip(narrow, wide, strict=True):
        bounded = exact.clamp(-LARGEST, LARGEST)
        assert ((buffer.float() - bounded).abs() <= bounded.abs() * 1.03 / 16 + 2**-10).all()
        assert bool((exact.abs() > LARGEST).any())
    assert torch.equal(narrow[0][3].float(), before)


@needs_fp8
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "outs", "ins"), [(1, 48, 70), (3, 64, 256), (33, 130, 64), (150, 200, 48)])
def test_fp8_linear(rows: int, outs: int, ins: int, biased: bool, dtype: torch.dtype) -> None:
    weight, x = random(outs, ins, dtype=dtype), random(rows, ins, dtype=dtype)
    bias = random(outs, dtype=dtype) if biased else None
    values, scale = quantized(weight)
    expected = x.double() @ (values.double() * scale.double()[:, None]).T + (0 if bias is None else bias.double())
    assert_near(kernels().fp8_linear(weight, bias)(x), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1100])
def test_norms_and_gates(width: int, dtype: torch.dtype) -> None:
    hidden, delta, weight = random(3, width, dtype=dtype), random(3, width, dtype=dtype), random(width, dtype=dtype)
    assert_near(kernels().gate(hidden), TORCH.gate(hidden), dtype)
    for added in (None, delta):
        ours, theirs = hidden.clone(), hidden.clone()
        found = kernels().add_norm(ours, added, weight, 1e-5)
        assert_near(found, TORCH.add_norm(theirs, added, weight, 1e-5), dtype)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [*DTYPES, *STORED[1:]])
def test_moves(dtype: torch.dtype) -> None:
    keys, values = (random(2, 5, 2, 70, 64, dtype=dtype) for _ in range(2))
    expected = keys.clone(), values.clone()
    moves = [(0, 3, 70), (4, 1, 2), (2, 2, 0)]
    TORCH.move(*expected, moves)
    kernels().move(keys, values, moves)
    assert torch.equal(keys.float(), expected[0].float())
    assert torch.equal(values.float(), expected[1].float())
    kernels().move(keys, values, [(0, 1, 0)])
    assert torch.equal(keys.float(), expected[0].float())


LORA_SHAPE = DecoderShape.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 1100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "vocab_size": 8,
        "max_position_embeddings": 8,
    }
)


def lora_batch(dtype: torch.dtype) -> LoraBatch:
    """Rows of 20: 17 of one adapter, two of others, and one of none; what lies between blobs is not a number."""
    groups, offset = [], 64
    order = np.random.default_rng(0).permutation(20).astype(np.int32)
    for rows, ranks in (
        (order[:17], [40, 1, 0, 8, 3, 70, 33]),
        (order[17:18], [16] * 7),
        (order[18:19], [0, 0, 5] + [0] * 4),
    ):
        layout = LoraLayout(LORA_SHAPE, ranks)
        groups.append(LoraGroup(rows, offset, layout))
        offset += layout.values + 64
    arena = torch.full((offset,), torch.nan, device=DEVICE, dtype=dtype)
    for group in groups:
        arena[group.offset : group.offset + group.layout.values] = random(group.layout.values, dtype=dtype) / 10
    return LoraBatch(arena, groups)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("site", "layer"), [("qkv", 1), ("output", 0), ("gate_up", 0), ("down", 1)])
def test_lora(site: str, layer: int, dtype: torch.dtype) -> None:
    batch = lora_batch(dtype)
    sizes = batch.sites[site]
    x, y = random(20, sizes.inputs, dtype=dtype), random(20, sum(m.out for m in sizes.modules), dtype=dtype)
    expected = y.float().clone()
    TORCH.lora(LoraBatch(batch.arena.float(), batch.groups))(expected, x.float(), layer, site)
    found = y.clone()
    kernels().lora(batch)(found, x, layer, site)
    assert_near(found, expected, dtype)
    untouched = (expected == y).all(1)
    assert untouched.any()
    assert torch.equal(found[untouched], y[untouched])


def test_tiles_without_rows_add_nothing() -> None:
    batch = lora_batch(torch.float32)
    tiles = tiles_of(batch)
    assert len(tiles.rows) == 4
    rows, places = tables_of(None, len(tiles.rows))
    tiles.rows.copy_(torch.from_numpy(rows))
    tiles.places.copy_(torch.from_numpy(places))
    y = torch.ones(20, 48, device=DEVICE)
    tiles.add(y, random(20, 60), 0, "output")
    assert bool((y == 1).all())


WAYS = [
    Sampling(temperature, top_k, top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        (1e-3, 0.3, 1.0, 2.5), (0, 1, 20, 3000), (1.0, 0.95, 0.4, 1e-6), (0.0, 0.05, 1.0)
    )
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab"), [(1, 4096), (64, 7), (64, 501), (48, 9001)])
def test_draws_are_those_of_a_cpu(rows: int, vocab: int, dtype: torch.dtype) -> None:
    """Every fourth row is greedy. Some have ties, or banned tokens; one has nothing else, and one neither slot nor
    place as the others."""
    logits = random(rows, vocab, dtype=dtype) * 3
    logits[1::3] = logits[1::3].round()
    logits[2::5, 1::2] = -torch.inf
    logits[7:8] = -torch.inf
    asked = [
        replace(way, seed=7**row % 2**63, temperature=way.temperature if row % 4 else 0.0)
        for row, way in enumerate(np.random.default_rng(vocab).permutation(np.array(WAYS))[:rows])
    ]
    asked[0] = Sampling(0.9, 20, 0.8, seed=-1)
    indices = torch.arange(rows) * 1000
    indices[-1:] = 2**31 - 1
    drawn = []
    for device in ("cpu", DEVICE):
        sampler = Sampler(rows, vocab, device, 1)
        for row, way in enumerate(asked):
            sampler.set(rows - 1 - row, way)
        drawn.append((sampler, torch.arange(rows - 1, -1, -1, device=device), indices.to(device)))
    (plain, slots, places), (ours, our_slots, our_places) = drawn
    expected = plain.sample(logits.cpu(), slots, places, plain.needs(range(rows))).tokens
    assert ours.draw(logits, our_slots, our_places.int()).tolist() == expected.tolist()


def test_what_is_not_a_number_is_the_greatest() -> None:
    logits = random(4, 500)
    logits[:, 123] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    logits[3] = torch.nan
    sampler = Sampler(4, 500, DEVICE, 1)
    sampler.set(1, Sampling(top_k=5, top_p=0.5, min_p=0.1))
    sampler.set(3, Sampling(top_k=5, top_p=0.5, min_p=0.1))
    slots = torch.arange(4, device=DEVICE)
    tokens = sampler.draw(logits, slots, slots).tolist()
    assert tokens[:3] == [123, 123, int(logits[2].argmax())]
    assert 0 <= tokens[3] < 500


@triton.jit
def _random_numbers(seed: tl.tensor, index: tl.tensor, out: tl.tensor) -> None:
    low, high = triton_sampling._keys(tl.load(seed), tl.load(index))
    tokens = tl.arange(0, 1024)
    tl.store(out + tokens, triton_sampling._uniform(tokens, low, high))


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (-1, 5), (2**63 - 1, 2**31 - 1), (-(2**63), 17)])
def test_random_numbers_are_those_of_a_cpu(seed: int, index: int) -> None:
    key, out = (torch.tensor([seed]), torch.tensor([index])), random(1024)
    _random_numbers[1,](*(each.to(DEVICE) for each in key), out)
    assert torch.equal(out.cpu(), uniform(*key, torch.arange(1024)[None])[0])


ASKED = [
    Sampling(temperature=0.0),
    Sampling(top_p=0.8, seed=1),
    Sampling(top_k=5, seed=2, logprobs=2),
    Sampling(min_p=0.1, typical_p=0.9, logit_bias=((3, 5.0),), min_tokens=2, ends=(1,)),
    Sampling(presence_penalty=1.5, repetition_penalty=1.2, top_k=9, top_p=0.9, seed=2**64 - 1),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors only claim to lie on a GPU")
def test_sampling_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a slot's admission to its token; and what is drawn is what a CPU draws."""
    logits, indices, drawn = random(len(ASKED), 500), torch.arange(len(ASKED)), []
    for mode in (contextlib.nullcontext(), in_the_interpreter(monkeypatch)):
        sampler = Sampler(len(ASKED), 500, "cpu", 20)
        with mode:
            for slot, sampling in enumerate(ASKED):
                sampler.set(slot, sampling, np.array([1, 2], np.int32), np.array([4], np.int32))
            sampled = sampler.sample(logits, slice(0, len(ASKED)), indices, sampler.needs(range(len(ASKED))))
            sampler.record(slice(0, len(ASKED)), indices, sampled.tokens)
            sampler.move([(4, 0)])
        drawn.append(sampled.tokens.tolist())
    assert drawn[0] == drawn[1]


def test_what_waits_for_a_gpu_is_seen() -> None:
    numbers = torch.zeros(3)

    def written() -> None:
        numbers[1] = 2.0

    def cut() -> Tensor:
        return numbers[numbers > 0]

    for waits in (written, cut, numbers.tolist, lambda: int(numbers[0]), lambda: numbers[[0, 1]]):
        with PretendGpu(), pytest.raises(WaitsForGpuError):
            waits()
