"""Replacement: the fewest changes, in batches that leave no length behind, barred lengths and all."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.replacement import batches

LENGTHS = (64, 128, 256, 512)


@st.composite
def problems(draw: st.DrawFn, most: int = 30, barring: bool = False) -> dict[str, Any]:
    size = draw(st.integers(0, most))
    held = draw(st.lists(st.sampled_from((0, 32, *LENGTHS)), min_size=size, max_size=size))
    wanted = Counter(draw(st.lists(st.sampled_from(LENGTHS), min_size=size, max_size=size)))
    names = [f"r{index}" for index in range(size)]
    problem: dict[str, Any] = {
        "holds": dict(zip(names, held, strict=True)),
        "counts": {length: wanted[length] for length in draw(st.permutations(LENGTHS))},
        "busy": {name: draw(st.integers(0, 3)) for name in names if draw(st.booleans())},
        "share": draw(st.floats(0.01, 1)),
    }
    if barring:
        problem["barred"] = {name: draw(st.sets(st.sampled_from(LENGTHS))) for name in names}
    return problem


def final(problem: dict[str, Any]) -> dict[str, int]:
    holds: dict[str, int] = dict(problem["holds"])
    for batch in batches(**problem):
        holds |= batch
    return holds


@given(problems())
def test_reaches_the_counts_with_the_fewest_changes(problem: dict[str, Any]) -> None:
    listed = batches(**problem)
    changed = [replica for batch in listed for replica in batch]
    assert len(changed) == len(set(changed))
    held = Counter(problem["holds"].values())
    assert len(changed) == len(problem["holds"]) - sum(
        min(held[length], count) for length, count in problem["counts"].items()
    )
    assert Counter(final(problem).values()) == Counter(problem["counts"])


@given(problems(most=6, barring=True))
def test_equals_brute_force_with_barred_lengths(problem: dict[str, Any]) -> None:
    """Most places filled; among those the longest; among those the fewest changes; the rest stay as they are."""
    holds: dict[str, int] = problem["holds"]
    counts: dict[int, int] = problem["counts"]
    barred: dict[str, set[int]] = problem["barred"]

    def choices(replica: str) -> set[int]:
        return (set(LENGTHS) - barred[replica]) | ({holds[replica]} & set(LENGTHS)) | {0}

    def rank(placed: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
        filled = sorted((length for length in placed if length), reverse=True)
        changes = sum(length not in (0, held) for held, length in zip(holds.values(), placed, strict=True))
        return len(filled), tuple(filled), -changes

    possible = itertools.product(*(sorted(choices(replica)) for replica in holds))
    best = max(rank(placed) for placed in possible if all(placed.count(length) <= counts[length] for length in LENGTHS))
    listed = batches(**problem)
    changes = {replica: length for batch in listed for replica, length in batch.items()}
    assert all(length not in barred[replica] and length != holds[replica] for replica, length in changes.items())
    filled = (Counter((holds | changes).values()) & Counter(counts)).elements()
    longest_first = tuple(sorted(filled, reverse=True))
    assert (len(longest_first), longest_first, -len(changes)) == best


@given(problems(), st.booleans())
def test_barred_lengths_that_do_not_matter_change_nothing(problem: dict[str, Any], empty: bool) -> None:
    barred: dict[str, list[int]] = {name: [] if empty else [1024] for name in problem["holds"]} | {"gone": [64]}
    assert batches(**problem, barred=barred) == batches(**problem)


@given(problems(barring=True))
def test_every_batch_is_small_and_leaves_holders(problem: dict[str, Any]) -> None:
    holds, counts = dict(problem["holds"]), problem["counts"]
    size = max(1, int(problem["share"] * len(holds) + 1e-9))
    longest = max((length for length, count in counts.items() if count), default=0)
    held_at_start = longest in holds.values()
    listed = batches(**problem)
    remaining = Counter(length for batch in listed for length in batch.values())
    if listed and remaining[longest] and not held_at_start:
        assert longest in listed[0].values()
    for batch in listed:
        assert 1 <= len(batch) <= size
        before = Counter(holds.values())
        during = Counter(length for replica, length in holds.items() if replica not in batch)
        for length in set(holds.values()) - {0}:
            taken = before[length] - during[length]
            assert taken <= max(1, before[length] // 2)
            if not during[length] and remaining[length]:
                assert not before[longest], "a sole holder left though another was to come"
                assert sum(holds[replica] == length for replica in batch) == 1
                assert longest in batch.values()
        assert during[longest] or not before[longest]
        holds |= batch
        remaining -= Counter(batch.values())


@given(problems())
def test_the_least_busy_change(problem: dict[str, Any]) -> None:
    holds, busy = problem["holds"], problem["busy"]
    changed = {replica for batch in batches(**problem) for replica in batch}
    for length in set(holds.values()):
        holders = [replica for replica, held in holds.items() if held == length]
        leaving = [busy.get(replica, 0) for replica in holders if replica in changed]
        staying = [busy.get(replica, 0) for replica in holders if replica not in changed]
        assert max(leaving, default=0) <= min(staying, default=3)


def test_the_least_busy_change_first() -> None:
    holds = {"a": 64, "b": 64, "c": 64, "d": 64, "e": 0, "f": 512}
    busy = {"a": 3, "b": 1, "c": 2, "d": 9}
    assert batches(holds, {64: 1, 512: 5}, busy) == [{"e": 512}, {"b": 512}, {"c": 512}, {"a": 512}]


@given(problems(barring=True), st.data())
def test_asking_again_after_each_batch_goes_on(problem: dict[str, Any], data: st.DataObject) -> None:
    """The changes left shrink by a batch each time, and no replica changes twice, whoever is busy by then."""
    changes = sum(map(len, batches(**problem)))
    moved: set[str] = set()
    reached = Counter(final(problem).values()) & Counter(problem["counts"])
    while listed := batches(**problem):
        assert sum(map(len, listed)) == changes
        assert not moved & listed[0].keys()
        moved |= listed[0].keys()
        changes -= len(listed[0])
        problem["holds"] = problem["holds"] | listed[0]
        problem["busy"] = {name: data.draw(st.integers(0, 3)) for name in problem["holds"]}
    assert changes == 0
    assert Counter(problem["holds"].values()) & Counter(problem["counts"]) == reached


def test_a_keeper_gives_way_to_one_that_can_load_nothing_else() -> None:
    """And that one comes first, unless the longest length is missing."""
    holds = {"keeper": 64, "barred": 256, "long": 512}
    barred = {"barred": {128, 512}}
    assert batches(holds, {64: 1, 128: 1, 512: 1}, barred=barred) == [{"barred": 64}, {"keeper": 128}]
    del holds["long"]
    assert batches(holds, {64: 1, 128: 1}, barred=barred) == [{"keeper": 128}, {"barred": 64}]


def test_the_longest_is_served_when_not_everything_can_be() -> None:
    holds = {"only": 64, "other": 128}
    assert batches(holds, {64: 1, 512: 1}, barred={"other": {64, 512}}) == [{"only": 512}]


def test_the_sole_holder_of_the_longest_waits_for_its_successor() -> None:
    holds = {"holder": 512, "successor": 128}
    barred = {"successor": {64}}
    assert batches(holds, {64: 1, 512: 1}, barred=barred, share=1) == [{"successor": 512}, {"holder": 64}]


def test_a_thousand_replicas_with_many_barred() -> None:
    lengths = range(64, 1025, 64)
    holds = {index: lengths[index % 16] for index in range(1000)}
    counts = dict.fromkeys(lengths, 10) | {64: 850}
    barred = {index: {64} if index % 3 else {128, 1024} for index in range(0, 1000, 2)}
    changes = {replica: length for batch in batches(holds, counts, barred=barred) for replica, length in batch.items()}
    assert all(length not in barred.get(replica, ()) for replica, length in changes.items())
    able = sum(64 not in barred.get(replica, ()) or held == 64 for replica, held in holds.items())
    assert Counter((holds | changes).values())[64] == able < 850


@pytest.mark.parametrize(
    ("counts", "share"), [({64: 1}, 0.1), ({64: 3, 128: -1}, 0.1), ({0: 2}, 0.1), ({64: 2}, 0.0), ({64: 2}, 1.1)]
)
def test_bad_arguments(counts: dict[int, int], share: float) -> None:
    with pytest.raises(ValueError, match="must"):
        batches({"a": 64, "b": 64}, counts, share=share)
