"""The gateway's cascade over scripted levels: who answers, what is pruned, and what happens when a level fails."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import numpy as np
import pytest
from support.scripted_cascade import LABELS, CascadeRecorder, Model, Service, candidate, texts

from pliant.config.cascade import CascadeConfig
from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.pruning import Words
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Input, TokenIds
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.policies.cascade.calibration import softmax
from pliant.policies.cascade.candidates import Candidate
from pliant.texts import Pair

pytestmark = pytest.mark.virtual_time

PLAIN = ClassifyParameters()
TEXTS = [text.text for text in texts(60)]


class House:
    """A cascade of three levels, of which `chosen` serves."""

    def __init__(
        self,
        chosen: Candidate | None,
        unmet: str | None = None,
        fallback: Candidate | None = None,
        **options: Any,
    ) -> None:
        made = (("small", 0.7, LABELS), ("middle", 0.9, LABELS), ("large", 1.0, LABELS[::-1]))
        self.services = {name: Service(Model(name, accuracy, 0.001, labels)) for name, accuracy, labels in made}
        self.recorder = CascadeRecorder()
        config = CascadeConfig(
            kind="cascade",
            levels=("small", "middle", "large"),
            data="d",
            accuracy_loss=0.01,
            **{"check": 0.0, **options},
        )
        self.entry: Chosen | None = None
        self.asleep: set[str] = set()
        levels: Any = self.services
        self.cascade = CascadeClassifier(
            "topics-c", config, levels, lambda: self.entry, self.recorder, lambda name: name in self.asleep
        )
        if chosen:
            self.choose(chosen, unmet, fallback)

    def choose(
        self, chosen: Candidate, unmet: str | None = None, fallback: Candidate | None = None, pairs: bool = False
    ) -> None:
        choice = Choice(chosen, unmet, (0.001,) * len(chosen.levels), 1000, fallback, pairs=pairs)
        self.entry = Chosen("topics-c", f"serves {chosen}", choice)

    async def ask(self, text: Input, parameters: ClassifyParameters = PLAIN) -> Any:
        [prediction] = await self.cascade.classify([text], parameters)
        return prediction


async def test_a_sure_answer_comes_early() -> None:
    house = House(candidate("small", "large", cutoff=0.0, slope=1e6))
    prediction = await house.ask("w1 yes t3")
    assert prediction.labels[0] in LABELS
    assert prediction.details.level == "small"
    assert prediction.details.confidence == pytest.approx(prediction.scores[0])
    np.testing.assert_allclose(sum(prediction.scores), 1)
    assert not house.services["large"].calls
    assert house.recorder.events == [("answered", "small", 1.0)]
    assert house.recorder.levels == ["small"]
    assert house.recorder.ends == [Outcome.OK]


async def test_an_unsure_answer_goes_on_and_the_levels_vote() -> None:
    house = House(candidate("small", "middle", "large", weights=((1.0,), (0.3, 0.7), (0.2, 0.3, 0.5))))
    prediction = await house.ask("w1 yes t3")
    small, middle, large = (house.services[name].model.logits("w1 yes t3") for name in ("small", "middle", "large"))
    voted = softmax(np.stack([small, middle, large[::-1]]), 2.0).T @ [0.2, 0.3, 0.5]
    said = dict(zip(prediction.labels, prediction.scores, strict=True))
    assert [said[label] for label in LABELS] == pytest.approx(voted)
    assert prediction.scores == sorted(prediction.scores, reverse=True)
    assert prediction.details.level == "large"
    assert [event[:2] for event in house.recorder.events] == [
        ("rerouted", "small"),
        ("rerouted", "middle"),
        ("answered", "large"),
    ]
    assert house.recorder.levels == ["small", "middle", "large"]
    assert house.recorder.begins == [pytest.approx(softmax(small, 2.0).max())]


async def test_the_large_level_reads_the_pruned_text() -> None:
    house = House(candidate("small", "large", alpha=0.5))
    prediction = await house.ask("w1 w2 yes w3 t5")
    assert house.services["large"].calls[0][0] == "yes t5"
    assert house.services["small"].calls[0][3]
    assert not house.services["large"].calls[0][3]
    assert prediction.details.words_pruned == 3
    assert house.recorder.events[0] == ("rerouted", "small", 5, 3)


async def test_a_later_level_may_say_what_is_pruned() -> None:
    house = House(candidate("small", "middle", "large", alphas=(0.0, 0.5)))
    text = "w1 w2 yes w3 t5"
    prediction = await house.ask(text)
    read = [(name, *house.services[name].calls[0][::3]) for name in ("small", "middle", "large")]
    assert read == [("small", text, False), ("middle", text, True), ("large", "yes t5", False)]
    assert prediction.details.words_pruned == 3
    assert house.recorder.events[:2] == [("rerouted", "small", 0, 0), ("rerouted", "middle", 5, 3)]


async def test_both_texts_of_a_pair_are_pruned() -> None:
    house = House(None)
    house.choose(candidate("small", "large", alpha=0.5), pairs=True)
    prediction = await house.ask(Pair("w1 so w2", "w3 yes t5"))
    assert [call[0] for call in house.services["large"].calls] == [Pair("so", "yes t5")]
    assert prediction.details.words_pruned == 3


@pytest.mark.parametrize(
    ("pairs", "text", "reason"),
    [
        (False, Pair("a", "yes t1"), "was profiled on single texts, and answers no pairs; ask one of small, middle"),
        (True, "yes t1", "was profiled on pairs of texts, and answers no single texts; ask one of small, middle"),
        (False, TokenIds([1]), "is a cascade, which reads no token ids; ask one of small, middle"),
    ],
)
async def test_texts_of_another_sort_than_it_was_profiled_on_are_refused(pairs: bool, text: Input, reason: str) -> None:
    house = House(None)
    house.choose(candidate("small", "large"), pairs=pairs)
    with pytest.raises(RequestError, match=reason):
        await house.ask(text)
    assert not house.services["small"].calls


async def test_nothing_is_pruned_without_importance() -> None:
    house = House(candidate("small", "large", alpha=0.5))
    house.services["small"].model.attentive = False
    prediction = await house.ask("w1 yes t5")
    assert house.services["large"].calls[0][0] == "w1 yes t5"
    assert prediction.details.words_pruned == 0


async def test_the_same_seed_routes_alike_whatever_else_comes() -> None:
    async def routes(seed: int, order: list[str]) -> dict[str, str]:
        house = House(candidate("small", "large", cutoff=0.3), seed=seed)
        predictions = await house.cascade.classify(order, PLAIN)
        return {text: found.details.level for text, found in zip(order, predictions, strict=True) if found.details}

    first = await routes(1, TEXTS)
    assert len(set(first.values())) == 2
    assert first == await routes(1, TEXTS[::-1])
    assert first != await routes(2, TEXTS)


async def test_time_is_shared_among_levels() -> None:
    house = House(candidate("small", "large"))
    await house.ask("yes t1", ClassifyParameters(slo_ms=500, utility=0.5))
    [(_, first, utility, _)], [(_, second, _, _)] = house.services["small"].calls, house.services["large"].calls
    assert first is not None
    assert second is not None
    assert 0.4 < first < 0.5 - 0.001 + 1e-9
    assert second <= 0.5
    assert utility == 0.5


async def test_once_a_replica_failed_late_is_better_than_lost() -> None:
    house = House(candidate("small", "large"))
    house.services["small"].interrupted = True
    await house.ask("yes t1")
    assert house.services["large"].calls[0][1] is None


@pytest.mark.parametrize(
    ("failure", "reason", "because"),
    [
        (RequestError(Outcome.SHED, "busy", 2), "busy", "is overloaded"),
        (RequestError(Outcome.UNAVAILABLE, "gone"), "failed", "failed"),
        (RequestError(Outcome.REJECTED, "too long", fault=Fault.TOO_LONG), "failed", "failed"),
        (ValueError("a bug"), "failed", "failed"),
    ],
)
async def test_a_later_level_that_fails_is_done_without(failure: Exception, reason: str, because: str) -> None:
    house = House(candidate("small", "middle", "large", alpha=0.5), degrade=True)
    house.services["large"].fails = failure
    prediction = await house.ask("w1 yes t1")
    assert prediction.warning == f"degraded: answered without large, which {because}"
    assert prediction.details.degraded
    assert prediction.details.level == "middle"
    assert ("degraded", "large", reason) in house.recorder.events
    assert house.recorder.events[-1][:2] == ("answered", "middle")
    assert house.recorder.ends == [Outcome.DEGRADED]


async def test_a_level_that_is_down_is_not_waited_for() -> None:
    house = House(candidate("small", "large"), degrade=True)
    large = house.services["large"]
    large.down, large.ready = True, False
    assert house.cascade.ready
    prediction = await house.ask("yes t1")
    assert prediction.warning == "degraded: answered without large, which is down"
    assert not large.calls


async def test_a_level_that_hangs_is_left_when_the_time_is_up() -> None:
    house = House(candidate("small", "large"), degrade=True)
    house.services["large"].hangs = True
    prediction = await house.ask("yes t1", ClassifyParameters(slo_ms=50))
    assert prediction.warning == "degraded: answered without large, which did not answer in time"
    assert house.services["large"].late == 1


async def test_without_degrade_a_level_that_fails_is_an_error() -> None:
    house = House(candidate("small", "large"))
    house.services["large"].fails = RequestError(Outcome.SHED, "large is too busy", 2)
    with pytest.raises(RequestError, match="large is too busy; topics-c needs it for this text") as error:
        await house.ask("yes t1")
    assert (error.value.outcome, error.value.retry_after_s) == (Outcome.SHED, 2)
    assert house.recorder.ends == [Outcome.SHED]
    house.services["large"].ready = False
    assert not house.cascade.ready
    assert house.cascade.state == "serves small → large; large takes no long texts now"
    house.services["large"].down = True
    assert house.cascade.state == "serves small → large; large is down"


async def test_the_first_level_cannot_be_done_without_where_nothing_else_answers() -> None:
    house = House(candidate("small", "large"), degrade=True)
    house.services["small"].fails = RequestError(Outcome.UNAVAILABLE, "small is gone")
    with pytest.raises(RequestError, match=r"small is gone$"):
        await house.ask("yes t1")
    house.services["small"].ready = False
    assert not house.cascade.ready


async def test_a_client_that_leaves_ends_its_texts() -> None:
    house = House(candidate("small", "large"), degrade=True)
    house.services["large"].hangs = True
    task = asyncio.create_task(house.cascade.classify(TEXTS[:5], PLAIN))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert house.services["large"].cancelled == 5
    assert house.recorder.ends == [Outcome.CANCELLED] * 5


async def test_levels_that_sleep_are_asked_and_so_woken() -> None:
    house = House(candidate("small", "large"), degrade=True)
    large = house.services["large"]
    large.down, large.ready = True, False
    house.asleep.add("large")
    assert house.cascade.ready
    assert house.cascade.state == "serves small → large; large sleeps"
    prediction = await house.ask("w1 yes t3")
    assert prediction.warning == "degraded: answered without large, which is down"
    assert house.recorder.levels == ["small", "large"], "the planner hears that it was asked, and wakes it"
    strict = House(candidate("small", "large"))
    strict.services["small"].ready = False
    assert not strict.cascade.ready
    strict.asleep.add("small")
    assert strict.cascade.ready, "it waits for the level to wake"


async def test_scores_as_they_are_asked_for() -> None:
    house = House(candidate("small", "large"))
    plain = await house.ask("yes t1")
    logits = await house.ask("yes t1", ClassifyParameters(function_to_apply="none", top_k=2))
    assert logits.labels == plain.labels[:2]
    np.testing.assert_allclose(np.exp(logits.scores), plain.scores[:2])
    with pytest.raises(RequestError, match="got 'sigmoid'; topics-c is a cascade") as error:
        await house.ask("yes t1", ClassifyParameters(function_to_apply="sigmoid"))
    assert error.value.outcome == Outcome.REJECTED


async def test_until_something_is_chosen_clients_are_told_how_far_it_is() -> None:
    house = House(None)
    assert house.cascade.state == "waits for the planner"
    house.entry = Chosen("topics-c", "profiles its levels: 40%", None)
    assert not house.cascade.ready
    with pytest.raises(RequestError, match="topics-c is not ready yet: profiles its levels: 40%") as error:
        await house.ask("yes t1")
    assert error.value.outcome == Outcome.UNAVAILABLE


async def test_a_new_planner_does_not_undo_what_serves() -> None:
    house = House(candidate("small", "large"))
    assert house.cascade.ready
    for entry in (Chosen("topics-c", "waits for large", None), None):
        house.entry = entry
        assert house.cascade.ready
        await house.ask("yes t1")
    assert house.cascade.state == "serves small → large"
    house.choose(candidate("middle"))
    assert (await house.ask("yes t1")).details.level == "middle"


async def test_a_promise_that_is_not_kept_is_told_with_each_answer() -> None:
    house = House(candidate("large"), unmet="no candidate meets accuracy_target 0.99")
    prediction = await house.ask("yes t1")
    assert prediction.warning == "topics-c does not keep what it should; see /stats"
    assert not prediction.details.degraded
    assert house.cascade.facts()["unmet"] == "no candidate meets accuracy_target 0.99"


async def test_other_texts_than_in_the_profile_are_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    house = House(candidate("small", "large", shares=(0.5, 0.5)))
    with caplog.at_level(logging.WARNING, "pliant"):
        for _ in range(4):
            await house.cascade.classify([text.text for text in texts(60)], PLAIN)
    warnings = [record for record in caplog.records if "re-routed" in record.message]
    assert len(warnings) == 1
    assert warnings[0].message.startswith("topics-c: at small, 100% of the last")
    [warning] = house.cascade.facts()["warnings"]
    assert warning.startswith("topics-c: at small, 100% of the last")
    facts = house.cascade.facts()["reroutes"]["small"]
    assert house.recorder.drifts == [("small", False), ("small", True)]
    assert facts["drifts"] == 1
    assert facts["texts"] == facts["rerouted"] == 240
    assert "put more such texts into its data" in facts["drift"]
    same = House(candidate("small", "large", shares=(0.0, 1.0)))
    await same.cascade.classify(TEXTS, PLAIN)
    assert same.cascade.facts()["reroutes"]["small"]["drift"] is None


DOWN = RequestError(Outcome.UNAVAILABLE, "gone")
BUSY = RequestError(Outcome.SHED, "busy", 2)


def one_level(chosen: str, fallback: str, faster: bool = True) -> House:
    """`fallback` is the faster of the two, or the slower."""
    stands_in = candidate(fallback, mean_latency_s=0.0005 if faster else 0.002, temperatures=(0.5,))
    return House(candidate(chosen), fallback=stands_in, degrade=True)


@pytest.mark.parametrize(
    ("failure", "reason", "because"),
    [(BUSY, "busy", "is overloaded"), (DOWN, "failed", "failed"), (ValueError("a bug"), "failed", "failed")],
)
async def test_one_level_alone_is_done_without_as_well(failure: Exception, reason: str, because: str) -> None:
    house = one_level("large", "small")
    house.services["large"].fails = failure
    prediction = await house.ask("w1 yes t1")
    assert prediction.warning == f"degraded: answered without large, which {because}"
    details = prediction.details
    assert (details.level, details.degraded, details.words_pruned) == ("small", True, 0)
    assert house.recorder.events == [("degraded", "large", reason), ("answered", "small", 1.0)]
    said = dict(zip(prediction.labels, prediction.scores, strict=True))
    assert [said[label] for label in LABELS] == pytest.approx(
        softmax(house.services["small"].model.logits("w1 yes t1"), 0.5)
    )


async def test_the_fallback_reads_the_whole_text_when_the_first_level_is_down() -> None:
    house = House(candidate("small", "large", alpha=0.5), fallback=candidate("large"), degrade=True)
    small = house.services["small"]
    small.down, small.ready = True, False
    assert house.cascade.ready
    prediction = await house.ask("w1 yes t1")
    assert prediction.warning == "degraded: answered without small, which is down"
    assert prediction.details.level == "large"
    assert not small.calls
    assert [call[0] for call in house.services["large"].calls] == ["w1 yes t1"]
    assert house.cascade.state == "serves small → large; small is down"
    assert house.cascade.facts()["fallback"] == "large"
    house.services["large"].ready = False
    assert not house.cascade.ready


async def test_a_first_level_that_hangs_leaves_its_fallback_time() -> None:
    house = one_level("large", "small")
    house.services["large"].hangs = True
    prediction = await house.ask("w1 yes t1", ClassifyParameters(slo_ms=50))
    assert prediction.warning == "degraded: answered without large, which did not answer in time"
    budget_s = house.services["small"].calls[0][1]
    assert budget_s is not None


async def test_a_slower_level_does_not_take_over_from_a_busy_one() -> None:
    house = one_level("small", "large", faster=False)
    house.services["small"].fails = RequestError(Outcome.SHED, "small is too busy", 2)
    with pytest.raises(RequestError, match=r"^small is too busy$"):
        await house.ask("yes t1")
    assert not house.services["large"].calls
    house.services["small"].fails = DOWN
    assert (await house.ask("yes t1")).details.level == "large"


async def test_a_text_that_is_wrong_is_told_so_whoever_could_read_it() -> None:
    house = one_level("large", "small")
    house.services["large"].fails = RequestError(Outcome.REJECTED, "too long", fault=Fault.TOO_LONG)
    with pytest.raises(RequestError, match=r"^too long$"):
        await house.ask("yes t1")
    assert not house.services["small"].calls


async def test_when_the_fallback_fails_both_are_told() -> None:
    house = one_level("large", "small")
    house.services["large"].down = True
    house.services["small"].fails = RequestError(Outcome.UNAVAILABLE, "small is gone", 7)
    with pytest.raises(RequestError, match="small is gone; it is to answer instead of large, which is down") as error:
        await house.ask("yes t1")
    assert error.value.retry_after_s == 7
    assert house.recorder.ends == [Outcome.UNAVAILABLE]
    assert not house.recorder.events


class NoNumbers(Model):
    def logits(self, text: str) -> Any:
        return np.full(3, np.nan, np.float32)


async def test_what_is_no_number_is_no_answer() -> None:
    house = House(candidate("small", "large"), degrade=True)
    house.services["large"].model = NoNumbers("large", 1.0, 0.001)
    assert (await house.ask("yes t1")).warning == "degraded: answered without large, which failed"
    strict = House(candidate("small", "large"))
    strict.services["small"].model = NoNumbers("small", 1.0, 0.001)
    with pytest.raises(RequestError, match="small failed: what it computed") as error:
        await strict.ask("yes t1")
    assert error.value.outcome == Outcome.FAILED
    strict.services["small"].fails = ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        await strict.ask("yes t1")
    assert strict.recorder.ends == [Outcome.FAILED] * 2


async def test_two_gateways_route_alike() -> None:
    one, other = (House(candidate("small", "large", cutoff=0.3), seed=3) for _ in range(2))
    other.entry = one.entry
    ways = [await house.cascade.classify(order, PLAIN) for house, order in ((one, TEXTS), (other, TEXTS[::-1]))]
    assert ways[0] == ways[1][::-1]
    assert {found.details.level for found in ways[0] if found.details} == {"small", "large"}


@pytest.mark.parametrize("degrade", [False, True])
async def test_a_batch_fails_with_the_text_that_fails_unless_it_degrades(degrade: bool) -> None:
    house = House(candidate("small", "large"), degrade=degrade)
    large, bad = house.services["large"], TEXTS[7]
    read = large.read

    async def picky(text: str, *given: Any, **options: Any) -> Any:
        if text == bad:
            raise RequestError(Outcome.UNAVAILABLE, "no")
        return await read(text, *given, **options)

    large.read = picky  # type: ignore[method-assign, assignment]
    if degrade:
        found = await house.cascade.classify(TEXTS, PLAIN)
        assert [one.details.degraded for one in found if one.details] == [text == bad for text in TEXTS]
    else:
        with pytest.raises(RequestError, match="no; topics-c needs it"):
            await house.cascade.classify(TEXTS, PLAIN)


async def test_only_what_a_later_level_can_read_is_pruned_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(candidate("small", "large", alpha=0.5))
    house.services["large"].most_characters = 4500
    threads: list[bool] = []
    rest = Words.rest

    def watched(words: Words, alpha: float) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        assert len(words.text) == min(len(text), 4500)
        return rest(words, alpha)

    monkeypatch.setattr(Words, "rest", watched)
    for text in ("w1 yes t1", f"w1 yes {' ' * 5000}t1"):
        await house.ask(text)
    assert threads == [True, False]
    assert [call[0].split() for call in house.services["large"].calls] == [["yes", "t1"], ["yes"]]


async def test_a_new_choice_begins_without_drift() -> None:
    house = House(candidate("small", "large", shares=(0.5, 0.5)))
    for _ in range(4):
        await house.cascade.classify(TEXTS, PLAIN)
    house.choose(candidate("small", "middle"))
    await house.ask("yes t1")
    assert house.recorder.drifts == [("small", False), ("small", True), ("small", False)]


async def test_a_level_that_is_no_longer_asked_does_not_drift_any_more() -> None:
    house = House(candidate("small", "middle", "large", shares=(0.5, 0.4, 0.1)))
    for _ in range(4):
        await house.cascade.classify(TEXTS, PLAIN)
    assert ("middle", True) in house.recorder.drifts
    house.choose(candidate("small", "large", shares=(0.0, 1.0)))
    await house.ask("yes t1")
    assert not any(dict(house.recorder.drifts).values())
