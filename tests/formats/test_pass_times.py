"""The time of any mix of texts follows from a table of passes over texts of one length."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pliant.formats.pass_times import PassTimes

COUNTS, LENGTHS = (1, 2, 4, 8, 16, 32), (8, 16, 32, 64, 128, 256, 512)


def seconds(lengths: list[int]) -> float:
    """Of a machine that takes as long for few tokens as it needs to read the weights."""
    tokens = sum(lengths)
    return max(4e-4, 2e-5 * tokens) + 1e-8 * sum(length**2 for length in lengths)


def table(most_tokens: int = 10**9) -> PassTimes:
    measured = [
        tuple(seconds([length] * n) if n == 1 or n * length <= most_tokens else 0.0 for length in LENGTHS)
        for n in COUNTS
    ]
    return PassTimes(counts=COUNTS, lengths=LENGTHS, seconds=tuple(measured))


@given(st.lists(st.integers(8, 512), min_size=1, max_size=40))
def test_mixes_take_what_the_machine_takes(lengths: list[int]) -> None:
    for times in (table(), table(most_tokens=1024)):
        assert times.packed_s(lengths) == pytest.approx(seconds(lengths), rel=0.19)


def test_what_was_measured_is_given_back() -> None:
    times = table()
    for row, count in enumerate(COUNTS):
        for column, length in enumerate(LENGTHS):
            assert times.packed_s([length] * count) == pytest.approx(times.seconds[row][column])


@given(st.lists(st.integers(1, 512), min_size=1, max_size=40), st.integers(1, 512))
def test_one_more_text_takes_no_less_time(lengths: list[int], more: int) -> None:
    times = table()
    assert times.packed_s([*lengths, more]) >= times.packed_s(lengths) * 0.97


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts": (1, 1), "lengths": (8,), "seconds": ((1.0,), (1.0,))},
        {"counts": (1,), "lengths": (8, 4), "seconds": ((1.0, 1.0),)},
        {"counts": (1,), "lengths": (8, 16), "seconds": ((1.0, 0.0),)},
        {"counts": (1, 2), "lengths": (8,), "seconds": ((1.0,),)},
    ],
    ids=["counts", "lengths", "not measured", "shape"],
)
def test_a_table_with_holes_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="must rise"):
        PassTimes.model_validate(wrong)


def test_it_is_kept_as_json() -> None:
    assert PassTimes.model_validate_json(table().model_dump_json()) == table()
    assert np.isfinite(table(1024).packed_s([512] * 100))
