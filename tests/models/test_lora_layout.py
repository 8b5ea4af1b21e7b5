"""A blob has a place for every matrix, and no two share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.models.decoder_shape import DecoderShape, Rope
from pliant.models.lora_layout import ALIGNED_VALUES, MODULES, SITES, LoraLayout, module_size

SHAPE = DecoderShape(
    layers=3,
    hidden=48,
    heads=6,
    kv_heads=2,
    head_dim=10,
    intermediate=81,
    vocab=97,
    norm_eps=1e-6,
    max_length=96,
    rope=Rope(1e4),
    qk_norm=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    tied=False,
    windows=(None,) * 3,
    eos=(),
)


@given(st.lists(st.integers(0, 300), min_size=7, max_size=7))
def test_matrices_lie_apart_and_aligned(ranks: list[int]) -> None:
    layout = LoraLayout(SHAPE, ranks)
    taken = []
    for name, site in layout.sites.items():
        taken.append((site.a, site.rank * site.inputs))
        columns = 0
        for index, module in zip(SITES[name], site.modules, strict=True):
            assert (site.inputs, module.out) == module_size(SHAPE, index)
            assert (module.rank, module.first) == (ranks[index], columns)
            taken.append((module.b, module.rank * module.out))
            columns += module.out
    end = 0
    for start, size in sorted(taken):
        assert start % ALIGNED_VALUES == 0
        assert end <= start < end + ALIGNED_VALUES
        end = start + size
    assert end <= layout.block < end + ALIGNED_VALUES
    assert layout.values == SHAPE.layers * layout.block


def test_sites_have_the_sizes_of_the_fused_layers() -> None:
    sites = LoraLayout(SHAPE, [1] * 7).sites
    outs = {name: sum(module.out for module in site.modules) for name, site in sites.items()}
    assert outs == {"qkv": SHAPE.qkv, "output": 48, "gate_up": 162, "down": 48}
    assert {name: site.inputs for name, site in sites.items()} == {"qkv": 48, "output": 60, "gate_up": 48, "down": 81}
    assert sorted(sum(SITES.values(), ())) == list(range(len(MODULES)))


@pytest.mark.parametrize("ranks", [[8], [8] * 8, [-1] + [8] * 6])
def test_there_is_one_rank_for_each_module(ranks: list[int]) -> None:
    with pytest.raises(ValueError, match="a rank of 0 or more for each of q_proj"):
        LoraLayout(SHAPE, ranks)
