"""The adapters' simulator against its cost model, and the laws that any of its runs obeys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pliant.bench.adapters.systems import (
    NO_CACHE,
    NO_SCHEDULER,
    ONLINE,
    OURS,
    OURS_THERE,
    PREFETCH,
    PUBLISHED,
    S_LORA,
    SJF,
    System,
)
from pliant.bench.adapters.workload import Lengths, poisson, population
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.jobs import Decisions
from pliant.simulation.llm.hardware import A40, LLAMA_7B, Costs, Gpu, Link
from pliant.simulation.llm.outcome import Outcome, Request
from pliant.simulation.llm.predictors import NoisyOracle, Online, Predictor
from pliant.simulation.llm.simulator import Simulation, SimulationError

COSTS = Costs(A40, LLAMA_7B)
SYSTEMS = (S_LORA, SJF, OURS, NO_CACHE, NO_SCHEDULER, PREFETCH, ONLINE, PUBLISHED, OURS_THERE)


def run(
    system: System, requests: Sequence[Request], ranks: Sequence[int], costs: Costs = COSTS, debug: bool = True
) -> Outcome:
    sizes = [costs.model.adapter_bytes(rank) for rank in ranks]
    predictor: Predictor = Online(requests) if system.accuracy is None else NoisyOracle(requests, system.accuracy)
    scheduler = system.scheduler(AdapterCache(system.cache), costs.memory, slo_s=10.0)
    return Simulation(costs, sizes, scheduler, predictor, system.loop, debug).run(requests)


def with_memory(gigabytes: float) -> Costs:
    """A GPU that has so much for keys, values and adapters."""
    size = int((gigabytes * 1e9 + LLAMA_7B.bytes) / 0.9) + 1
    return replace(COSTS, gpu=replace(A40, memory=size))


def test_the_papers_measurements_of_an_unloaded_system_come_out() -> None:
    """A prompt of 512 tokens with rank 128: 17.5% of the time to first token is loading, 60% that and computing it."""
    size = LLAMA_7B.adapter_bytes(128)
    whole = COSTS.alone_s(512, 2, size)[0]
    assert COSTS.link.seconds(size) / whole == pytest.approx(0.175, rel=0.02)
    assert 1 - COSTS.prefill_s([(512, 0)]) / whole == pytest.approx(0.6, rel=0.02)
    assert COSTS.decode_s(1, 512, 0) == pytest.approx(0.030, rel=0.02)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_a_request_alone_takes_what_the_cost_model_says(system: System) -> None:
    requests = [Request(1.0, 300, 40, 1), Request(100.0, 700, 1, 0)]
    outcome = run(system, requests, (8, 128))
    for index, request in enumerate(requests):
        size = LLAMA_7B.adapter_bytes((8, 128)[request.adapter])
        first_s, last_s = COSTS.alone_s(request.prompt, request.output, size)
        assert outcome.to_first_token[index] == pytest.approx(first_s)
        assert outcome.latencies[index] == pytest.approx(last_s)
    assert outcome.link_busy_s == pytest.approx(sum(COSTS.link.seconds(LLAMA_7B.adapter_bytes(r)) for r in (8, 128)))


def test_a_cache_saves_the_second_load_and_no_cache_does_not() -> None:
    requests = [Request(0.0, 300, 4, 0), Request(100.0, 300, 4, 0)]
    load_s = COSTS.link.seconds(LLAMA_7B.adapter_bytes(64))
    none, cached = (run(system, requests, (64,)).to_first_token for system in (S_LORA, NO_SCHEDULER))
    np.testing.assert_allclose([none[1], cached[0]], none[0])
    assert none[1] - cached[1] == pytest.approx(load_s)


def test_requests_that_come_together_share_iterations_and_loads_take_turns_on_the_link() -> None:
    requests = [Request(0.0, 100, 3, 0), Request(0.0, 100, 3, 1)]
    outcome = run(NO_SCHEDULER, requests, (128, 128))
    size = LLAMA_7B.adapter_bytes(128)
    load_s, prefill_s = COSTS.link.seconds(size), COSTS.prefill_s([(100, size)])
    assert load_s < prefill_s, "the second is loaded while the first prompt is computed"
    step_s = COSTS.decode_s(1, 100, size)
    np.testing.assert_allclose(outcome.to_first_token, [load_s + prefill_s, load_s + 2 * prefill_s + step_s])


def test_s_lora_admits_in_order_of_arrival() -> None:
    rng = np.random.default_rng(1)
    lengths = Lengths(rng.integers(10, 2000, 500), rng.integers(1, 300, 500))
    requests = poisson(30.0, 10.0, lengths, population(10), seed=1)
    first = (
        np.array([request.at_s for request in requests])
        + run(S_LORA, requests, population(10).ranks, with_memory(4)).to_first_token
    )
    assert np.all(np.diff(first) >= 0)


@settings(max_examples=40)
@given(
    system=st.sampled_from(SYSTEMS),
    gigabytes=st.floats(2.5, 12.0),
    rate=st.floats(0.5, 40.0),
    link=st.builds(Link, st.floats(1e8, 1e11), st.floats(0.0, 0.5)),
    adapters=st.sampled_from((5, 20, 100)),
    longest=st.sampled_from(((50, 5), (1500, 5), (50, 400), (1500, 400))),
    seed=st.integers(0, 2**16),
)
def test_every_request_is_answered_once_and_memory_is_never_over_allocated(
    system: System,
    gigabytes: float,
    rate: float,
    link: Link,
    adapters: int,
    longest: tuple[int, int],
    seed: int,
) -> None:
    """The simulation itself raises when a law is broken; each iteration checks the scheduler too."""
    rng = np.random.default_rng(seed)
    lengths = Lengths(rng.integers(1, longest[0] + 1, 50), rng.integers(1, longest[1] + 1, 50))
    people = population(adapters)
    costs = replace(with_memory(gigabytes), link=link)
    requests = poisson(rate, 40 / rate, lengths, people, seed)
    outcome = run(system, requests, people.ranks, costs)
    assert outcome.answered == len(requests)
    assert outcome.tokens == [request.output for request in requests]
    alone = [costs.prefill_s([(request.prompt, 0)]) for request in requests]
    assert np.all(outcome.to_first_token >= np.array(alone) * (1 - 1e-9))
    assert np.all(outcome.latencies >= outcome.to_first_token)


def test_a_policy_that_over_allocates_is_found_out() -> None:
    class Careless:
        used = 0

        def schedule(self, now: float, slots: int, prompts: int) -> Decisions[int, int]:
            return Decisions([], [], [0, 1], [])

        def add(self, *job: object) -> None:
            pass

        def waiting(self) -> list[object]:
            return []

    requests = [Request(0.0, 10, 10, 0)]
    costs = Costs(Gpu("small", int(LLAMA_7B.bytes / 0.9) + 4 * 10**8, 696e9, 149e12), LLAMA_7B)
    sizes = [LLAMA_7B.adapter_bytes(128)] * 2
    with pytest.raises(SimulationError, match="bytes are given out"):
        Simulation(costs, sizes, Careless(), NoisyOracle(requests, 1.0)).run(requests)  # type: ignore[arg-type]
