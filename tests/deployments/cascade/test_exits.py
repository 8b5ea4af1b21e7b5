"""Exits of one encoder as levels of a cascade: profiled in one pass, and gone through within one call."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_classifiers
from support.scripted_cascade import LABELS, CascadeRecorder, Levels, Model, Service, candidate, texts

from pliant.cli import exit_training
from pliant.cli.exit_training import Splits
from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade import local
from pliant.deployments.cascade.choice import Choice, choose_for
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.levels import ClassifierReader, levels_of
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.readings import HANDED, Level
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.runtimes import ModelRuntimes
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.errors import CannotCompileError
from pliant.kernels.encoder.texts import Stop
from pliant.models import sources
from pliant.policies.cascade.candidates import Candidate
from pliant.training.labelled_texts import LabelledText, sample

PLAIN = ClassifyParameters()
TEXTS = [text.text for text in texts(60)]
CHAIN = ("small@2", "small@4", "small", "large")


def small() -> Model:
    model = Model("small", 0.9, 0.004)
    model.exits = {2: Model("two", 0.6, 0.001), 4: Model("four", 0.8, 0.002)}
    return model


class House:
    """A cascade through two exits of a service, all of it, and another one."""

    def __init__(self, chosen: Candidate, **options: Any) -> None:
        self.services: dict[str, Any] = {"small": Service(small()), "large": Service(Model("large", 1.0, 0.009))}
        self.recorder = CascadeRecorder()
        config = CascadeConfig(kind="cascade", levels=CHAIN, data="d", accuracy_loss=0.01, check=0, **options)
        fallback = candidate("large") if config.degrade else None
        choice = Choice(chosen, None, (0.001,) * len(chosen.levels), 1000, fallback)
        entry = Chosen("c", "serves", choice)
        self.cascade = CascadeClassifier("c", config, self.services, lambda: entry, self.recorder)

    async def ask(self, text: str) -> Any:
        [prediction] = await self.cascade.classify([text], PLAIN)
        return prediction


def votes(chosen: Candidate, text: str) -> tuple[str, Any]:
    """The level that answers, and the vote, as the policy has them from what all levels say."""
    one, large = small(), Model("large", 1.0, 0.009)
    said = {"small@2": one.exits[2], "small@4": one.exits[4], "small": one, "large": large}
    policy = chosen.cascade(0)
    rows = policy.calibrated([said[level].logits(text) for level in chosen.levels])
    index = next(index for index, row in enumerate(rows) if not policy.goes_on(text, index, row))
    return chosen.levels[index], policy.vote(rows[: index + 1])


@pytest.mark.parametrize("levels", [CHAIN, CHAIN[:3], ("small@2", "small@4"), ("small@2", "large"), ("small@4",)])
async def test_texts_take_the_way_that_the_policy_says_in_one_call_to_each_service(levels: tuple[str, ...]) -> None:
    chosen = candidate(*levels, cutoff=0.6)
    house = House(chosen)
    answered = set()
    for number, text in enumerate(TEXTS, 1):
        prediction = await house.ask(text)
        level, voted = votes(chosen, text)
        assert prediction.details.level == level
        assert prediction.scores == pytest.approx(sorted(voted, reverse=True))
        assert len(house.services["small"].calls) == number
        answered.add(level)
    assert answered == set(levels)
    drawn = house.cascade.facts()["reroutes"]
    onward = [event[1] for event in house.recorder.events if event[0] == "rerouted"]
    assert {level: facts["rerouted"] for level, facts in drawn.items()} == {
        level: onward.count(level) for level in levels[:-1]
    }


async def test_a_replica_gets_the_confidence_that_stops_this_text() -> None:
    house = House(candidate(*CHAIN, cutoff=1.0))
    await house.ask("w1 yes t1")
    assert house.services["small"].stops == [(Stop(2, 2.0, np.inf), Stop(4, 2.0, np.inf))]
    assert house.services["large"].stops == [()]
    last = House(candidate("small@2", "large", cutoff=1.0))
    await last.ask("w1 yes t1")
    assert last.services["small"].stops == [(Stop(2, 2.0, 0.0),)], "texts leave there for the other service"


async def test_a_service_that_fails_is_missing_with_all_of_its_levels() -> None:
    for services, level in ((("small",), "large"), (("large",), "small")):
        house = House(candidate(*CHAIN, cutoff=1.0), degrade=True)
        for service in services:
            house.services[service].fails = RequestError(Outcome.UNAVAILABLE, "gone")
        prediction = await house.ask("w1 yes t1")
        assert (prediction.details.level, prediction.details.degraded) == (level, True)
        assert f"degraded: answered without {services[0]}" in prediction.warning


async def measured() -> Any:
    reader = Levels(small(), Model("large", 0.97, 0.01))
    told = [Level(name, LABELS, False) for name in CHAIN]
    return reader, await profile(reader, told, sample(texts(400), 0), 0, True, lambda _text, _done: None)


async def test_a_profile_reads_each_text_once_for_all_exits_and_some_from_another_level() -> None:
    reader, found = await measured()
    assert len(reader.models["small"].read_texts) == 3 + 400 + 2 * min(400, HANDED)
    levels = {level.name: level for level in found.table.levels}
    assert list(levels) == list(CHAIN)
    words = np.mean([len(text.text.split()) for text in texts(400)])
    for level, seconds in zip(CHAIN, (0.001, 0.002, 0.004, 0.01), strict=True):
        assert levels[level].mean_latency_s == pytest.approx(seconds * words)
    for one in found.table.candidates:
        if one.levels == ("small@2", "small"):
            assert 0.001 * words <= one.mean_latency_s <= 0.004 * words * (1 + 1e-9)
    assert not any(any(one.alphas) for one in found.table.candidates)
    mixed = {one.levels for one in found.table.candidates}
    assert {("small@2", "small@4", "large"), ("small@4", "small"), ("small", "large")} <= mixed


async def test_what_is_chosen_adds_up_and_falls_back_to_another_service() -> None:
    _, found = await measured()
    chains = [one for one in found.table.candidates if one.levels == ("small@2", "small", "large")]
    only = replace(found, table=found.table.model_copy(update={"candidates": (chains[0], *found.table.candidates[:4])}))
    config = CascadeConfig(
        kind="cascade", levels=CHAIN, data="d", accuracy_target=0.1, degrade=True, slo_ms=1e6, check=0
    )
    choice = choose_for(config, only)
    assert choice.candidate.levels == ("small@2",)
    assert choice.fallback is not None
    assert choice.fallback.levels == ("large",)
    alone = replace(only, table=only.table.model_copy(update={"candidates": chains[:1]}))
    latency_s = choose_for(config, alone).latency_s
    means = {level.name: level.mean_latency_s for level in found.table.levels}
    handed_s = found.table.levels[-1].handed_s
    assert latency_s == pytest.approx((means["small@2"], means["small"] - means["small@2"], means["large"] + handed_s))


@pytest.fixture
def encoder(encoder_backend: str, tmp_path: Path) -> EncoderConfig:
    """A random encoder of three layers, with trained exits behind the first two; cascades have their own cut-offs."""
    folder = tiny_classifiers.save_with_words(tmp_path / "model", "bert")
    info = sources.describe(folder)
    splits = Splits(*(learned(count, info.labels, seed) for seed, count in enumerate((300, 100, 100))))
    exit_training.train(folder, info, (1, 2), splits, 1.0, tmp_path / "out", lambda _what, _done: None)
    return EncoderConfig(kind="encoder", model=str(tmp_path / "out"), replicas={"min": 1, "max": 1}, exit_levels=True)


def learned(count: int, labels: tuple[str, ...], seed: int) -> list[LabelledText]:
    """Most words of a label are its own."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        label = index % len(labels)
        words = (f"w{3 + (label if rng.random() < 0.8 else rng.randrange(3)) + 3 * rng.randrange(30)}" for _ in "12345")
        made.append(LabelledText(" ".join(words), labels[label]))
    return made


async def test_a_real_encoder_from_its_profile_to_its_answers(
    encoder_backend: str, encoder: EncoderConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncompiled(*_: object) -> None:
        raise CannotCompileError("not in a test")

    monkeypatch.setattr(ModelRuntimes, "settle_lengths", lambda _self: None)
    monkeypatch.setattr(ModelRuntimes, "compile", uncompiled)
    engines: list[Engine] = []
    monkeypatch.setattr(local, "Engine", lambda runtimes: engines.append(Engine(runtimes)) or engines[-1])
    classifiers, run_on = await local.local_classifiers({"t": encoder}, lambda _text, _done: None)
    assert run_on["t"][0].startswith(f"{encoder_backend} on ")
    [engine] = engines
    config = CascadeConfig(kind="cascade", levels=("t@1", "t@2", "t"), data="d", accuracy_loss=0.05, check=0)
    labels = tuple(classifiers["t"].labels)
    given = learned(300, labels, 7)
    read = levels_of(config, {"t": encoder}, classifiers)
    found = await profile(ClassifierReader(classifiers), read, sample(given, 0), 0, True, lambda _text, _done: None)
    exits = {level.name: level for level in found.table.levels}
    assert min(exits["t@1"].accuracy, exits["t@2"].accuracy) > 0.6 > exits["t"].accuracy
    assert exits["t@1"].mean_latency_s < exits["t@2"].mean_latency_s < exits["t"].mean_latency_s

    chosen = candidate("t@1", "t@2", "t", cutoff=0.5, temperatures=tuple(exits[name].temperature for name in exits))
    entry = Chosen("c", "serves", Choice(chosen, None, (0.001,) * 3, 300))
    cascade = CascadeClassifier("c", config, classifiers, lambda: entry, CascadeRecorder())
    policy, before = chosen.cascade(0), engine.report()
    stops = []
    for text in given[:60]:
        whole = await ClassifierReader(classifiers).read("t", text.text, False, (1, 2))
        rows = policy.calibrated([*whole.earlier, whole.logits])
        level = next(index for index in (0, 1, 2) if not policy.goes_on(text.text, index, rows[index]))
        stops.append((1, 2, tiny_classifiers.LAYERS)[level])
        [prediction] = await cascade.classify([text.text], PLAIN)
        assert prediction.details
        assert prediction.details.level == chosen.levels[level]
        assert prediction.scores == pytest.approx(sorted(policy.vote(rows[: level + 1]), reverse=True), abs=1e-5)
    assert len(set(stops)) == 3
    after = engine.report()
    assert after["passes"] - before["passes"] == 2 * 60, "one for each text, however many levels read it"
    counted = {layers: after["layers"].get(layers, 0) - before["layers"].get(layers, 0) for layers in (1, 2)}
    assert counted == {layers: stops.count(layers) for layers in (1, 2)}
    [plain] = await classifiers["t"].classify([given[0].text], PLAIN)
    assert engine.report()["layers"] == after["layers"], "clients of the service get all of its layers"
    assert plain.labels
