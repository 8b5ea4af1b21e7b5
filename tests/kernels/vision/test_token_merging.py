"""Token merging against its definition, written out token by token, and by its properties."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slow_vit import merge_sample
from torch import Tensor

from pliant.kernels.vision.token_merging import log_sizes, match, merge, merges, token_counts


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads cost more than they bring for tensors so small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tokens(seed: int, samples: int, count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, keys and sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, count, width, generator=generator)
    keys = torch.randn(samples, count, 5, generator=generator)
    return x, keys, torch.randint(1, 6, (samples, count), generator=generator).float()


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Tensor, Tensor, Tensor], int, int]:
    count = draw(st.integers(2, 24))
    prefix = draw(st.integers(0, min(5, count - 2)))
    r = draw(st.integers(0, merges(count, prefix, count)))
    return tokens(draw(st.integers(0, 10_000)), draw(st.integers(1, 3)), count, draw(st.integers(1, 4))), prefix, r


@settings(max_examples=30)
@given(cases())
def test_merges_as_defined(case) -> None:
    (x, keys, sizes), prefix, r = case
    merged, after = merge(x, sizes, match(keys, prefix, r))
    for sample in range(len(x)):
        expected, expected_sizes = merge_sample(x[sample], keys[sample], sizes[sample], prefix, r)
        torch.testing.assert_close(merged[sample], expected)
        torch.testing.assert_close(after[sample], expected_sizes)


@settings(max_examples=30)
@given(cases())
def test_keeps_mass_prefix_and_what_is_not_merged(case) -> None:
    (x, keys, sizes), prefix, r = case
    matching = match(keys, prefix, r)
    merged, after = merge(x, sizes, matching)
    assert merged.shape[1] == after.shape[1] == x.shape[1] - r
    torch.testing.assert_close((merged * after[..., None]).sum(1), (x * sizes[..., None]).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.sum(1), sizes.sum(1))
    assert torch.equal(merged[:, :prefix], x[:, :prefix])
    assert torch.equal(after[:, :prefix], sizes[:, :prefix])
    for sample in range(len(x)):
        kept, gone = matching.kept[sample].tolist(), matching.merged[sample].tolist()
        assert sorted(kept + gone) == list(range(x.shape[1]))
        alone = sorted(set(range(len(kept))) - set(matching.into[sample].tolist()))
        assert torch.equal(merged[sample, alone], x[sample, matching.kept[sample, alone]])


@settings(max_examples=20)
@given(cases(), st.integers(0, 10_000))
def test_does_not_depend_on_the_order_within_a_side(case, seed) -> None:
    (x, keys, sizes), prefix, r = case
    rng = np.random.default_rng(seed)
    order = np.arange(x.shape[1])
    for first in (prefix, prefix + 1):
        order[first::2] = rng.permutation(order[first::2])

    def merged(order: np.ndarray) -> list[list[tuple[float, ...]]]:
        found, after = merge(x[:, order], sizes[:, order], match(keys[:, order], prefix, r))
        rows = torch.cat([found, after[..., None]], 2).round(decimals=3) + 0.0
        return [sorted(map(tuple, sample.tolist())) for sample in rows]

    np.testing.assert_allclose(merged(order), merged(np.arange(x.shape[1])), atol=2e-3)


def test_nothing_to_merge_changes_nothing() -> None:
    x, keys, sizes = tokens(0, 2, 9, 3)
    matching = match(keys, 1, 0)
    merged, after = merge(x, sizes, matching)
    values = {tuple(row) for row in x[0].tolist()}
    assert {tuple(row) for row in merged[0].tolist()} == values
    assert after.sum() == sizes.sum()
    assert merges(9, 1, 0) == 0


def test_of_equal_pairs_the_first_goes() -> None:
    keys = torch.ones(1, 9, 4)
    assert match(keys, 1, 2).merged.tolist() == [[2, 4]]


def test_keys_of_zeros_merge_into_something_finite() -> None:
    x, _, sizes = tokens(0, 2, 9, 3)
    merged, _ = merge(x, sizes, match(torch.zeros(2, 9, 4), 1, 4))
    assert merged.isfinite().all()


def test_bfloat16_tokens_stay_bfloat16_and_sizes_exact() -> None:
    x, keys, sizes = tokens(1, 2, 12, 3)
    matching = match(keys, 2, 5)
    merged, after = merge(x.bfloat16(), 257 * sizes, matching)
    assert (merged.dtype, after.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(after.sum(1), 257 * sizes.sum(1))
    torch.testing.assert_close(merged.float(), merge(x, sizes, matching)[0], rtol=0.02, atol=0.02)


def test_log_sizes_make_a_token_count_as_often_as_it_has_patches() -> None:
    scores, values, sizes = torch.tensor([0.3, -1.0]), torch.tensor([2.0, 5.0]), torch.tensor([[3.0, 1.0]])
    bias = log_sizes(sizes, torch.float32)
    assert bias.shape == (1, 1, 1, 2)
    weighted = (scores + bias[0, 0, 0]).softmax(0) @ values
    side_by_side = scores[[0, 0, 0, 1]].softmax(0) @ values[[0, 0, 0, 1]]
    torch.testing.assert_close(weighted, side_by_side)


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ((197, 1, 12, 0), [197] * 12),
        ((197, 1, 3, 8), [205] * 3),
        ((197, 1, 12, -20), [197, 177, 157, 137, 117, 97, 77, 57, 37, 19, 10, 6]),
        ((6, 1, 4, -9), [6, 4, 3, 2]),
        ((5, 4, 3, -1), [5, 5, 5]),
        ((64, 0, 4, -20), [64, 44, 24, 12]),
    ],
)
def test_counts_tokens_by_layer(arguments, counts) -> None:
    assert token_counts(*arguments) == counts
