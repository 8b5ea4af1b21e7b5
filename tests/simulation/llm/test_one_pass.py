"""One pass over pages: what it takes by the cost model, and what sharing, keeping and fusing save."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.simulation.llm.hardware import A40, LLAMA_7B, Costs
from pliant.simulation.llm.one_pass import Replica, Turn, simulate
from pliant.simulation.llm.pass_costs import PassCosts, Work, chunk, token

COSTS = Costs(A40, LLAMA_7B)
REPLICA = Replica(COSTS)


def with_memory(gigabytes: float) -> Costs:
    """A GPU that has so much for keys, values and adapters."""
    return replace(COSTS, gpu=replace(A40, memory=int((gigabytes * 1e9 + LLAMA_7B.bytes) / 0.9) + 1))


def test_a_pass_of_one_sort_takes_what_the_cost_model_says() -> None:
    for costs in (PassCosts(COSTS), PassCosts(COSTS, apart=True)):
        assert costs.pass_s(chunk(700, 0, 10**7)) == pytest.approx(COSTS.prefill_s([(700, 10**7)]), rel=1e-3)
        assert costs.pass_s(token(500, 10**7)) == pytest.approx(COSTS.decode_s(1, 500, 10**7))


def test_a_chunk_attends_to_what_is_before_it_and_in_it() -> None:
    assert chunk(3, 10, 5) == Work(prompt=3, pairs=11 + 12 + 13, adapter_tokens=15)
    parts = chunk(4, 0, 1).plus(chunk(3, 4, 1))
    assert parts == chunk(7, 0, 1)
    assert token(10, 5) == Work(rows=1, stored=10, adapter_bytes=5)


def test_a_mixed_pass_reads_the_weights_once() -> None:
    mixed = chunk(100, 0, 0).plus(token(500, 0))
    together, apart = PassCosts(COSTS).pass_s(mixed), PassCosts(COSTS, apart=True).pass_s(mixed)
    assert apart - together == pytest.approx(COSTS.decode_s(1, 0, 0))


def test_a_request_alone_takes_what_the_cost_model_says() -> None:
    """Once it is known how fast prompts are computed, so that its own is one chunk."""
    before = [Turn(10.0 * number, range(number * 2000, number * 2000 + 1500), range(4)) for number in range(3)]
    answered = simulate(REPLICA, [*before, Turn(31.0, range(9000, 9300), range(40))], debug=True)
    first_s, last_s = COSTS.alone_s(300, 40, 0)
    load_s = COSTS.link.seconds(0)
    assert answered.first_s[-1] == pytest.approx(first_s - load_s, rel=1e-3)
    assert answered.end_s - 31.0 == pytest.approx(last_s - load_s, rel=1e-3)


def test_a_second_turn_computes_only_what_is_new() -> None:
    first = Turn(0.0, range(1000), range(5000, 5100))
    second = Turn(60.0, [*first.prompt, *first.answer, *range(9000, 9050)], range(10))
    warm = simulate(REPLICA, [first, second], debug=True)
    cold = simulate(replace(REPLICA, keep="none"), [first, second], debug=True)
    assert warm.computed < cold.computed - 1050
    assert warm.first_s[1] < 0.25 * cold.first_s[1]
    apart = simulate(REPLICA, [first, second._replace(tenant=7)], debug=True)
    assert apart.computed == cold.computed


def test_an_adapter_that_stays_is_not_loaded_again() -> None:
    size = LLAMA_7B.adapter_bytes(128)
    turns = [Turn(at, range(at * 1000, at * 1000 + 300), range(4), 0) for at in (0, 100)]
    kept, dropped = (simulate(replace(REPLICA, keep=keep), turns, [size]) for keep in ("adapters", "prefixes"))
    assert dropped.first_s[1] - kept.first_s[1] == pytest.approx(COSTS.link.seconds(size))


@settings(max_examples=15)
@given(
    gigabytes=st.floats(2.0, 4.0),
    rate=st.floats(0.5, 30.0),
    keep=st.sampled_from(("joint", "lru", "adapters", "prefixes", "none")),
    scheduler=st.sampled_from(("multi_queue", "fifo", "sjf")),
    apart=st.booleans(),
    error=st.sampled_from((1, 4)),
    seed=st.integers(0, 2**16),
)
def test_whatever_comes_everybody_is_answered(
    gigabytes: float, rate: float, keep: str, scheduler: str, apart: bool, error: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    sizes = [LLAMA_7B.adapter_bytes(rank) for rank in (8, 32, 64)]
    at = np.cumsum(rng.exponential(1 / rate, 40))
    turns = [
        Turn(
            float(at[number]),
            [0] * int(rng.integers(1, 600)) + [number],
            range(int(length)),
            int(rng.integers(-1, 3)),
            max(1, int(length) // error),
        )
        for number, length in enumerate(rng.integers(1, 200, 40))
    ]
    replica = Replica(with_memory(gigabytes), keep=keep, scheduler=scheduler, apart=apart)  # type: ignore[arg-type]
    answered = simulate(replica, turns, sizes, debug=True)
    assert not np.isnan(answered.first_s).any()
    assert (answered.first_s > 0).all()
