"""The GPU's kernels against the readable ones: on a GPU, or in Triton's interpreter.

Not collected with the other tests, as the interpreter changes Triton for a whole process: `test_triton_decode` runs
these in one of their own. The interpreter takes about a millisecond for each program and is wrong for bfloat16.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pliant.kernels.decoder.cuda_kernels import CudaKernels
from pliant.kernels.decoder.kernels import TorchKernels
from pliant.kernels.decoder.lora import LoraBatch, LoraGroup
from pliant.kernels.decoder.triton_lora import tables_of, tiles_of
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import LoraLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
TORCH = TorchKernels()


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
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "parts", "window"),
    [(2, 2, 32, 1, None), (6, 2, 10, 4, None), (3, 1, 10, 2, 40), (8, 2, 64, 2, 5), (7, 1, 128, 4, None)],
)
def test_attention(
    heads: int, kv_heads: int, head_dim: int, parts: int, window: int | None, dtype: torch.dtype
) -> None:
    longest = 150
    keys, values = (random(4, kv_heads, longest, head_dim, dtype=dtype) for _ in range(2))
    q, lengths = random(2, heads, head_dim, dtype=dtype), ints(longest, 67)
    expected = TORCH.decode_attention(q.float(), keys.float(), values.float(), 1, lengths, window)
    assert_near(kernels(parts * 2 * kv_heads).decode_attention(q, keys, values, 1, lengths, window), expected, dtype)


@pytest.mark.parametrize("parts", [1, 2])
def test_attention_reads_no_more_than_a_text_of_the_slot_that_each_row_names(parts: int) -> None:
    lengths, slots = ints(1, 0, 16, 17), ints(3, -1, 0, 1)
    keys, values = (torch.full((4, 2, 17, 16), torch.nan, device=DEVICE) for _ in range(2))
    q = random(4, 4, 16)
    found = []
    for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
        if length:
            keys[slot, :, :length], values[slot, :, :length] = random(2, length, 16), random(2, length, 16)
    for row in (0, 2, 3):
        text = slice(row, row + 1)
        found.append(TORCH.decode_attention(q[text], keys, values, int(slots[row]), lengths[text], None))
    mixed = kernels(parts * 8).attend(q, keys, values, slots, lengths, None)
    assert not mixed[1].any()
    assert_near(mixed[[0, 2, 3]], torch.cat(found), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 10), (2, 2, 32), (7, 1, 128)])
def test_rotation_and_storage(heads: int, kv_heads: int, head_dim: int, normalised: bool, dtype: torch.dtype) -> None:
    qkv = random(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions, slots = ints(0, 8, 3), ints(2, 0, 1)
    angles = random(9, head_dim // 2).repeat(1, 2)
    norms = (random(head_dim, dtype=dtype), random(head_dim, dtype=dtype)) if normalised else None
    arguments = (qkv, positions, slots, (angles.cos(), angles.sin()), norms, 1e-6)
    buffers = [random(4, kv_heads, 9, head_dim, dtype=dtype) for _ in range(2)]
    expected_buffers = [buffer.clone() for buffer in buffers]
    expected = TORCH.rotate_and_store(*arguments, *expected_buffers)
    assert_near(kernels().rotate_and_store(*arguments, *buffers), expected, dtype)
    for buffer, expected_buffer in zip(buffers, expected_buffers, strict=True):
        assert_near(buffer, expected_buffer, dtype)
        assert torch.equal(buffer[3], expected_buffer[3])


def test_rows_of_no_slot_store_nothing() -> None:
    buffers = [random(2, 1, 4, 16) for _ in range(2)]
    before = [buffer.clone() for buffer in buffers]
    angles = random(4, 16)
    rotation = angles.cos(), angles.sin()
    kernels().rotate_and_store(random(2, 48), ints(0, 3), ints(-1, -1), rotation, None, 1e-6, *buffers)
    assert all(map(torch.equal, buffers, before))


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_moves(dtype: torch.dtype) -> None:
    keys, values = (random(2, 5, 2, 70, 64, dtype=dtype) for _ in range(2))
    expected = keys.clone(), values.clone()
    moves = [(0, 3, 70), (4, 1, 2), (2, 2, 0)]
    TORCH.move(*expected, moves)
    kernels().move(keys, values, moves)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])
    kernels().move(keys, values, [(0, 1, 0)])
    assert torch.equal(keys, expected[0])


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("window", [None, 4])
def test_prefill_attention(start: int, window: int | None) -> None:
    keys, values = (random(2, 2, 20, 16) for _ in range(2))
    q = random(9, 6, 16)
    found = kernels().prefill_attention(q, keys, values, 1, start, window)
    assert_near(found, TORCH.prefill_attention(q, keys, values, 1, start, window), torch.float32)


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
