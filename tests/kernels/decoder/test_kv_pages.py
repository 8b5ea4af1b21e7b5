"""Keys and values take the memory that arithmetic says, or are refused with it; moves bring them along whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pliant.kernels import c_compiler
from pliant.kernels.decoder.cpu_kernels import CpuKernels
from pliant.kernels.decoder.kernels import DecoderKernels, TorchKernels
from pliant.kernels.decoder.kv_pages import (
    PAGE,
    KVMemoryError,
    KVPages,
    allowed_bytes,
    bytes_needed,
    fit,
)
from pliant.kernels.decoder.ragged import Span, ragged
from pliant.models.decoder_shape import DecoderShape, Rope

GIB = 2**30
CPU = torch.device("cpu")


def shape(max_length: int = 8192, layers: int = 24) -> DecoderShape:
    """With float32 keys and values of 96 KiB a token, unless it has other layers."""
    return DecoderShape(
        layers=layers,
        hidden=512,
        heads=8,
        kv_heads=8,
        head_dim=64,
        intermediate=1024,
        vocab=100,
        norm_eps=1e-6,
        max_length=max_length,
        rope=Rope(1e4),
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tied=True,
        windows=(None,) * layers,
        eos=(),
    )


def kernels(compiled: bool) -> DecoderKernels:
    if not compiled:
        return TorchKernels()
    if c_compiler.compiler() is None:
        pytest.skip("no C compiler")
    return CpuKernels(2)


def test_the_arithmetic_is_told() -> None:
    with pytest.raises(KVMemoryError) as refused:
        KVPages(shape(), 32, 2048, torch.float32, CPU, TorchKernels(), budget_bytes=GIB // 8)
    assert str(refused.value) == (
        "keys and values do not fit: a text of 2,048 tokens x 96 KiB, with a page for what pads batches = 198.0 MiB, "
        "but 128.0 MiB are allowed (memory_mb, or what is free): use max_length 1,280, or more memory_mb"
    )
    assert fit(shape(), 32, 1280, torch.float32, GIB // 8) == (32, 1280)
    with pytest.raises(KVMemoryError):
        fit(shape(), 32, 1281, torch.float32, GIB // 8)


def test_only_remedies_that_help_are_told() -> None:
    with pytest.raises(KVMemoryError, match=r"50 bytes are allowed .*: use memory_mb 198$"):
        fit(shape(), 32, 2048, torch.float32, 50)


def test_there_may_be_fewer_pages_than_slots_could_fill() -> None:
    page = bytes_needed(shape(layers=1), 1, 1, torch.float32) // 2
    held = KVPages(shape(layers=1), 8, 3 * PAGE, torch.float32, CPU, TorchKernels(), budget_bytes=10 * page + 100)
    assert (held.pages, held.arena.nbytes) == (10, 10 * page)


def test_needs_are_what_is_allocated() -> None:
    held = KVPages(shape(layers=2), 3, 40, torch.bfloat16, CPU, TorchKernels())
    assert held.keys.shape == held.values.shape == (2, 3 + 1, 8, PAGE, 64)
    assert held.keys.nbytes + held.values.nbytes == bytes_needed(shape(layers=2), 3, 40, torch.bfloat16)
    assert held.arena.nbytes == bytes_needed(shape(layers=2), 3, 40, torch.bfloat16)


def test_a_page_is_one_run_of_the_arena() -> None:
    held = KVPages(shape(layers=2), 2, 7, torch.bfloat16, CPU, TorchKernels())
    assert held.page_bytes == bytes_needed(shape(layers=2), 2, 7, torch.bfloat16) // 3 == 2 * held.page_values
    held.arena.copy_(torch.arange(len(held.arena)) // held.page_values)
    for buffer in (held.keys, held.values):
        for page in range(3):
            assert (buffer[:, page] == page).all()
    held.arena.zero_()
    held.keys[1].fill_(1)
    held.layer(0)[1].fill_(2)
    whole = held.arena.view(3, 2, 2, 8, PAGE, 64)
    assert [int(whole[2, layer, kind, 0, 0, 0]) for layer, kind in ((0, 0), (0, 1), (1, 0), (1, 1))] == [0, 2, 1, 0]
    assert held.layer(1)[0][0].is_contiguous()


def test_an_arena_may_be_larger_than_its_texts() -> None:
    needed = bytes_needed(shape(layers=1), 2, 3, torch.float32)
    for arena_bytes, expected in ((None, needed), (1, needed), (needed + 1, needed + 64), (2 * needed, 2 * needed)):
        held = KVPages(shape(layers=1), 2, 3, torch.float32, CPU, TorchKernels(), arena_bytes=arena_bytes)
        assert held.arena.nbytes == expected
        assert not held.arena.any()
    with pytest.raises(KVMemoryError, match=r"shall share 2\.0 GiB, but 1\.0 GiB are allowed"):
        KVPages(shape(), 1, 8, torch.float32, CPU, TorchKernels(), budget_bytes=GIB, arena_bytes=2 * GIB)


@pytest.mark.parametrize(
    ("slots", "max_length", "gib", "chosen"),
    [
        (None, None, 1000, (32, 8192)),  # all there is
        (None, None, 12, (32, 8192)),
        (None, None, 3, (32, 8128)),  # four texts at a time
        (None, None, 0.05, (32, 128)),
        (None, 8192, 12, (32, 8192)),
        (1, None, 0.5, (1, 5376)),
        (100, None, 12, (100, 8192)),
        (3, 77, 12, (3, 77)),
    ],
)
def test_what_is_open_is_chosen(slots: int | None, max_length: int | None, gib: float, chosen: tuple[int, int]) -> None:
    assert fit(shape(), slots, max_length, torch.float32, int(gib * GIB)) == chosen


def test_a_short_model_is_used_whole() -> None:
    assert fit(shape(max_length=100), None, None, torch.float32, 12 * GIB) == (32, 100)


def test_what_no_slot_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length must be 1 to 8,192, the model's own, got 8,193 tokens"):
        fit(shape(), None, 8193, torch.float32, 1000 * GIB)
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        fit(shape(), 0, None, torch.float32, 1000 * GIB)
    with pytest.raises(KVMemoryError, match=r"a text of 128 tokens .* = 18.0 MiB, but 1.0 MiB"):
        fit(shape(), 32, None, torch.float32, 2**20)


def test_no_more_is_allowed_than_is_free() -> None:
    assert allowed_bytes(CPU, 2**20) == 2**20
    assert 0 < allowed_bytes(CPU, None) < allowed_bytes(CPU, 2**60) < 2**60
    assert allowed_bytes(CPU, 2**20, reserved=2**60) == allowed_bytes(CPU, None, reserved=2**60) == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_moves_copy_pages_of_every_layer(compiled: bool) -> None:
    held = KVPages(shape(layers=2), 4, PAGE, torch.float32, CPU, kernels(compiled))
    for buffer in (held.keys, held.values):
        buffer.normal_()
    before = held.keys.clone(), held.values.clone()
    held.move([(4, 1), (3, 0)])
    held.move([])
    for after, was in zip((held.keys, held.values), before, strict=True):
        assert after[:, [1, 0]].equal(was[:, [4, 3]])
        assert after[:, 2:].equal(was[:, 2:])
    assert held.layer(1)[0].data_ptr() == held.keys[1].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_kernels_find_pages_that_lie_apart(compiled: bool, dtype: torch.dtype) -> None:
    """They do in the arena what they do in tensors of one layer alone."""
    ours = kernels(compiled)
    held = KVPages(shape(layers=3), 4, PAGE, dtype, CPU, ours)
    held.arena.normal_()
    apart = held.layer(1)
    alone = apart[0].contiguous(), apart[1].contiguous()
    elsewhere = held.keys[[0, 2]], held.values[[0, 2]]

    tables = np.array([[1, 4], [2, 0]], np.int32)
    batch = ragged(np.array([70, 0], np.int32), tables, [(Span(2, 3), np.array([3], np.int32))], PAGE, CPU)
    angles, qkv = torch.randn(80, 32).repeat(1, 2), torch.randn(5, 24 * 64).to(dtype)
    places = batch.positions, batch.pages, (angles.cos(), angles.sin()), None, 1e-6
    q, same_q = (ours.rotate_and_store(qkv, *places, *buffers).clone() for buffers in (apart, alone))
    assert q.equal(same_q)
    assert all(map(torch.equal, apart, alone))

    found, expected = (ours.attention(q, *buffers, batch, None).clone() for buffers in (apart, alone))
    torch.testing.assert_close(found, expected)
    assert elsewhere[0].equal(held.keys[[0, 2]])
    assert elsewhere[1].equal(held.values[[0, 2]])
