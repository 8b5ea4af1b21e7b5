"""What the cascade's benchmark promises of the systems that it compares: baselines at their best, and equal terms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Encoding, Tokenizer, models, pre_tokenizers

from pliant.bench.cascade import baselines, live, sequential
from pliant.bench.cascade.baselines import Ensemble
from pliant.bench.cascade.compiled import CompiledReader, Model
from pliant.bench.load import LoadError, session
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.readings import Level, Seen
from pliant.deployments.cascade.table import Profiled
from pliant.kernels.encoder.importance_classifier import WithImportance
from pliant.policies.cascade.calibration import Floats
from pliant.policies.cascade.candidates import Candidate
from pliant.training.labelled_texts import LabelledText

LABELS = ("a", "b", "c")
TEXTS = 400
ACCURACIES = {"tiny": 0.75, "small": 0.8, "large": 0.95}
SECONDS = {"tiny": 1e-3, "small": 2e-3, "large": 9e-3}
TOKENIZER = Tokenizer(models.WordLevel({"easy": 0, "hard": 1, "and": 2}, unk_token="and"))
TOKENIZER.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]


class Made:
    """Models that err on texts of their own."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._right = {name: rng.random(TEXTS) < accuracy for name, accuracy in ACCURACIES.items()}

    async def read(self, service: str, text: str, importance: bool, exits: Sequence[int] = ()) -> Seen:
        number = int(text.removeprefix("text "))
        right = self._right[service][number]
        logits = np.eye(3, dtype=np.float32)[(number + (not right)) % 3] * (3 if right else 1)
        return Seen(logits, None, TOKENIZER.encode(text), SECONDS[service], 0.0, SECONDS[service])


@pytest.fixture(scope="module")
def profiled() -> Profiled:
    texts = [LabelledText(f"text {number}", LABELS[number % 3]) for number in range(TEXTS)]
    levels = [Level(name, LABELS, False) for name in ACCURACIES]
    return asyncio.run(profile(Made(), levels, texts, 0, True, lambda what, done: None))


def test_the_best_single_model_is_the_fastest_that_meets_the_target_without_a_margin(profiled: Profiled) -> None:
    accuracy = {level.name: level.accuracy for level in profiled.table.levels}
    to_spare = 1e-9
    assert baselines.best_single(profiled.table, accuracy["large"] - accuracy["small"] - 1e-3) == "large"
    assert baselines.best_single(profiled.table, accuracy["large"] - accuracy["small"] + to_spare) == "small"
    assert baselines.best_single(profiled.table, accuracy["large"] - accuracy["tiny"] + to_spare) == "tiny"


def test_small_models_that_vote_are_the_fastest_that_meet_the_target_or_say_that_none_does(profiled: Profiled) -> None:
    assert not baselines.best_ensemble(profiled, 0.01).met
    generous = baselines.best_ensemble(profiled, 0.5)
    assert generous.met
    assert generous.members == ("tiny", "small")


def test_votes_are_weighted() -> None:
    rng = np.random.default_rng(0)
    said: dict[str, Floats] = {name: rng.dirichlet(np.ones(3), TEXTS) for name in ("tiny", "small")}
    for rule in ("majority", "softmax"):
        follows = Ensemble(("tiny", "small"), rule, (0.0, 1.0), True)
        np.testing.assert_array_equal(follows.answers(said), said["small"].argmax(axis=1))


class Sure:
    """A model that is sure of texts without "hard", and notes what it read."""

    def __init__(self, weights: int) -> None:
        self.bytes = weights
        self.texts: list[list[str]] = []
        self.told = 0

    def encode(self, text: str) -> Encoding:
        return TOKENIZER.encode(text)

    def read(self, encoding: Encoding) -> np.ndarray:
        return self.with_importance(encoding, lambda _: False).logits

    def with_importance(self, encoding: Encoding, wanted: Callable[[np.ndarray], bool]) -> WithImportance:
        self.texts.append(encoding.tokens)
        logits = np.array([0.1 if "hard" in encoding.tokens else 20.0, 0.0], np.float32)
        if not wanted(logits):
            return WithImportance(logits, None, 0.0)
        self.told += 1
        return WithImportance(
            logits, np.array([0.1 if token == "and" else 5.0 for token in encoding.tokens], np.float32), 0.25
        )


def _cascade(alpha: float) -> Candidate:
    return Candidate(
        levels=("small", "large"),
        cutoffs=(0.9,),
        alphas=(alpha,),
        temperatures=(1.0, 1.0),
        weights=((1.0,), (0.3, 0.7)),
        slope=10.0,
        accuracy=0.9,
        accuracy_error=0.0,
        loss=0.0,
        loss_error=0.0,
        mean_latency_s=1e-3,
        p75_latency_s=1e-3,
        p99_latency_s=1e-3,
        shares=(0.5, 0.5),
        early_accuracy_gap=0.0,
    )


@pytest.mark.parametrize(("alpha", "read"), [(0.0, ["hard", "and", "and"]), (0.5, ["hard"])])
def test_only_hard_texts_go_on_less_the_words_that_do_not_count(alpha: float, read: Sequence[str]) -> None:
    small, large = Sure(10), Sure(1000)
    made = cast("dict[str, Model]", {"small": small, "large": large})
    system = sequential.cascade(_cascade(alpha), made, seed=0)
    early, late = system("easy and and"), system("hard and and")
    assert large.texts == [read]
    assert small.told == (alpha > 0)
    assert early > 0
    assert late > 0


def test_a_text_past_the_gate_is_read_by_the_last_model_alone() -> None:
    small, large = Sure(10), Sure(1000)
    made = cast("dict[str, Model]", {"small": small, "large": large})
    system = sequential.cascade(replace(_cascade(0.5), gate=2), made, seed=0)
    system("hard and and")
    assert (small.texts, large.texts) == ([], [["hard", "and", "and"]])
    system("hard and")
    assert (len(small.texts), large.texts[1:]) == (1, [["hard"]])


def test_a_text_costs_the_bytes_of_each_model_for_as_long_as_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(sequential.time, "perf_counter", lambda: float(next(clock)))
    made = cast("dict[str, Model]", {"small": Sure(10), "large": Sure(1000)})
    assert sequential.alone(made["large"])("hard") == 1000
    system = sequential.cascade(_cascade(0.5), made, seed=0)
    assert system("easy and") == 10
    assert system("hard and") == 1010


def test_every_system_answers_every_text_in_every_pass() -> None:
    asked: dict[str, list[str]] = {"one": [], "other": []}

    def system(name: str) -> sequential.System:
        return lambda text: 3.0 if asked[name].append(text) is None else 0.0  # type: ignore[func-returns-value]

    texts = [str(number) for number in range(60)]
    found = sequential.run({name: system(name) for name in asked}, texts, 3, lambda: None)
    for name, of in asked.items():
        assert of == texts * 3
        assert found[name].seconds.shape == (3, 60)
        assert (found[name].seconds > 0).all()
        assert found[name].costs == [3.0] * 3


async def test_a_profile_reads_through_the_runtimes_and_times_importance_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0])
    monkeypatch.setattr("pliant.bench.cascade.compiled.time.perf_counter", lambda: next(clock))
    seen = await CompiledReader(cast("dict[str, Model]", {"small": Sure(1)})).read("small", "easy and", True)
    assert (seen.seconds, seen.compute_s, seen.importance_s) == (2.75, 1.75, 0.25)
    assert seen.importance is not None


async def test_texts_that_arrive_at_random_are_all_asked_for_and_a_refusal_is_an_error() -> None:
    asked = []

    async def answer(request: web.Request) -> web.Response:
        text = (await request.json())["inputs"]
        asked.append(text)
        return web.json_response([], status=429 if text == "too many" else 200)

    application = web.Application()
    application.router.add_post("/models/made", answer)
    async with TestServer(application) as server, session() as http:
        url = str(server.make_url("/models/made"))
        found = await live.at(http, url, ["one", "two", "three"], [0.0, 0.01, 0.02])
        assert found.shape == (3,)
        assert (found > 0).all()
        assert sorted(asked) == ["one", "three", "two"]
        with pytest.raises(LoadError, match="429"):
            await live.at(http, url, ["too many"], [0.0])


def test_live_figures_are_ratios_of_repetitions_side_by_side() -> None:
    def of(*means: float) -> list[Floats]:
        return [np.array([0.5 * mean, 1.5 * mean]) for mean in means]

    alone = {live.OURS: of(1, 2, 4), live.ONE_ENCODER: of(1, 1, 1), live.SINGLE: of(2, 4, 4), live.LARGE: of(2, 4, 4)}
    poisson = {0.5: {live.OURS: of(3, 3), live.ONE_ENCODER: of(2, 2), live.SINGLE: of(1, 1)}}
    measured = live.Measured(
        {live.OURS: "serves small → large", live.ONE_ENCODER: "serves an exit"}, alone, 90.0, poisson
    )
    figures = {figure.name: figure for figure in live.figures(measured, "made")}
    assert figures["live_mean_latency_vs_best_single_made"].value == 0.5
    assert "serves small → large" in figures["live_mean_latency_vs_best_single_made"].beside
    assert figures["live_p99_latency_vs_large_made"].value == pytest.approx(0.5)
    assert figures["live_poisson_0.5_mean_latency_vs_best_single_made"].value == pytest.approx(3)
    assert figures["live_poisson_0.5_p99_latency_vs_best_single_made"].value == pytest.approx(3)
    assert "serves an exit" in figures["live_one_encoder_mean_latency_vs_best_single_made"].beside
    assert figures["live_one_encoder_poisson_0.5_mean_latency_vs_best_single_made"].value == pytest.approx(2)
