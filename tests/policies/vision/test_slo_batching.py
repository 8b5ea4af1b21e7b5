"""Batches by service-level objective: Algorithm 1 against a literal one; a queue that loses nothing (OTAS §III-C)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pliant.policies.vision.slo_batching import Batching, SloBatcher


@dataclass(frozen=True, eq=False)
class Image:
    arrival: float
    deadline: float = 1.0
    utility: float = 0.3
    task: str = "digits"


def queue(*images: Image, limit: int = 1000, most_rows: int = 64, factor: float = math.inf) -> SloBatcher[Image]:
    batcher: SloBatcher[Image] = SloBatcher(limit, Batching(most_rows=most_rows, factor=factor))
    for image in images:
        assert batcher.add(image) is None
    return batcher


def sizes(batcher: SloBatcher[Image]) -> list[int]:
    return [len(batch) for batch in batcher.batches]


@pytest.mark.parametrize(
    ("later", "joins"),
    [
        (Image(0.5, 1.0, 0.3), True),
        (Image(0.6, 1.0, 0.3), False),
        (Image(0.0, 1.5, 0.3), True),
        (Image(0.0, 1.6, 0.3), False),
        (Image(0.0, 0.4, 0.3), False),
        (Image(0.0, 1.0, 1.1), True),
        (Image(0.0, 1.0, 1.2), False),
        (Image(0.0, 1.0, 0.3, "parity"), True),
    ],
)
def test_a_query_joins_a_batch_that_it_is_like(later: Image, joins: bool) -> None:
    assert sizes(queue(Image(0.0, 1.0, 0.3), later)) == ([2] if joins else [1, 1])


@pytest.mark.parametrize(
    ("first", "later", "joins"),
    [(0.2, 0.4, True), (0.2, 0.5, False), (0.5, 0.2, False), (0, 1e-9, False), (0, 0, True)],
)
def test_a_batch_does_not_mix_what_is_worth_much_with_what_is_not(first: float, later: float, joins: bool) -> None:
    batcher = queue(Image(0.0, utility=first), Image(0.0, utility=later), factor=2.0)
    assert sizes(batcher) == ([2] if joins else [1, 1])


def test_a_full_batch_is_passed_over_for_an_older_one_with_room() -> None:
    cheap, dear = Image(0.0, utility=0.0), Image(0.0, utility=1.0)
    batcher = queue(cheap, dear, Image(0.1, utility=0.9), most_rows=2)
    assert sizes(batcher) == [1, 2]
    batcher.add(Image(0.1, utility=0.5))
    assert sizes(batcher) == [2, 2]


def test_a_batch_is_due_with_its_first_and_worth_what_the_one_that_opened_it_is() -> None:
    first, second = Image(0.0, 1.2, 0.2), Image(0.1, 1.0, 0.9)
    batcher = queue(first, second)
    (batch,) = batcher.batches
    assert (batch.arrival, batch.deadline, batch.utility) == (0.0, 1.0, 0.2)
    batcher.remove(second)
    assert (batch.arrival, batch.deadline, batch.utility) == (0.0, 1.2, 0.2)


def test_a_batch_stays_what_the_one_that_opened_it_made_it() -> None:
    first, second, third = Image(0.0, utility=0.4), Image(0.1, utility=0.8), Image(0.2, utility=0.2)
    batcher = queue(first, second, third, factor=2.0)
    batcher.remove(first)
    (batch,) = batcher.batches
    assert (batch.arrival, batch.utility) == (0.0, 0.4)
    batcher.add(Image(0.3, utility=1.0))
    assert sizes(batcher) == [2, 1]


IMAGES = st.lists(
    st.builds(
        lambda gap, allowed, utility: (gap, allowed, utility),
        st.sampled_from([0.0, 0.05, 0.2, 0.45]),
        st.sampled_from([0.1, 0.6, 1.0]),
        st.sampled_from([0.0, 0.1, 0.85, 1.0]),
    ),
    max_size=40,
)


@given(IMAGES)
def test_batches_are_those_of_algorithm_1(numbers: list[tuple[float, float, float]]) -> None:
    images, now = [], 0.0
    for gap, allowed, utility in numbers:
        now += gap
        images.append(Image(now, now + allowed, utility))
    expected: list[list[Image]] = []
    for r in images:
        for b in reversed(expected):
            if b[0].arrival + 0.5 < r.arrival:
                expected.append([r])
                break
            if len(b) >= 4 or abs(min(x.deadline for x in b) - r.deadline) > 0.5 or abs(b[0].utility - r.utility) > 0.8:
                continue
            b.append(r)
            break
        else:
            expected.append([r])
    assert [list(batch.queries) for batch in queue(*images, most_rows=4).batches] == expected


def test_a_full_queue_sheds_the_query_of_least_utility_and_of_these_the_newest() -> None:
    old, new, dear = Image(0.0, utility=0.1), Image(0.1, utility=0.1), Image(0.2, utility=0.5)
    batcher = queue(old, new, limit=2)
    assert batcher.add(dear) is new
    worthless = Image(0.3, utility=0.0)
    assert batcher.add(worthless) is worthless
    assert {query for batch in batcher.batches for query in batch.queries} == {old, dear}
    assert len(batcher) == 2


def test_what_cannot_be_in_time_is_dropped_and_the_rest_of_its_batch_stays() -> None:
    hasty, patient = Image(0.0, 0.6), Image(0.0, 1.0)
    batcher = queue(hasty, patient)
    assert batcher.drop_late(0.6) == []
    assert batcher.drop_late(0.7) == [hasty]
    (batch,) = batcher.batches
    assert (list(batch.queries), batch.deadline) == ([patient], 1.0)


def test_a_batch_may_run_in_part() -> None:
    first, second = Image(0.0), Image(0.0)
    batcher = queue(first, second)
    (batch,) = batcher.batches
    batcher.take(batch, [first])
    assert list(batch.queries) == [second]
    with pytest.raises(ValueError, match="1 of 1 queries do not wait in that batch"):
        batcher.take(batch, [first])
    batcher.take(batch, [second])
    assert (list(batcher.batches), len(batcher)) == ([], 0)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        SloBatcher(0)
    with pytest.raises(ValueError, match="at least 0, got nan"):
        SloBatcher(1, Batching(delta_s=float("nan")))
    with pytest.raises(ValueError, match="factor must be at least 1"):
        SloBatcher(1, Batching(factor=0.5))
    image = Image(0.0)
    batcher = queue(image)
    with pytest.raises(ValueError, match="waits already"):
        batcher.add(image)
    for wrong in (Image(2.0, 1.0), Image(0.0, 1.0, float("nan")), Image(0.0, 1.0, -1.0)):
        with pytest.raises(ValueError, match="a query needs a utility of at least 0"):
            batcher.add(wrong)
    assert len(batcher) == 1


class Life(RuleBasedStateMachine):
    """Whatever happens, every query is in exactly one batch, or has left once."""

    @initialize()
    def start(self) -> None:
        self.batcher: SloBatcher[Image] = SloBatcher(6, Batching(most_rows=3))
        self.waiting: set[Image] = set()
        self.now = 0.0

    @rule(gap=st.floats(0, 0.4), allowed=st.floats(0, 1.2), utility=st.floats(0, 2))
    def come(self, gap: float, allowed: float, utility: float) -> None:
        self.now += gap
        image = Image(self.now, self.now + allowed, utility)
        shed = self.batcher.add(image)
        self.waiting.add(image)
        if shed:
            assert len(self.waiting) == 7
            self.waiting.remove(shed)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        image = data.draw(st.sampled_from(sorted(self.waiting, key=lambda image: image.arrival)))
        assert self.batcher.remove(image)
        assert not self.batcher.remove(image)
        self.waiting.remove(image)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def run_batch(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from(self.batcher.batches))
        chosen = batch.queries[: data.draw(st.integers(1, len(batch)))]
        self.batcher.take(batch, chosen)
        self.waiting -= set(chosen)

    @rule(ahead=st.floats(0, 1))
    def drop(self, ahead: float) -> None:
        late = self.batcher.drop_late(self.now + ahead)
        assert set(late) == {image for image in self.waiting if image.deadline < self.now + ahead}
        self.waiting -= set(late)

    @invariant()
    def all_wait_once(self) -> None:
        batches = self.batcher.batches
        queued = [image for batch in batches for image in batch.queries]
        assert len(queued) == len(self.batcher) == len(self.waiting)
        assert set(queued) == self.waiting
        assert all(1 <= len(batch) <= 3 for batch in batches)
        assert all(batch.deadline == min(image.deadline for image in batch.queries) for batch in batches)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=30, stateful_step_count=30)
