"""A gate from the profile to the gateway: kept, chosen, obeyed by the endpoint, and no re-route."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scripted_cascade import LABELS, CascadeRecorder, Levels, Model, Service, candidate, texts

from pliant.config.cascade import CascadeConfig
from pliant.deployments.cascade.choice import Choice, choose_for
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.panels import panels
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.readings import Level
from pliant.deployments.cascade.reroutes import Reroutes
from pliant.deployments.cascade.table import Profiled, keep, load
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.policies.cascade.calibration import softmax
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.choice import MARGIN
from pliant.training.labelled_texts import sample

pytestmark = pytest.mark.virtual_time

PLAIN = ClassifyParameters()
SHORT, LONG = "w1 w2 yes t1", "w1 w2 yes w3 t1"
GATED = candidate("middle", "large", alpha=0.5, gate=4, gated_share=0.2, shares=(0.0, 1.0))


class House:
    """A cascade of which `chosen` serves; the tokens of a text are its words."""

    def __init__(self, chosen: Candidate, **options: Any) -> None:
        made = (("small", 0.7, LABELS), ("middle", 0.9, LABELS), ("large", 1.0, LABELS[::-1]))
        self.services = {name: Service(Model(name, accuracy, 0.001, labels)) for name, accuracy, labels in made}
        self.recorder = CascadeRecorder()
        config = CascadeConfig(
            kind="cascade", levels=("small", "middle", "large"), data="d", accuracy_loss=0.01, check=0, **options
        )
        entry = Chosen("c", "serves", Choice(chosen, None, (0.001, 0.003), 1000))
        levels: Any = self.services
        self.cascade = CascadeClassifier("c", config, levels, lambda: entry, self.recorder)

    async def ask(self, text: str, parameters: ClassifyParameters = PLAIN) -> Any:
        [prediction] = await self.cascade.classify([text], parameters)
        return prediction


async def test_a_text_past_the_gate_is_read_by_the_last_level_alone_and_whole() -> None:
    house = House(GATED)
    prediction = await house.ask(LONG)
    assert not house.services["middle"].calls
    assert [(text, importance) for text, *_, importance in house.services["large"].calls] == [(LONG, False)]
    said = dict(zip(prediction.labels, prediction.scores, strict=True))
    alone = softmax(house.services["large"].model.logits(LONG)[::-1], 2.0)
    assert [said[label] for label in LABELS] == pytest.approx(alone)
    details = prediction.details
    assert (details.level, details.words_pruned, details.degraded) == ("large", 0, False)
    assert house.recorder.levels == ["large"]
    assert house.recorder.events == [("answered", "large", 1.0)]
    assert house.recorder.begins == []
    assert house.recorder.ends == [Outcome.OK]


async def test_other_texts_take_the_way_that_they_take_without_it() -> None:
    gated, plain = House(GATED), House(replace(GATED, gate=None, gated_share=0.0))
    assert await gated.ask(SHORT) == await plain.ask(SHORT)
    assert gated.recorder.events == plain.recorder.events
    assert gated.recorder.levels == ["middle", "large"]
    assert plain.cascade.facts()["gate"] is None


async def test_a_text_past_the_gate_is_no_reroute() -> None:
    house = House(GATED)
    for _ in range(300):
        await house.ask(LONG)
    await house.ask(SHORT)
    facts = house.cascade.facts()
    assert facts["gate"] == {"tokens": 4, "profiled_share": 0.2, "texts": 300}
    assert facts["reroutes"]["middle"]["texts"] == facts["reroutes"]["middle"]["rerouted"] == 1
    assert facts["reroutes"]["middle"]["profiled_share"] == pytest.approx(1.0)
    assert facts["warnings"] == []
    flow = next(panels(facts))
    assert flow.shares == pytest.approx({"middle": 0.0, "large": 1.0})  # type: ignore[union-attr]
    other = {**facts, "reroutes": {"middle": {**facts["reroutes"]["middle"], "texts": 100, "rerouted": 10}}}
    flow = next(panels(other))
    assert flow.shares == pytest.approx({"middle": 90 / 400, "large": 310 / 400})  # type: ignore[union-attr]


def test_the_profiled_share_is_that_of_texts_that_are_not_past_the_gate() -> None:
    chosen = candidate("small", "middle", "large", gate=9, gated_share=0.2, shares=(0.4, 0.1, 0.5))
    facts = Reroutes(chosen, 1000).facts()
    assert facts["small"]["profiled_share"] == pytest.approx(0.5)
    assert facts["middle"]["profiled_share"] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (RequestError(Outcome.SHED, "busy", 2), "busy"),
        (RequestError(Outcome.UNAVAILABLE, "gone"), "failed"),
        (ValueError("a bug"), "failed"),
    ],
)
async def test_the_first_level_stands_in_for_the_last_where_answers_may_degrade(
    failure: Exception, reason: str
) -> None:
    house = House(GATED, degrade=True)
    house.services["large"].fails = failure
    prediction = await house.ask(LONG)
    assert (prediction.details.level, prediction.details.degraded) == ("middle", True)
    assert prediction.warning.startswith("degraded: answered without large")
    assert house.recorder.events == [("degraded", "large", reason), ("answered", "middle", 1.0)]
    assert house.recorder.levels == ["large", "middle"]
    assert house.cascade.facts()["reroutes"]["middle"]["texts"] == 0
    strict = House(GATED)
    strict.services["large"].fails = failure
    with pytest.raises(type(failure), match=str(failure)):
        await strict.ask(LONG)
    assert not strict.services["middle"].calls


async def test_a_last_level_that_hangs_leaves_the_first_time_to_answer() -> None:
    house = House(GATED, degrade=True)
    house.services["large"].hangs = True
    prediction = await house.ask(LONG, ClassifyParameters(slo_ms=50))
    assert prediction.warning == "degraded: answered without large, which did not answer in time"


async def test_what_the_last_level_refuses_is_refused() -> None:
    house = House(GATED, degrade=True)
    house.services["large"].fails = RequestError(Outcome.REJECTED, "too long", fault=Fault.TOO_LONG)
    with pytest.raises(RequestError, match=r"^too long$"):
        await house.ask(LONG)


async def test_a_last_level_that_is_an_exit_is_where_the_text_stops() -> None:
    house = House(candidate("small", "large@2", gate=4, gated_share=0.2))
    large = house.services["large"].model
    large.exits[2] = Model("exit", 1.0, 0.0005, large.labels)
    prediction = await house.ask(LONG)
    assert prediction.details.level == "large@2"
    [[stop]] = house.services["large"].stops
    assert (stop.after, stop.sure_from) == (2, 0.0)
    assert not house.services["small"].calls


async def measured() -> Profiled:
    """On texts of 3 to 10 words, of which the small level takes as long as the large one."""
    models = Model("small", 0.85, 0.01), Model("large", 0.97, 0.01)
    levels = [Level(model.name, tuple(model.labels), model.name == "small") for model in models]
    return await profile(Levels(*models), levels, sample(texts(600), 0), 0, True, lambda _text, _done: None)


def cascade(**changes: Any) -> CascadeConfig:
    given = {"kind": "cascade", "levels": ("small", "large"), "data": "d", "accuracy_loss": 0.05, **changes}
    return CascadeConfig.model_validate(given)


async def test_gates_are_lengths_of_labelled_texts_and_kept_with_the_profile(tmp_path: Path) -> None:
    found = await measured()
    gated = [one for one in found.table.candidates if one.gate is not None]
    words = np.array([len(text.text.split()) for text in texts(600)])
    assert gated
    for one in gated:
        assert one.gated_share == pytest.approx((words > one.gate).mean())
    keep(tmp_path / "kept", found)
    again = load(tmp_path / "kept")
    assert again
    assert again.table == found.table


async def test_a_profile_from_before_there_were_gates_still_serves(tmp_path: Path) -> None:
    found = await measured()
    keep(tmp_path / "kept", found)
    table = json.loads((tmp_path / "kept" / "table.json").read_text())
    for one in table["candidates"]:
        del one["gate"], one["gated_share"]
    table["candidates"] = table["candidates"][: sum(one.gate is None for one in found.table.candidates)]
    (tmp_path / "kept" / "table.json").write_text(json.dumps(table))
    again = load(tmp_path / "kept")
    assert again
    assert list(again.table.candidates) == [one for one in found.table.candidates if one.gate is None]
    assert choose_for(cascade(), again).candidate.gate is None


async def test_a_gate_serves_where_the_tail_asks_for_it_and_not_where_early_answers_are_certified() -> None:
    found = await measured()
    gated = [
        one for one in found.table.candidates if one.gate is not None and one.loss + MARGIN * one.loss_error <= 0.05
    ]
    best = next(one for one in found.table.candidates if one.levels == ("large",))
    asked = replace(max(gated, key=lambda one: one.accuracy), mean_latency_s=best.mean_latency_s / 2)
    both = replace(found, table=found.table.model_copy(update={"candidates": (best, asked)}))
    choice = choose_for(cascade(), both)
    assert choice.candidate == asked
    assert len(choice.latency_s) == 2
    certified = choose_for(cascade(conformal={"epsilon": 0.9, "delta": 0.5}), both)
    assert certified.candidate == best
