"""Batches against brute force, and the laws that any sequence of them obeys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.formats.pass_times import PassTimes
from pliant.policies.encoder.batching import Batcher, BatchTimes, PackedTimes, PaddedTimes, Waiting, cut, shares

LENGTHS = (64, 128, 512)
PADDED = PaddedTimes((1, 2, 4, 8), LENGTHS, tuple(tuple(1 + n * m / 100 for m in LENGTHS) for n in (1, 2, 4, 8)))
PACKED = PackedTimes(((64, 1.5), (512, 4.0), (4096, 30.0)), square_s=1e-6, most=6)
TIMES = st.sampled_from([PADDED, PACKED])
QUEUES = st.lists(st.integers(1, 512), min_size=1, max_size=9)


def forever(lengths: Sequence[int]) -> list[Waiting]:
    return [Waiting(length, 0.0, math.inf) for length in lengths]


def cuts(number: int) -> Iterator[list[int]]:
    """All ways to cut so many texts into batches that follow one another."""
    if not number:
        yield []
    for first in range(1, number + 1):
        for rest in cuts(number - first):
            yield [first, *rest]


def waits(times: BatchTimes, lengths: Sequence[int], counts: Sequence[int]) -> float:
    """The sum of the times until each text is answered; infinite if a batch is too large."""
    now = total = 0.0
    start = 0
    for count in counts:
        if count > times.most:
            return math.inf
        now += times.seconds(lengths[start : start + count])[-1]
        total += now * count
        start += count
    return total


@given(TIMES, QUEUES)
def test_the_first_batch_of_the_cut_with_which_texts_wait_least(times: BatchTimes, queue: list[int]) -> None:
    lengths = tuple(sorted(map(times.step, queue)))
    count, seconds = cut(times, lengths)
    best = min(waits(times, lengths, counts) for counts in cuts(len(lengths)))
    with_it = min(waits(times, lengths, counts) for counts in cuts(len(lengths)) if counts[0] == count)
    assert with_it == pytest.approx(best)
    assert seconds == pytest.approx(times.seconds(lengths[:count])[-1])


@given(TIMES, st.lists(st.integers(1, 512), min_size=1, max_size=200))
def test_a_queue_is_emptied_and_nobody_waits_longer_than_one_by_one(times: BatchTimes, queue: list[int]) -> None:
    batcher, waiting = Batcher(times, 512), forever(queue)
    now = total = 0.0
    while waiting:
        batch = batcher.next_batch(now, waiting)
        assert 1 <= len(set(batch.texts)) == len(batch.texts) <= times.most
        chosen = [waiting[place].length for place in batch.texts]
        assert chosen == sorted(chosen)
        now += batch.seconds
        total += now * len(chosen)
        waiting = [text for place, text in enumerate(waiting) if place not in batch.texts]
    one_by_one = waits(times, sorted(map(times.step, queue)), [1] * len(queue))
    assert total <= one_by_one * (1 + 1e-9)


def test_the_last_chance_of_a_text_is_found_behind_two_that_are_due_before_it() -> None:
    waiting = [Waiting(129, 0.0, 9.0), Waiting(65, 0.0, 13.0), Waiting(1, 0.0, 12.0)]
    assert Batcher(PADDED, 512).next_batch(0.0, waiting).texts == (0,)


@given(TIMES, QUEUES, st.data())
def test_what_would_be_late_goes_now_if_that_helps(times: BatchTimes, queue: list[int], data: st.DataObject) -> None:
    """Of those that can be in time if they go now, the most urgent is."""
    budgets = data.draw(st.lists(st.floats(0.5, 60.0), min_size=len(queue), max_size=len(queue)))
    waiting = [Waiting(length, 0.0, budget) for length, budget in zip(queue, budgets, strict=True)]
    batch = Batcher(times, 512).next_batch(0.0, waiting)
    alone = [times.seconds((times.step(length),))[0] for length in queue]
    possible = [place for place, seconds in enumerate(alone) if seconds <= budgets[place]]
    late = [place for place in possible if place in batch.texts and budgets[place] < batch.seconds - 1e-9]
    left = [place for place in possible if place not in batch.texts and budgets[place] < batch.seconds + alone[place]]
    in_time = [place for place in possible if place in batch.texts and budgets[place] >= batch.seconds - 1e-9]
    if late or left:
        first = min(budgets[place] for place in late + left)
        assert any(budgets[place] <= first for place in in_time), (
            "the most urgent of those that can be in time goes now"
        )


def test_of_two_that_cannot_both_be_in_time_the_first_due_goes() -> None:
    """Two that are late already are shorter, or as short; the long one would make the last one late."""
    waiting = [Waiting(129, 0.0, 7.0), Waiting(1, 0.0, 1.0), Waiting(1, 0.0, 1.0), Waiting(1, 0.0, 4.0)]
    assert 3 in Batcher(PADDED, 512).next_batch(0.0, waiting).texts


def test_an_idle_replica_does_not_wait_for_texts_to_come() -> None:
    assert Batcher(PADDED, 512).next_batch(0.0, forever([100])).texts == (0,)


def test_short_texts_go_together_and_do_not_pay_for_a_long_one() -> None:
    batch = Batcher(PADDED, 512).next_batch(0.0, forever([50, 512, 60, 9, 40]))
    assert batch.texts == (3, 4, 0, 2)


def test_a_long_text_goes_before_its_deadline_and_not_much_earlier() -> None:
    batcher = Batcher(PADDED, 512)
    long_s = PADDED.seconds([512])[0]
    shorts = forever([64] * 8)
    first_s = batcher.next_batch(0.0, shorts).seconds
    assert 8 not in batcher.next_batch(0.0, [*shorts, Waiting(512, -20.0, first_s + long_s + 0.01)]).texts
    assert batcher.next_batch(0.0, [*shorts, Waiting(512, -20.0, first_s + long_s - 0.01)]).texts == (8,)


def test_a_long_text_does_not_wait_for_its_deadline_behind_short_ones() -> None:
    batcher = Batcher(PADDED, 512)
    long_s = PADDED.seconds([512])[0]
    now, batches = 0.0, 0
    while batcher.next_batch(now, [*forever([64] * 8), Waiting(512, 0.0, 10 * long_s)]).texts != (8,):
        now += PADDED.seconds([64] * 8)[-1]
        batches += 1
    assert batches
    assert now + long_s <= 2.5 * long_s


def test_what_cannot_be_in_time_holds_up_nobody_and_is_not_passed_by_for_ever() -> None:
    batcher = Batcher(PADDED, 512)
    long = Waiting(512, 0.0, 1.0)
    now = 2.0
    passed = 0
    while True:
        batch = batcher.next_batch(now, [*[Waiting(64, now, now + 100)] * 8, long])
        now += batch.seconds
        if 8 in batch.texts:
            break
        passed += 1
    assert passed
    assert now <= 4 * (2.0 + PADDED.seconds([512])[0])


def test_padded_times_use_the_size_that_takes_least() -> None:
    times = PaddedTimes((1, 2, 8), (64, 128), ((1.0, 3.0), (1.5, 2.0), (9.0, 1.8)))
    assert times.seconds([64] * 3) == [1.0, 1.5, 1.8]
    assert times.seconds([60, 70]) == [1.0, 1.8]
    assert [times.step(length) for length in (1, 64, 65)] == [64, 64, 128]


def test_packed_times_count_tokens_and_pairs() -> None:
    times = PackedTimes(((100, 1.0), (300, 2.0)), square_s=1e-5, most=3)
    assert times.seconds([50, 150, 200, 200]) == pytest.approx([1.0 + 0.025, 1.5 + 0.25, 2.5 + 0.65])
    assert times.step(17) == 32


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: PaddedTimes((), (64,), ()),
        lambda: PaddedTimes((2, 1), (64,), ((1.0,), (1.0,))),
        lambda: PaddedTimes((1,), (64, 128), ((1.0,),)),
        lambda: PaddedTimes((1,), (64,), ((0.0,),)),
        lambda: PackedTimes(((64, 1.0),), 0.0, 4),
        lambda: PackedTimes(((64, 1.0), (32, 2.0)), 0.0, 4),
        lambda: PackedTimes(((64, 1.0), (128, 2.0)), -1.0, 4),
    ],
)
def test_bad_times(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"needs|must"):
        wrong()  # type: ignore[operator]


@given(
    st.floats(1e-4, 0.1),
    st.floats(1e-7, 1e-3),
    st.floats(0, 1),
    st.lists(st.integers(8, 512), min_size=1, max_size=32).filter(lambda lengths: sum(lengths) <= 1024),
)
def test_a_measured_table_gives_back_what_passes_take(
    overhead_s: float, token_s: float, attention: float, lengths: list[int]
) -> None:
    square_s = attention * token_s / 512
    counts, columns = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128, 256, 512)

    def seconds(count: int, length: int) -> float:
        measured = count == 1 or count * length <= 1024
        return (overhead_s + token_s * count * length + square_s * count * length**2) if measured else 0.0

    table = tuple(tuple(seconds(count, length) for length in columns) for count in counts)
    times = PackedTimes.fitted(PassTimes(counts=counts, lengths=columns, seconds=table), most=32)
    expected = overhead_s + token_s * sum(lengths) + square_s * sum(length**2 for length in lengths)
    assert times.seconds(sorted(lengths))[-1] == pytest.approx(expected, rel=0.02)
    for length in (8, 64, 512):
        spans = times.seconds([length] * 32)
        best = min(span / count for count, span in enumerate(spans, start=1))
        assert spans[0] * shares(times, (length,))[length] == pytest.approx(best)


def test_what_a_busy_machine_added_to_some_passes_makes_no_batch_look_bad() -> None:
    counts, columns = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64)
    table = [[1e-3 + 1e-5 * count * length for length in columns] for count in counts]
    quiet = PackedTimes.fitted(PassTimes(counts=counts, lengths=columns, seconds=tuple(map(tuple, table))), most=32)
    for row, column in ((5, 0), (3, 1), (4, 3), (2, 2), (0, 1)):
        table[row][column] += 0.012
    busy = PackedTimes.fitted(PassTimes(counts=counts, lengths=columns, seconds=tuple(map(tuple, table))), most=32)
    for lengths in ([8] * 32, [8, 16, 16, 30, 64], [64] * 16):
        assert busy.seconds(lengths)[-1] == pytest.approx(quiet.seconds(lengths)[-1], rel=0.3)


@given(st.lists(st.lists(st.floats(1e-4, 1e-1), min_size=7, max_size=7), min_size=6, max_size=6))
def test_times_can_be_made_of_any_table(table: list[list[float]]) -> None:
    counts, columns = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128, 256, 512)
    rows = tuple(map(tuple, table))
    times = PackedTimes.fitted(PassTimes(counts=counts, lengths=columns, seconds=rows), most=32)
    batch = Batcher(times, 512).next_batch(0.0, forever([9, 100, 512, 30]))
    assert batch.seconds > 0
    assert 0 < shares(times, (512,))[512] <= 1


@given(QUEUES, st.data(), TIMES)
def test_a_batch_with_a_given_text_makes_the_most_of_it(
    lengths: list[int], data: st.DataObject, times: BatchTimes
) -> None:
    first = data.draw(st.integers(0, len(lengths) - 1))
    batch = Batcher(times, 512).batch_with(first, forever(lengths))
    assert first in batch.texts
    steps = [times.step(length) for length in lengths]
    work_s = {step: times.seconds((step,))[0] * share for step, share in shares(times, steps).items()}
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    at = order.index(first)
    for start in range(max(0, at - times.most + 1), at + 1):
        for end in range(at + 1, min(start + times.most, len(order)) + 1):
            together = [steps[place] for place in order[start:end]]
            rate = sum(work_s[step] for step in together) / times.seconds(together)[-1]
            found = sum(work_s[steps[place]] for place in batch.texts) / batch.seconds
            assert found >= (1 - 1e-9) * rate


def test_what_is_due_soon_goes_with_others_though_it_comes_later_for_that() -> None:
    """Four would be answered before they are due, but eight take less time together than in two batches."""
    due_s, deadline = 5.0, 50.0
    assert PADDED.seconds([64] * 4)[-1] < due_s < PADDED.seconds([64] * 8)[-1] < deadline
    waiting = [Waiting(64, due_s - (deadline - due_s) / 3, deadline)] * 8
    assert len(Batcher(PADDED, 512).next_batch(0.0, waiting).texts) == 8
