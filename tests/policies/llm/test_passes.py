"""What a pass may take, and which prompts go first in it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.llm.passes import AGEING, ALONE_S, Due, pass_limit_s, turn


def test_a_pass_takes_what_the_strictest_answer_can_spare() -> None:
    assert pass_limit_s([], 5.0) == ALONE_S
    assert pass_limit_s([Due(math.inf, math.inf)], 5.0) == ALONE_S
    assert math.isclose(pass_limit_s([Due(5.12, 0.1), Due(9.0, 0.2)], 5.0), 0.12)
    assert math.isclose(pass_limit_s([Due(9.0, 0.1)], 5.0), 0.2), "not all that it is ahead"
    assert math.isclose(pass_limit_s([Due(4.0, 0.1)], 5.0), 0.1), "one that is late asks for its pace"


_SECONDS = st.floats(0, 100)


@given(_SECONDS, _SECONDS, _SECONDS, _SECONDS)
def test_a_prompt_is_passed_only_by_shorter_ones_that_come_within_a_while(
    prompt_s: float, arrived: float, other_s: float, later_s: float
) -> None:
    passed = turn(other_s, arrived + later_s) < turn(prompt_s, arrived)
    assert not passed or (other_s < prompt_s and later_s < prompt_s / AGEING)
    assert turn(other_s, arrived) <= turn(prompt_s, arrived) or other_s > prompt_s
    assert turn(other_s, arrived + later_s, "fifo") >= turn(prompt_s, arrived, "fifo")
