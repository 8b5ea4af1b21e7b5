"""What the adapters' benchmark promises of its workloads: popularity, arrivals, lengths, and predictions that err."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.caches import with_libraries

from pliant.bench.adapters.folders import MODULES as ADAPTED
from pliant.bench.adapters.folders import folders
from pliant.bench.adapters.workload import LONGEST_PROMPT, RANKS, Lengths, conversations, poisson, population
from pliant.bench.llm import checkpoints
from pliant.formats.adapter_info import read_adapter
from pliant.kernels.decoder.executor import load
from pliant.models.lora_layout import MODULES

ALIKE = Lengths(np.array([100]), np.array([10]))


def test_each_rank_has_as_many_adapters_and_smaller_ranks_are_asked_for_more() -> None:
    adapters = population(100)
    assert Counter(adapters.ranks) == dict.fromkeys(RANKS, 20)
    shares = np.array([adapters.shares[np.array(adapters.ranks) == rank].sum() for rank in RANKS])
    np.testing.assert_allclose(shares * np.arange(1, 6), shares[0])
    assert adapters.shares.sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="12 adapters"):
        population(12)


def test_requests_are_drawn_by_popularity() -> None:
    adapters = population(10)
    requests = poisson(100.0, 300.0, ALIKE, adapters, seed=0)
    counts = np.bincount([request.adapter for request in requests], minlength=10) / len(requests)
    np.testing.assert_allclose(counts, adapters.shares, atol=0.01)


def test_arrivals_are_poisson_and_the_same_requests_come_at_another_pace() -> None:
    slow, fast = (poisson(rate, 2000 / rate, ALIKE, population(5), seed=3) for rate in (2.0, 8.0))
    assert [request[1:] for request in slow] == [request[1:] for request in fast]
    np.testing.assert_allclose([request.at_s / 4 for request in slow], [request.at_s for request in fast])
    gaps = np.diff([request.at_s for request in slow])
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)


def test_lengths_without_data_are_heavy_tailed_as_the_trace_is() -> None:
    lengths = conversations(None)
    assert np.median(lengths.prompts) == pytest.approx(1020, rel=0.05)
    assert np.quantile(lengths.prompts, 0.1) == pytest.approx(207, rel=0.1)
    assert lengths.prompts.max() == LONGEST_PROMPT
    assert np.median(lengths.outputs) == pytest.approx(129, rel=0.05)
    assert np.quantile(lengths.outputs, 0.99) == pytest.approx(601, rel=0.1)
    quarter = lengths.scaled(0.25)
    assert quarter.prompts.mean() == pytest.approx(lengths.prompts.mean() / 4, rel=0.01)
    assert lengths.scaled(1e-6).outputs.tolist() == [1] * len(lengths.outputs)


def test_adapters_of_random_weights_are_what_a_decoder_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(with_libraries(tmp_path)))
    size = checkpoints.Size("tiny", hidden=64, layers=2, heads=2, intermediate=96, vocab=300)
    shape = load(checkpoints.checkpoint(size, "float32"), 1, 16).shape
    adapters = [read_adapter(folder, shape) for folder in folders(size, (8, 64), "float32")]
    assert [adapter.ref("x").rank for adapter in adapters] == [8, 64]
    assert [module for module, rank in zip(MODULES, adapters[0].ranks, strict=True) if rank] == list(ADAPTED)
