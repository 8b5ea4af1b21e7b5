"""One pass and one memory of pages, simulated on Llama-7B: what each of them gains, and over what."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from pliant.bench.adapters.workload import Lengths, population
from pliant.bench.adapters.workload import conversations as azure
from pliant.bench.gpu.profiles import measured_gpu
from pliant.bench.pages import workload
from pliant.bench.report import Figure, Options, Report, ratio
from pliant.simulation.llm.hardware import A40, A100, LLAMA_7B, Costs, Gpu
from pliant.simulation.llm.one_pass import Answered, Keep, Replica, Turn, simulate

SLO = 5.0
"""Times what the P99 of the time to the first token is of requests that are alone."""
TPOT_S = 0.15
SCALE = 0.25
"""Of Azure's lengths, as the adapters' benchmark has them and for its reasons, unless said otherwise."""
TURNS = 4.0
"""Of a conversation, on average."""
ADAPTERS = 100

_A40 = Replica(Costs(A40, LLAMA_7B), tpot_s=TPOT_S)
_A100 = Replica(Costs(A100[80], LLAMA_7B), tpot_s=TPOT_S, page_tokens=16)
_BOUNDLESS = replace(_A40, machine=Costs(replace(A40, memory=40 * A40.memory), LLAMA_7B))


@dataclass(frozen=True)
class _Plan:
    seconds: float
    seeds: Sequence[int]
    rounds: int
    """In which capacities are looked for."""
    burst: int
    """Requests that come at once, where as many run as fit."""
    turns_per_s: float
    """Of conversations with adapters."""


_QUICK = _Plan(seconds=60, seeds=(0,), rounds=7, burst=200, turns_per_s=8.0)
_FULL = _Plan(seconds=180, seeds=(0, 1, 2), rounds=9, burst=600, turns_per_s=8.0)


class _Bench:
    """Simulates on all cores."""

    def __init__(self, plan: _Plan, data: Path | None, pool: ProcessPoolExecutor) -> None:
        self._plan, self._data, self._pool = plan, data, pool
        self._azure = azure(data)
        self._lengths = self._azure.scaled(SCALE)

    def all(self, jobs: Sequence[tuple[Replica, Sequence[Turn], Sequence[int]]]) -> list[Answered]:
        return list(self._pool.map(simulate, *zip(*jobs, strict=True)))

    def capacity(self, replica: Replica, scale: float, suffix: str = "") -> list[Figure]:
        """Requests a second within both objectives, with the predictor that ships: in one pass over in two, and by the
        default scheduler over the others. Lengths are scaled."""
        plan, lengths = self._plan, self._azure.scaled(scale)
        ours = replace(replica, most=int(lengths.outputs.max()))
        others: dict[str, Replica] = {
            "two_passes": replace(ours, apart=True),
            "fifo": replace(ours, scheduler="fifo"),
            "sjf": replace(ours, scheduler="sjf"),
        }
        alone = self._pool.submit(simulate, ours, _alone(lengths)).result()
        slo_s = SLO * float(np.quantile(alone.first_s, 0.99))
        wanted = [(replica, seed) for replica in (ours, *others.values()) for seed in plan.seeds]
        low, high = [2.0] * len(wanted), [24.0] * len(wanted)
        for _ in range(plan.rounds):
            rates = [math.sqrt(least * most) for least, most in zip(low, high, strict=True)]
            jobs = [
                (replica, workload.singles(rate, plan.seconds, lengths, seed), ())
                for (replica, seed), rate in zip(wanted, rates, strict=True)
            ]
            for index, answered in enumerate(self.all(jobs)):
                side = low if _within(answered, slo_s) else high
                side[index] = rates[index]
        found = [math.sqrt(least * most) for least, most in zip(low, high, strict=True)]
        of = [found[at : at + len(plan.seeds)] for at in range(0, len(found), len(plan.seeds))]
        return [
            ratio(
                f"capacity_within_slo_vs_{name}{suffix}",
                of[0],
                theirs,
                ">= 1.15" if name == "two_passes" else ">= 1",
                f"{np.median(of[0]):.1f} against {np.median(theirs):.1f} requests/s",
            )
            for name, theirs in zip(others, of[1:], strict=True)
        ]

    def at_once(self, replica: Replica, suffix: str = "") -> list[Figure]:
        """Requests that run at a time when as many as can do, over slots that hold the longest; lengths unscaled."""
        longest = int(self._azure.prompts.max() + self._azure.outputs.max())
        slots = replica.machine.memory // LLAMA_7B.token_bytes // longest
        jobs = [
            (
                replace(replica, rows=rows, tpot_s=math.inf),
                workload.singles(1e3, self._plan.burst / 1e3, self._azure, seed),
                (),
            )
            for rows in (replica.rows, slots)
            for seed in self._plan.seeds
        ]
        results = self.all(jobs)
        pages, slotted = results[: len(self._plan.seeds)], results[len(self._plan.seeds) :]
        beside = f"{slots} slots of {longest} tokens; preempted: {sum(one.preemptions for one in pages)}"
        return [
            ratio(
                f"requests_at_once_vs_slots{suffix}",
                [one.running for one in pages],
                [one.running for one in slotted],
                ">= 2",
                beside,
            ),
            ratio(
                f"throughput_vs_slots{suffix}",
                [one.end_s for one in slotted],
                [one.end_s for one in pages],
                "",
                "the same burst",
            ),
        ]

    def turns(self) -> list[Figure]:
        """Time to the first token of second and later turns where prefixes stay, over where none do: with lengths as
        they are on an A100 of 80 GB, and scaled on the A40, where one reading of the weights is most of it."""
        return [
            self._turns("second_turn_ttft_vs_cold", _A100, self._azure, 2.0),
            self._turns("second_turn_ttft_vs_cold_short", _A40, self._lengths, 4.0),
        ]

    def _turns(self, name: str, replica: Replica, lengths: Lengths, rate: float) -> Figure:
        seeds = self._plan.seeds
        drawn = [workload.conversations(rate, self._plan.seconds, lengths, TURNS, seed) for seed in seeds]
        jobs = [(replace(replica, keep=keep), turns, ()) for keep in _keeps("joint", "none") for turns, _ in drawn]
        medians = [
            float(np.median(answered.first_s[number > 0]))
            for answered, (_, number) in zip(self.all(jobs), [*drawn, *drawn], strict=True)
        ]
        warm, cold = medians[: len(drawn)], medians[len(drawn) :]
        beside = f"medians, {np.median(warm):.3f} and {np.median(cold):.3f} s; {rate:g} turns a second"
        return ratio(name, warm, cold, "<= 0.25", beside)

    def shared(self, data: Path) -> Figure:
        """The trace as fast as it can be answered, sharing over not sharing, on an A100 of 80 GB; lengths / 32."""
        turns = workload.shared_prefixes(data, 32, pace=1e3)
        with_, lru, without = self.all(
            [(_A100, turns, ()), (replace(_A100, keep="lru"), turns, ()), (_A100, workload.apart(turns), ())]
        )
        saved = 1 - with_.computed / without.computed
        beside = f"{saved:.0%} of prompts not computed; by LRU {without.end_s / lru.end_s:.2f}"
        return ratio("shared_trace_throughput_vs_apart", [without.end_s], [with_.end_s], ">= 1.5", beside)

    def caches(self) -> list[Figure]:
        """Mean time to the first token of conversations with adapters: one score for both sorts, over the better of
        keeping one sort; over LRU; and what no memory at all could better, over the same."""
        people = population(ADAPTERS)
        sizes = [LLAMA_7B.adapter_bytes(rank) for rank in people.ranks]
        keeps = _keeps("joint", "lru", "adapters", "prefixes")
        replicas = [*(replace(_A40, keep=keep) for keep in keeps), _BOUNDLESS]
        jobs = []
        for seed in self._plan.seeds:
            turns, _ = workload.conversations(
                self._plan.turns_per_s, 2 * self._plan.seconds, self._lengths, TURNS, seed, people
            )
            jobs += [(replica, turns, sizes) for replica in replicas]
        results = self.all(jobs)
        warm = self._plan.seconds / 2
        means = [
            float(answered.first_s[np.array([turn.at_s for turn in turns]) > warm].mean())
            for answered, (_, turns, _) in zip(results, jobs, strict=True)
        ]
        joint, lru, adapters, prefixes, bound = (means[at :: len(replicas)] for at in range(len(replicas)))
        single = [min(pair) for pair in zip(adapters, prefixes, strict=True)]
        beside = (
            f"{np.median(joint):.3f} s; adapters only {np.median(adapters):.3f}, prefixes {np.median(prefixes):.3f}"
        )
        return [
            ratio("joint_cache_vs_best_single", joint, single, "<= 0.9", beside),
            ratio("joint_cache_vs_lru", joint, lru, "", f"LRU over both: {np.median(lru):.3f} s"),
            ratio("boundless_memory_vs_best_single", bound, single, "", "nothing is ever evicted"),
        ]

    def measured(self, gpu: Gpu) -> list[Figure]:
        """On a GPU that was measured, with lengths as they are."""
        replica = Replica(Costs(gpu, LLAMA_7B), tpot_s=TPOT_S)
        turns = self._turns("second_turn_ttft_vs_cold_gpu", replica, self._azure, 2.0)
        return [*self.capacity(replica, 1.0, "_gpu"), *self.at_once(replica, "_gpu"), turns]


def run(options: Options) -> Report:
    """All of it, into one report."""
    plan = _QUICK if options.quick else _FULL
    with _pool() as pool:
        bench = _Bench(plan, options.data, pool)
        figures = [*bench.capacity(_A40, SCALE), *bench.at_once(_A40), *bench.turns(), *bench.caches()]
        if options.data:
            figures.append(bench.shared(options.data))
        if options.gpu:
            figures += bench.measured(measured_gpu(options.gpu))
    settings = {"slo": SLO, "tpot_s": TPOT_S, "length_scale": SCALE, "turns": TURNS, "adapters": ADAPTERS}
    return Report(figures, {**asdict(plan), **settings, "replica": asdict(_A40)}, {})


def _alone(lengths: Lengths) -> list[Turn]:
    """Requests so far apart that none meets another."""
    return [turn._replace(at_s=100.0 * number) for number, turn in enumerate(workload.singles(1.0, 2000.0, lengths, 0))]


def _within(answered: Answered, slo_s: float) -> bool:
    late = float(np.quantile(answered.first_s, 0.99)) > slo_s
    return not late and float(np.nanquantile(answered.tpot_s, 0.99)) <= TPOT_S


def _keeps(*names: Keep) -> tuple[Keep, ...]:
    return names


@contextmanager
def _pool() -> Iterator[ProcessPoolExecutor]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        yield pool
