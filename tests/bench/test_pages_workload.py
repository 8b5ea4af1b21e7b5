"""What the benchmark of pages promises of its workloads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pliant.bench.adapters.workload import Lengths, population
from pliant.bench.pages.workload import MOONCAKE, apart, conversations, shared_prefixes, singles

LENGTHS = Lengths(np.array([100, 200]), np.array([10, 30]))


def test_single_requests_share_nothing_and_come_at_any_pace() -> None:
    slow, fast = (singles(rate, 100 / rate, LENGTHS, seed=1) for rate in (2.0, 8.0))
    assert [turn[1:] for turn in slow] == [turn[1:] for turn in fast]
    np.testing.assert_allclose([turn.at_s / 4 for turn in slow], [turn.at_s for turn in fast])
    assert not set(slow[0].prompt).intersection(*(turn.prompt for turn in slow[1:]))


def test_a_turn_says_again_what_was_said_and_answered() -> None:
    turns, number = conversations(2.0, 200.0, LENGTHS, 4.0, seed=0, adapters=population(10))
    assert [turn.at_s for turn in turns] == sorted(turn.at_s for turn in turns)
    assert (number > 0).mean() > 0.5
    by_start = {turn.prompt[0]: turn for turn, at in zip(turns, number, strict=True) if at == 0}
    for turn, at in zip(turns, number, strict=True):
        first = by_start[turn.prompt[0]]
        assert turn.adapter == first.adapter
        if at:
            before = [*first.prompt, *first.answer]
            assert list(turn.prompt[: len(before)]) == before
            assert turn.at_s > first.at_s


def test_the_trace_shares_what_its_ids_say(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 4000, "input_length": 1030, "output_length": 64, "hash_ids": [1, 2, 3]},
        {"timestamp": 1000, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]},
    ]
    path = tmp_path / MOONCAKE
    path.parent.mkdir()
    path.write_text("\n".join(json.dumps(row) for row in rows))
    first, second = shared_prefixes(tmp_path, 32, pace=2.0)
    assert (first.at_s, second.at_s) == (0.5, 2.0)
    assert (len(first.prompt), len(second.prompt), len(first.answer), len(second.answer)) == (32, 32, 1, 2)
    assert list(first.prompt) == list(second.prompt)
    assert [turn.tenant for turn in apart([first, second])] == [0, 1]
    with pytest.raises(SystemExit, match="holds no mooncake"):
        shared_prefixes(tmp_path / "nowhere", 32, pace=1.0)
