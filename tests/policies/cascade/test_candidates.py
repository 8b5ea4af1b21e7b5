"""Candidates over small tables, against loops that follow the paper word for word (Tabi §5)."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from support.cascade_tables import Rereader, logits, plain, profiles, true_labels

from pliant.policies.cascade.candidates import (
    ALPHAS,
    CUTOFFS,
    ROUNDING,
    Candidate,
    find_candidates,
    front,
    weighted_quantile,
)
from pliant.policies.cascade.cascade import draws, reroute_probability
from pliant.policies.cascade.choice import choose
from pliant.policies.cascade.tables import LevelProfile, Reading
from pliant.policies.encoder.confidence import softmax

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=15)
@given(seed=seeds)
def test_every_candidate_does_what_a_plain_loop_does(seed: int) -> None:
    labels = true_labels(seed, 40)
    levels = profiles(labels, seed)
    found = find_candidates(levels, labels, cutoffs=(0.9, 0.6, 0.3))
    for candidate in found[:: max(1, len(found) // 6)]:
        for field, value in plain(candidate, levels, labels).items():
            assert getattr(candidate, field) == pytest.approx(value, abs=1e-6), (field, candidate)
        assert sum(candidate.shares) == pytest.approx(1)
        assert candidate.early_share <= 1
        best = max(float((level.reading.probabilities.argmax(1) == labels).mean()) for level in levels)
        assert candidate.loss == pytest.approx(best - candidate.accuracy)


@settings(max_examples=4)
@example(seed=5)
@example(seed=15)
@example(seed=11199)
@given(seed=seeds)
def test_what_is_found_is_what_the_paper_enumerates_and_cutoffs_of_later_levels_and_near_the_front(seed: int) -> None:
    labels = true_labels(seed, 40)
    levels = profiles(labels, seed)
    accuracy = {level.name: float((level.reading.probabilities.argmax(1) == labels).mean()) for level in levels}
    time = {level.name: float(level.reading.latency_s.mean()) for level in levels}
    rising = sorted(levels, key=lambda level: (accuracy[level.name], time[level.name]))
    found = find_candidates(levels, labels)
    expected: set[tuple[tuple[str, ...], tuple[float, ...], float]] = {((level.name,), (), 10.0) for level in levels}
    limits: dict[tuple[str, ...], tuple[float, float]] = {}

    def sweep(names: tuple[str, ...], second: float | None) -> None:
        least, most_s = limits[names]
        for slope in (10.0, 40.0):
            for cutoff in np.arange(95, 4, -5) / 100:
                cutoffs = (float(cutoff), *[float(cutoff if second is None else second)] * (len(names) - 2))
                bare = Candidate(names, cutoffs, (), (), (), slope, 0, 0, 0, 0, 0, 0, 0, (), 0)
                done = plain(bare, levels, labels)
                if done["accuracy"] < least:
                    break
                if done["p75_latency_s"] <= most_s:
                    expected.add((names, cutoffs, slope))

    for picked in product((False, True), repeat=3):
        chain = [level for level, taken in zip(rising, picked, strict=True) if taken]
        if len(chain) < 2:
            continue
        names = tuple(level.name for level in chain)
        average = sum(accuracy[name] for name in names) / len(names)
        slowest = max(chain, key=lambda level: time[level.name]).reading.latency_s
        most_s = 1.5 * sorted(slowest)[int(np.ceil(0.75 * len(labels))) - 1] + 1e-9
        limits[names] = average - ROUNDING, most_s
        sweep(names, None)
    by_way = {(one.levels, one.cutoffs, one.slope): one for one in found}
    for names in {one.levels for one in front(by_way[way] for way in expected if way in by_way)}:
        if len(names) == 3:
            for second in np.arange(95, 4, -10) / 100:
                sweep(names, float(second))
    for _ in range(2):
        for one in front([by_way[way] for way in by_way if way in expected]):
            for place, step in product(range(len(one.cutoffs)), range(-4, 5)):
                near = (100 * one.cutoffs[place] + step) / 100
                cutoffs = (*one.cutoffs[:place], round(near, 2), *one.cutoffs[place + 1 :])
                if 0 < round(near, 2) < 1:
                    done = plain(replace(one, cutoffs=cutoffs), levels, labels)
                    least, most_s = limits[one.levels]
                    if done["accuracy"] >= least and done["p75_latency_s"] <= most_s:
                        expected.add((one.levels, cutoffs, one.slope))
    assert {(one.levels, one.cutoffs, one.slope) for one in found} == expected
    assert len(found) == len(expected)


@settings(max_examples=8)
@given(seed=seeds)
def test_texts_go_on_between_exits_of_one_encoder_without_being_read_again(seed: int) -> None:
    labels = true_labels(seed, 40)
    exits = {"tiny": ("e", False), "small": ("e", True), "large": ("f", True)}
    levels = [
        replace(one, encoder=encoder, whole=whole)
        for one in profiles(labels, seed)
        for encoder, whole in [exits[one.name]]
    ]
    found = find_candidates(levels, labels, Rereader(labels, levels), cutoffs=(0.9, 0.6, 0.3))
    for candidate in found[:: max(1, len(found) // 8)]:
        if not any(candidate.alphas):
            assert candidate.mean_latency_s == pytest.approx(plain(candidate, levels, labels)["mean_latency_s"])
    assert not any(any(one.alphas) for one in found if "tiny" in one.levels), "exits read no pruned texts"
    assert ("small", "tiny") not in {one.levels[:2] for one in found}, "no text goes back"


def test_chains_are_as_long_as_there_are_levels() -> None:
    labels = true_labels(1, 400)
    levels = profiles(labels, 1, ("large", "tiny", "middle", "small"))
    found = find_candidates(levels, labels)
    assert {len(one.levels) for one in found} == {1, 2, 3, 4}
    for one in [one for one in found if len(one.levels) == 4][::3]:
        for field, value in plain(one, levels, labels).items():
            assert getattr(one, field) == pytest.approx(value, abs=1e-6), (field, one)


def test_the_sweep_is_the_papers() -> None:
    assert CUTOFFS[:3] == (0.95, 0.9, 0.85)
    assert CUTOFFS[-1] == 0.05
    assert ALPHAS[:3] == (0.5, 0.6, 0.7)


@given(seed=seeds)
@settings(max_examples=15)
def test_a_lower_cutoff_answers_more_texts_early_and_sooner(seed: int) -> None:
    labels = true_labels(seed, 80)
    found = find_candidates(profiles(labels, seed, ("small", "large")), labels, slopes=(10.0,))
    chains = sorted((one for one in found if len(one.levels) == 2), key=lambda one: one.cutoffs, reverse=True)
    assert len({one.cutoffs for one in chains}) == len(chains)
    for higher, lower in pairwise(chains):
        assert lower.early_share >= higher.early_share - 1e-12
        assert lower.mean_latency_s <= higher.mean_latency_s + 1e-12


def test_a_cascade_routed_live_does_what_its_candidate_promised() -> None:
    labels = true_labels(5, 4000)
    levels = profiles(labels, 5)
    candidate = next(one for one in find_candidates(levels, labels) if one.levels == ("tiny", "small", "large"))
    cascade = candidate.cascade(seed=3)
    tables = [logits(name, labels, 5) for name in candidate.levels]
    right, stops = 0, [0, 0, 0]
    for text, label in enumerate(labels.tolist()):
        rows = cascade.calibrated([table[text] for table in tables])
        level = next(at for at in range(3) if not cascade.goes_on(f"text {text}", at, rows[at]))
        stops[level] += 1
        right += int(cascade.vote(rows[: level + 1]).argmax()) == label
    assert right / 4000 == pytest.approx(candidate.accuracy, abs=0.01)
    assert np.array(stops) / 4000 == pytest.approx(candidate.shares, abs=0.03)
    sure = softmax(tables[0] / cascade.temperatures[0]).max(axis=1)
    going = draws(3, [f"text {text}" for text in range(4000)], 0) < reroute_probability(
        sure, candidate.cutoffs[0], candidate.slope
    )
    assert stops[0] == 4000 - going.sum()


def test_pruning_is_read_once_per_pair_until_it_hurts_and_only_where_it_may_pay() -> None:
    labels = true_labels(2, 400)
    levels = profiles(labels, 2)
    reread = Rereader(labels, levels, harm=0.1)
    found = find_candidates(levels, labels, reread)
    assert len(reread.calls) == len(set(reread.calls))
    pairs = {call[:2] for call in reread.calls}
    on_front = {one.levels for one in front(find_candidates(levels, labels))}
    assert pairs <= {(reader, pruner) for chain in on_front for pruner, reader in combinations(chain, 2)}
    for reader, pruner in pairs:
        alphas = [call[2] for call in reread.calls if call[:2] == (reader, pruner)]
        assert alphas == list(ALPHAS[: len(alphas)])
        whole = next(level.reading for level in levels if level.name == reader)
        losses = [
            float((whole.probabilities.argmax(1) == labels).mean())
            - float((reread(reader, pruner, alpha).probabilities.argmax(1) == labels).mean())
            for alpha in alphas
        ]
        assert max(losses[:-1], default=0) <= 0.02
        assert losses[-1] > 0.02 or len(alphas) == len(ALPHAS)
        used = {alpha for one in found if one.levels == (pruner, reader) for alpha in one.alphas}
        assert used <= {0.0, *alphas[:-1]}
    pruned = [one for one in found if any(one.alphas)]
    assert pruned
    whole_texts = {(one.levels, one.cutoffs, one.slope): one for one in found if not any(one.alphas)}
    assert any((one.levels, one.cutoffs, one.slope) in whole_texts for one in pruned)
    for one in pruned:
        whole_text = whole_texts.get((one.levels, one.cutoffs, one.slope))
        assert whole_text is None or one.mean_latency_s < whole_text.mean_latency_s
        assert len(one.alphas) == len(one.cutoffs) == len(one.levels) - 1
        first = one.alphas.index(max(one.alphas))
        assert one.alphas == (0.0,) * first + (max(one.alphas),) * (len(one.alphas) - first)
        assert one.pruner == first
    assert {one.pruner for one in pruned if len(one.levels) == 3} == {0, 1}
    for one in pruned[:: max(1, len(pruned) // 12)]:
        for field, value in plain(one, levels, labels, reread=reread).items():
            assert getattr(one, field) == pytest.approx(value, abs=1e-6), (field, one)


def test_the_front_holds_what_none_beats() -> None:
    labels = true_labels(3, 200)
    found = find_candidates(profiles(labels, 3), labels)
    best = front(found)
    for one in found:
        beaten = any(
            other.accuracy >= one.accuracy
            and other.mean_latency_s <= one.mean_latency_s
            and (other.accuracy, other.mean_latency_s) != (one.accuracy, one.mean_latency_s)
            for other in found
        )
        assert beaten != any(
            (other.accuracy, other.mean_latency_s) == (one.accuracy, one.mean_latency_s) for other in best
        )


def test_the_error_of_a_loss_is_that_of_the_same_texts() -> None:
    labels = true_labels(4, 500)
    found = find_candidates(profiles(labels, 4), labels)
    best = max((one for one in found if len(one.levels) == 1), key=lambda one: one.accuracy)
    assert best.loss == best.loss_error == best.early_share == 0
    assert best.accuracy_error == pytest.approx((best.accuracy * (1 - best.accuracy) / 500) ** 0.5, rel=0.05)
    assert sum(one.loss_error == 0 for one in found) == 1
    near = max((one for one in found if len(one.levels) == 2), key=lambda one: one.accuracy)
    assert 0 < near.loss_error < near.accuracy_error


def test_candidates_come_back_from_json() -> None:
    labels = true_labels(6, 50)
    found = find_candidates(profiles(labels, 6), labels, cutoffs=(0.9,))
    table = TypeAdapter(list[Candidate])
    assert table.validate_json(table.dump_json(found)) == found
    assert str(found[-1]) == " → ".join(found[-1].levels)


@given(
    values=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=12),
    share=st.floats(0.01, 1),
)
def test_weighted_quantiles_are_those_of_repeated_values(values: list[tuple[int, int]], share: float) -> None:
    repeated = sorted(value for value, times in values for _ in range(times))
    if not repeated:
        return
    rank = max(1, int(np.ceil(share * len(repeated) - 1e-9)))
    numbers, weights = zip(*values, strict=True)
    assert weighted_quantile(numbers, weights, share) == repeated[rank - 1]


def sure(name: str, wrong: slice, seconds: float, texts: int = 200) -> LevelProfile:
    """Says class 0 with 90%, and class 1 of texts where it is wrong."""
    probabilities = np.tile([0.9, 0.1], (texts, 1))
    probabilities[wrong] = [0.1, 0.9]
    return LevelProfile(name, 1.0, Reading(probabilities, np.full(texts, seconds)))


def test_texts_that_all_go_well_leave_room_for_doubt() -> None:
    labels = np.zeros(100, np.int64)
    levels = [sure("small", slice(0), 0.001, 100), sure("middle", slice(0), 0.005, 100)]
    found = find_candidates(levels, labels)
    assert {one.accuracy for one in found} == {1.0}
    assert all(one.accuracy_error == pytest.approx((101 / 102 / 102 / 100) ** 0.5) for one in found)
    [reference] = [one for one in found if one.loss_error == 0]
    assert reference.levels == ("small",)
    assert all(one.loss == 0 and one.loss_error > 0.01 for one in found if one is not reference)


def test_of_equally_accurate_models_the_fastest_is_what_losses_count_from() -> None:
    labels = np.zeros(200, np.int64)
    levels = [sure("slow", slice(10, 20), 0.009), sure("fast", slice(10), 0.001)]
    found = find_candidates(levels, labels)
    for loss in (0.0, 0.005):
        assert choose(found, accuracy_loss=loss).levels == ("fast",)
    assert next(one for one in found if one.levels == ("slow",)).loss_error > 0
    for one in found:
        assert one.early_accuracy_gap == 0, "the first of the pair is the best itself"


def test_the_gap_is_to_the_best_model_though_the_chain_ends_in_another() -> None:
    labels = np.zeros(200, np.int64)
    levels = [sure("small", slice(20), 0.001), sure("middle", slice(10), 0.002), sure("best", slice(5), 0.005)]
    found = find_candidates(levels, labels)
    gaps = {one.levels: one.early_accuracy_gap for one in found}
    assert gaps["small", "middle"] == pytest.approx(15 / 200)
    assert gaps["middle", "best"] == pytest.approx(5 / 200)
    assert gaps["small",] == 0


def test_a_text_pays_once_for_importance_if_it_goes_on_and_words_are_pruned() -> None:
    labels = true_labels(2, 400)
    cost = np.random.default_rng(0).uniform(0.001, 0.002, 400)
    plainly = profiles(labels, 2)
    paying = [replace(one, importance_s=cost) for one in plainly]
    free, paid = (find_candidates(levels, labels, Rereader(labels, levels, 0.05)) for levels in (plainly, paying))
    costs = {(one.levels, one.cutoffs, one.alphas, one.slope): one for one in paid}
    compared = [(one, other) for one in free if (other := costs.get((one.levels, one.cutoffs, one.alphas, one.slope)))]
    assert {(len(one.levels), one.pruner) for one, _ in compared} == {(1, None), *product((2, 3), (None, 0)), (3, 1)}
    for one, other in compared:
        assert other.accuracy == one.accuracy
        onward = 0.0 if one.pruner is None else sum(one.shares[one.pruner + 1 :])
        assert other.mean_latency_s - one.mean_latency_s == pytest.approx(0.0015 * onward, rel=0.1, abs=1e-12)
