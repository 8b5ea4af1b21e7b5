"""The moving load of `python -m bench budget`: what is asked, what it earns, which fixed split is the best."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pliant.bench.budget import clients, models, shift
from pliant.bench.budget.clients import End, Look, Seen
from pliant.bench.budget.devices import ChatReplica, build
from pliant.bench.budget.shift import CHAT, COLD, HOT, IMAGES, PLACES, SERVICES, TEXTS, WEIGHTS, Asked
from pliant.config.llm import LlmConfig
from pliant.deployments.llm.request import Generation, Piece
from pliant.policies.cluster.control import Joint
from pliant.sampling import Sampling

PHASE_S = 200


def look(at_s: float, wanted: int, **answers: int) -> Look:
    """Of texts; nothing else is there."""
    nothing = dict.fromkeys(SERVICES, 0)
    return Look(
        at_s,
        {**nothing, TEXTS: wanted},
        {**{name: {} for name in SERVICES}, TEXTS: answers},
        dict.fromkeys(SERVICES, "why"),
    )


def test_each_service_is_asked_much_in_its_phase() -> None:
    rates = shift.per_place()
    asked = shift.arrivals(PHASE_S, rates, seed=0)
    assert asked == sorted(asked)
    assert asked == shift.arrivals(PHASE_S, rates, seed=0) != shift.arrivals(PHASE_S, rates, seed=1)
    counts = Counter((each.service, int(each.at_s // PHASE_S)) for each in asked)
    for at, name in enumerate(SERVICES):
        for phase in range(3):
            mean = PHASE_S * rates[name] * (HOT if phase == at else COLD)
            assert counts[name, phase] == pytest.approx(mean, abs=5 * mean**0.5)


def test_splits_are_all_that_use_each_place() -> None:
    found = list(shift.splits())
    assert len({tuple(split.values()) for split in found}) == len(found) == 10
    assert all(sum(split.values()) == PLACES and min(split.values()) == 1 for split in found if max(split.values()) > 2)


@pytest.mark.parametrize("name", SERVICES)
def test_the_best_split_gives_places_to_what_is_asked(name: str) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(60 * rng.random(int(60 * HOT * shift.per_place()[name])))
    one_each = [Asked(1.0, other) for other in SERVICES]
    [best] = shift.best_splits(sorted([*one_each, *(Asked(float(at), name) for at in times)]), 60, 1)
    assert best == {**dict.fromkeys(SERVICES, 1), name: 4}


def test_a_budget_that_moves_is_foreseen_to_earn_more_than_any_split() -> None:
    asked = shift.arrivals(PHASE_S, shift.per_place(), seed=0)
    begin = {TEXTS: 4, IMAGES: 1, CHAT: 1}
    moves = shift.simulated(asked, 3 * PHASE_S, Joint(), begin, dict.fromkeys(SERVICES, 5.0))
    [best] = shift.best_splits(asked, 3 * PHASE_S, 1)
    stays = shift.simulated(asked, 3 * PHASE_S, shift.Fixed(best), best, {})
    assert moves.attainment > 1.1 * stays.attainment
    assert not any(stays.moves.values())
    assert shift.weighted(shift.shares(moves)) == pytest.approx(moves.attainment)


def test_what_is_answered_in_time_earns_its_worth() -> None:
    ends = [
        End(TEXTS, 0, "answered", 0.9, 1.0),
        End(TEXTS, 0, "answered", 1.1, 1.0),
        End(TEXTS, 0, "refused", 0.1, 0.0),
        End(IMAGES, 0, "answered", 0.5, 0.92),
        End(CHAT, 0, "answered", 1.9, 1.0),
        End(CHAT, 0, "504 too late", 0.1, 0.0),
    ]
    seen = Seen(ends)
    assert seen.attained() == pytest.approx({TEXTS: 1 / 3, IMAGES: 0.92, CHAT: 0.5})
    assert seen.lost() == ends[-1:]
    total = sum(WEIGHTS.values())
    expected = (WEIGHTS[TEXTS] / 3 + WEIGHTS[IMAGES] * 0.92 + WEIGHTS[CHAT] * 0.5) / total
    assert shift.weighted(seen.attained()) == pytest.approx(expected)


def test_a_place_is_new_once_a_replica_answers_that_was_not_there() -> None:
    looks = [look(0, 1, a=5), look(9, 1, a=9), look(12, 3, a=9), look(14, 3, a=9, b=0), look(17, 3, a=9, b=2, c=0)]
    assert clients.new_place_s(looks, TEXTS, 10) == 7
    assert clients.new_place_s(looks, CHAT, 10) == float("inf")
    assert clients.start_s(looks, TEXTS) == 5
    assert clients.start_s(looks, CHAT) is None
    assert clients.reasons(looks) == ["12 s: texts 1 → 3: why"]


def test_models_can_be_served(tmp_path: Path) -> None:
    made = {
        TEXTS: models.text_model(tmp_path / TEXTS),
        IMAGES: models.image_model(tmp_path / IMAGES),
        CHAT: models.chat_model(tmp_path / CHAT),
    }
    sizes = {name: {"min": 1, "max": 4} for name in SERVICES}
    assert build(shift.args(made, sizes, str(tmp_path), budget={}))


def test_chat_takes_the_time_that_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    model = models.chat_model(tmp_path / CHAT)
    engine = ChatReplica.engine(object.__new__(ChatReplica), LlmConfig(kind="llm", model=model))
    slept.clear()
    engine.add(Generation("one", (1,) * shift.PROMPT, shift.ANSWER, Sampling(), ignore_eos=True))
    pieces = []
    while engine.busy:
        pieces += [item for _, item in engine.step() if isinstance(item, Piece)]
    assert sum(len(piece.tokens) for piece in pieces) == shift.ANSWER
    assert sum(slept) == pytest.approx(2.1, abs=0.3)


@pytest.mark.virtual_time
async def test_clients_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes is sent at its time, however long others take."""
    loop = asyncio.get_running_loop()
    sent: list[tuple[float, str]] = []

    async def ask(_http: object, _address: str, asked: Asked, _number: int) -> End:
        sent.append((loop.time(), asked.service))
        await asyncio.sleep(5)
        return End(asked.service, asked.at_s, "answered", 5.0, 1.0)

    async def look_on(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(clients, "ask", ask)
    monkeypatch.setattr(clients, "_look_on", look_on)
    asked = [Asked(1.0, TEXTS), Asked(2.5, CHAT), Asked(2.5, IMAGES)]
    seen = await clients.play("http://nowhere", asked, loop.time())
    assert [name for _, name in sent] == [each.service for each in asked]
    assert [at for at, _ in sent] == pytest.approx([each.at_s for each in asked], abs=0.01)
    assert len(seen.ends) == 3
