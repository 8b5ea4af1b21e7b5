"""Adapters in the host's memory: which stay there, and that whoever is there waits for no disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_executor import (
    EOS,
    SLOT_BYTES,
    ScriptedAdapters,
    ScriptedExecutor,
    adapter,
    byte_tokenizer,
    expected,
    weights,
)
from support.waiting import HANGS_AFTER_S

from pliant.deployments.llm.adapter_loader import AdapterLoader
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.host_tier import HostTier
from pliant.deployments.llm.request import Generation, Piece
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.sampling import Sampling


@given(st.integers(0, 200), st.lists(st.integers(1, 9), max_size=40))
def test_what_was_asked_for_latest_stays_as_far_as_there_is_room(total: int, asked: list[int]) -> None:
    """Adapter n takes 10 n bytes; against a list of all that was asked for."""
    tier, seen, hits = HostTier(total), list[int](), 0
    for number in asked:
        ref = adapter(str(number), 10 * number)
        there = tier.get(ref)
        kept = list[int]()
        for one in dict.fromkeys(reversed(seen)):
            if 10 * sum(kept) + 10 * one > total:
                break
            kept.append(one)
        assert (there is not None) == (number in kept)
        assert tier.bytes == 10 * sum(kept)
        if there is None:
            tier.keep(ref, weights(ref))
        else:
            assert torch.equal(there, weights(ref))
            hits += 1
        seen += [number] if 10 * number <= total else []
    assert tier.hits == hits


class Gate(ScriptedAdapters):
    """Reads `slow` only once it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = threading.Event()

    def stage(self, ref: AdapterRef) -> torch.Tensor:
        assert ref.name != "slow" or self.opened.wait(HANGS_AFTER_S)
        return super().stage(ref)


@pytest.fixture
def source() -> Iterator[Gate]:
    source = Gate()
    yield source
    source.opened.set()


def serving(source: ScriptedAdapters, host: int, texts: int, pipelined: bool = False) -> Engine:
    """In the memory of so many texts."""
    executor = ScriptedExecutor(2, 48, pipelined, arena_bytes=texts * SLOT_BYTES)
    return Engine(
        *(executor, byte_tokenizer(), (EOS,), 100, 0.05),
        debug=True,
        scheduler=Scheduler(MultiQueue(QueueClasses(1.0)), AdapterCache(), executor.arena_bytes),
        loader=AdapterLoader(source, host=HostTier(host)),
    )


def generation(id: str, ref: AdapterRef | None) -> Generation:
    return Generation(id, (1, 2, 3), 12, Sampling(seed=len(id)), ignore_eos=True, adapter=ref)


def answer(engine: Engine, wanted: Generation) -> None:
    """Ask for it, and see that it is right."""
    engine.add(wanted)
    tokens: list[int] = []
    while len(tokens) < wanted.max_tokens:
        assert engine.loading_s() < HANGS_AFTER_S
        for id, piece in engine.step():
            assert isinstance(piece, Piece), piece
            tokens += piece.tokens if id == wanted.id else ()
    assert tokens == expected(wanted, 48)


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("host", [0, 256])
def test_what_was_read_once_is_not_read_again(host: int, pipelined: bool) -> None:
    source = ScriptedAdapters()
    engine = serving(source, host, 3, pipelined)
    refs = [adapter(name, 2 * SLOT_BYTES) for name in "pq"]
    for turn in range(3):
        for ref in refs:
            answer(engine, generation(f"{ref.name}{turn}", ref))
    engine.close()
    report = engine.report()["adapters"]
    assert report["loads"] == 6
    assert report["host_hits"] == (4 if host else 0)
    assert report["host_bytes"] == host
    assert len(source.staged) == (2 if host else 6)


def test_who_is_in_the_hosts_memory_waits_for_no_read_of_others(source: Gate) -> None:
    engine = serving(source, host=512, texts=5)
    p, q = (adapter(name, 170) for name in "pq")
    answer(engine, generation("p", p))
    answer(engine, generation("q", q))
    engine.add(generation("waits", adapter("slow", 20)))
    answer(engine, generation("p again", p))
    assert engine.report()["waiting"] == 1, "the other is not read yet"
    source.opened.set()
    while engine.busy:
        engine.step()
    assert engine.report()["served"] == 4
    engine.close()
