"""Candidates that send long texts to the last level at once: against plain loops, and what a gate may not do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from support.cascade_tables import Rereader, plain, profiles, true_labels

from pliant.policies.cascade.calibration import Integers
from pliant.policies.cascade.candidates import GATES, Candidate, find_candidates, front
from pliant.policies.cascade.choice import NoCandidateError, choose
from pliant.policies.cascade.tables import LevelProfile, Reading

seeds = st.integers(0, 2**32 - 1)


def lengthy(seed: int, texts: int) -> tuple[list[LevelProfile], Integers, Integers]:
    """Levels that take longer for longer texts, with the true classes and the lengths."""
    labels = true_labels(seed, texts)
    tokens = np.random.default_rng(seed).integers(4, 40, texts)
    levels = [
        replace(level, reading=Reading(level.reading.probabilities, level.reading.latency_s.mean() * tokens / 20))
        for level in profiles(labels, seed)
    ]
    return levels, labels, tokens


def ungated(one: Candidate, found: list[Candidate]) -> Candidate:
    """The same without the gate."""

    def way(of: Candidate) -> tuple[object, ...]:
        return of.levels, of.cutoffs, of.alphas, of.slope

    [same] = [other for other in found if other.gate is None and way(other) == way(one)]
    return same


def within_the_last_ones_tail(one: Candidate, levels: list[LevelProfile], tokens: Integers) -> set[int]:
    """The longest text that is no longer than any that all levels together, whole, take too long for."""
    took = {level.name: level.reading.latency_s for level in levels}
    handed_s = sum(level.handed_s for level in levels if level.name in one.levels[1:])
    most = sorted(took[one.levels[-1]])[-1]  # of 40 texts
    pruned = [1.0 if not alpha else 0.8 for alpha in (0.0, *one.alphas)]
    ways = [
        (length, handed_s + sum(took[name][text] * share for name, share in zip(one.levels, pruned, strict=True)))
        for text, length in enumerate(tokens.tolist())
    ]
    too_long = min((length for length, seconds in ways if seconds > most), default=0)
    return set(sorted(length for length, _ in ways if length < too_long)[-1:])


@settings(max_examples=12)
@given(seed=seeds)
def test_every_gate_does_what_a_plain_loop_does_and_those_that_shorten_the_tail_are_kept(seed: int) -> None:
    levels, labels, tokens = lengthy(seed, 40)
    reread = Rereader(labels, levels)
    bare = find_candidates(levels, labels, reread, cutoffs=(0.9, 0.6, 0.3))
    found = find_candidates(levels, labels, reread, tokens, cutoffs=(0.9, 0.6, 0.3))
    assert [one for one in found if one.gate is None] == bare
    gated = {(one.levels, one.cutoffs, one.alphas, one.slope, one.gate): one for one in found if one.gate is not None}
    lengths = {sorted(tokens)[int(np.ceil(share * 40)) - 1] for share in GATES}
    for one in front(bare):
        before_s = plain(one, levels, labels, tokens, reread)["p99_latency_s"]
        for gate in lengths | within_the_last_ones_tail(one, levels, tokens) if one.cutoffs else ():
            same = replace(one, gate=int(gate))
            done = plain(same, levels, labels, tokens, reread)
            kept = gated.pop((one.levels, one.cutoffs, one.alphas, one.slope, int(gate)), None)
            assert (kept is not None) == (done["p99_latency_s"] < before_s)
            if kept:
                for field, value in done.items():
                    assert getattr(kept, field) == pytest.approx(value, abs=1e-6), (field, kept)
                assert kept.gated_share == pytest.approx((tokens > gate).mean())
                assert sum(kept.shares) == pytest.approx(1)
                assert kept.reached[0] == pytest.approx(1 - kept.gated_share)
                assert kept.reached[-1] == pytest.approx(kept.shares[-1] - kept.gated_share)
    assert not gated


@settings(max_examples=20)
@given(seed=seeds, loss=st.sampled_from((0.02, 0.05, 0.1, 0.3)), slo_ms=st.floats(4, 30))
def test_a_choice_with_gates_is_no_slower_and_its_gate_shortens_the_tail(seed: int, loss: float, slo_ms: float) -> None:
    levels, labels, tokens = lengthy(seed, 300)
    found = find_candidates(levels, labels, tokens=tokens, cutoffs=(0.9, 0.6, 0.3))
    without = [one for one in found if one.gate is None]
    try:
        chosen = choose(found, accuracy_loss=loss, slo_ms=slo_ms)
    except NoCandidateError:
        with pytest.raises(NoCandidateError):
            choose(without, accuracy_loss=loss, slo_ms=slo_ms)
        return
    if chosen.gate is None:
        assert chosen == choose(without, accuracy_loss=loss, slo_ms=slo_ms)
        return
    assert chosen.p99_latency_s < ungated(chosen, found).p99_latency_s
    try:
        before = choose(without, accuracy_loss=loss, slo_ms=slo_ms)
    except NoCandidateError:
        return
    assert (chosen.mean_latency_s, -chosen.accuracy) < (before.mean_latency_s, -before.accuracy)


def test_short_texts_keep_the_gain_where_the_tail_may_be_no_longer_than_the_large_models() -> None:
    """The small level is right of short texts, and unsure of long ones."""
    texts = 1000
    labels = np.zeros(texts, np.int64)
    tokens = np.arange(texts) % 100 + 1
    unsure = tokens > 90
    said = np.where(unsure[:, None], [0.4, 0.6], [0.999, 0.001])
    small = LevelProfile("small", 1.0, Reading(said, 1e-5 * tokens))
    large = LevelProfile("large", 1.0, Reading(np.tile([0.99, 0.01], (texts, 1)), 1e-4 * tokens))
    found = find_candidates([small, large], labels, tokens=tokens)
    slo_ms = 1e3 * 1e-4 * 99
    alone = choose([one for one in found if one.gate is None], accuracy_loss=0.01, slo_ms=slo_ms)
    chosen = choose(found, accuracy_loss=0.01, slo_ms=slo_ms)
    assert (alone.levels, chosen.levels) == (("large",), ("small", "large"))
    assert chosen.gate == 90
    assert str(chosen) == "small → large (over 90 tokens: large)"
    assert chosen.mean_latency_s < 0.4 * alone.mean_latency_s
    assert chosen.shares == pytest.approx((0.9, 0.1), abs=0.02)
    assert choose(found, accuracy_loss=0.01).p99_latency_s <= ungated(chosen, found).p99_latency_s


def test_a_gate_lies_where_two_models_take_as_long_as_the_last_ones_tail() -> None:
    """Of 1,000 texts 1% have more than 150 tokens; the last level takes 1 ms of each, the first 0.19."""
    tokens = np.append(np.linspace(1, 150, 990).round().astype(int), np.full(10, 200))
    labels, unsure = np.zeros(1000, np.int64), np.arange(1000) % 2
    said = np.where(unsure[:, None], [0.4, 0.6], [0.999, 0.001])
    small = LevelProfile("small", 1.0, Reading(said, 1.9e-4 * tokens))
    large = LevelProfile("large", 1.0, Reading(np.tile([0.99, 0.01], (1000, 1)), 1e-3 * tokens))
    assert 126 in {one.gate for one in find_candidates([small, large], labels, tokens=tokens)}


def test_texts_of_one_length_and_levels_of_one_model_get_no_gate() -> None:
    levels, labels, tokens = lengthy(1, 100)
    assert find_candidates(levels, labels, tokens=np.full(100, 7)) == find_candidates(levels, labels)
    exits = [replace(level, encoder="one", whole=level.name == "large") for level in levels]
    assert find_candidates(exits, labels, tokens=tokens) == find_candidates(exits, labels)


def test_a_tie_goes_to_no_gate() -> None:
    levels, labels, tokens = lengthy(2, 100)
    found = find_candidates(levels, labels, tokens=tokens)
    gated = next(one for one in found if one.gate is not None)
    same = replace(gated, gate=None, gated_share=0.0)
    for order in ([gated, same], [same, gated]):
        assert choose(order, accuracy_loss=0.9) is same


def test_candidates_kept_before_there_were_gates_have_none() -> None:
    levels, labels, tokens = lengthy(3, 100)
    table = TypeAdapter(list[Candidate])
    found = find_candidates(levels, labels, tokens=tokens)
    assert table.validate_json(table.dump_json(found)) == found
    old = table.dump_python(found, exclude={"__all__": {"gate", "gated_share"}})
    assert {(one.gate, one.gated_share) for one in table.validate_python(old)} == {(None, 0.0)}


@pytest.mark.parametrize("tokens", [np.ones(99, int), np.ones(100)])
def test_lengths_are_those_of_the_texts(tokens: np.ndarray) -> None:
    levels, labels, _ = lengthy(4, 100)
    with pytest.raises(ValueError, match="needs the length of each text"):
        find_candidates(levels, labels, tokens=tokens)
