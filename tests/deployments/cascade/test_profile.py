"""The profile of a cascade over scripted levels: what is measured, kept and chosen, and what stops it."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scripted_cascade import LABELS, TOO_LONG, Levels, Model, texts, words_of
from support.waiting import HANGS_AFTER_S

from pliant.config.cascade import CascadeConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.choice import choose_for
from pliant.deployments.cascade.plot import plot
from pliant.deployments.cascade.profile import FOLDS, profile
from pliant.deployments.cascade.readings import HANDED, IN_A_ROW, ONE_OF, Level, Seen
from pliant.deployments.cascade.table import CascadeTable, Profiled, folder_of, identity, keep, load
from pliant.errors import DataError
from pliant.policies.cascade.candidates import Candidate, find_candidates
from pliant.policies.cascade.cascade import Cascade
from pliant.policies.cascade.choice import MARGIN, NoCandidateError, accurate
from pliant.texts import Pair, Text
from pliant.training.labelled_texts import LabelledText, sample

TEXTS = texts(600)
SMALL, MIDDLE, LARGE = ("small", 0.85, 0.001), ("middle", 0.92, 0.004), ("large", 0.97, 0.01)


def levels(*reversed_labels: str) -> Levels:
    return Levels(
        *(
            Model(name, accuracy, seconds, LABELS[::-1] if name in reversed_labels else LABELS)
            for name, accuracy, seconds in (SMALL, LARGE)
        )
    )


async def measured(reader: Levels, given: list[LabelledText] = TEXTS, prune: bool = True, seed: int = 0) -> Profiled:
    told = [
        Level(name, tuple(model.labels), index < len(reader.models) - 1)
        for index, (name, model) in enumerate(reader.models.items())
    ]
    return await profile(reader, told, sample(given, seed), seed, prune, lambda _text, _done: None)


def cascade(**changes: Any) -> CascadeConfig:
    given = {"kind": "cascade", "levels": ("small", "large"), "data": "d", "accuracy_loss": 0.01, **changes}
    return CascadeConfig.model_validate(given)


async def test_levels_are_measured_on_all_texts() -> None:
    reader = levels()
    found = await measured(reader)
    table = found.table
    given = sample(TEXTS, 0)
    assert (table.texts, table.left_out) == (len(TEXTS), 0)
    for index, level in enumerate(table.levels):
        model = reader.models[level.name]
        right = [LABELS[int(model.logits(text.text).argmax())] == text.label for text in given]
        assert level.accuracy == pytest.approx(np.mean(right))
        seconds = [model.seconds * len(words_of(text.text)) for text in given]
        assert level.mean_latency_s == pytest.approx(np.mean(seconds))
        assert found.probabilities[index].argmax(axis=1).tolist() == [
            int(model.logits(text.text).argmax()) for text in given
        ]
    small = table.levels[0]
    assert small.calibration_error_after < small.calibration_error_before
    assert table.best == 1


@pytest.mark.parametrize("fold", range(FOLDS))
async def test_no_text_is_calibrated_by_labels_of_its_own_fold(fold: int) -> None:
    given = sample(TEXTS, 0)
    told = [Level("small", LABELS, True), Level("large", LABELS, False)]
    others = [
        text._replace(label=LABELS[LABELS.index(text.label) - 1]) if index % FOLDS == fold and index % 3 else text
        for index, text in enumerate(given)
    ]
    found = [await profile(levels(), told, texts, 0, True, lambda _text, _done: None) for texts in (given, others)]
    same = (found[0].probabilities == found[1].probabilities).all(axis=(0, 2))
    assert same[fold::FOLDS].all()
    assert not np.delete(same, slice(fold, None, FOLDS)).any(), "all others are"
    assert found[0].table.levels[0].temperature != found[1].table.levels[0].temperature


async def test_levels_read_a_few_texts_in_turn() -> None:
    order: list[str] = []

    class Ordered(Levels):
        async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
            order.append(service)
            return await super().read(service, text, importance, exits)

    await measured(Ordered(*levels().models.values()), prune=False)
    runs = [(service, len([*same])) for service, same in groupby(order[6:])]
    in_a_row = [("small", IN_A_ROW), ("large", IN_A_ROW)]
    handed = [*in_a_row, *[("small", ONE_OF), ("large", 1)] * (IN_A_ROW // ONE_OF)]
    assert runs == in_a_row * (len(TEXTS) // IN_A_ROW) + handed * (HANDED // IN_A_ROW)


class Handing(Levels):
    """Takes `handed_s` longer for a text that another level has just read."""

    handed_s = 0.0
    last = ""

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        seen = await super().read(service, text, importance, exits)
        last, self.last = self.last, service
        return seen._replace(seconds=seen.seconds + self.handed_s * (service != last))


async def test_what_a_text_takes_longer_from_another_level_counts_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pliant.deployments.cascade.profile.time.perf_counter", lambda: 0.0)
    models = [Model(*SMALL), Model(*MIDDLE), Model(*LARGE)]
    free, paid = Handing(*models), Handing(*models)
    paid.handed_s = 0.0005
    without, handed = [(await measured(reader, texts(400), prune=False)).table for reader in (free, paid)]
    assert [level.handed_s for level in without.levels] == [0, 0, 0]
    assert [level.handed_s for level in handed.levels] == pytest.approx([0, 0.0005, 0.0005])
    assert [level.mean_latency_s for level in handed.levels] == [level.mean_latency_s for level in without.levels]
    known = {(one.levels, one.cutoffs, one.slope, one.gate): one for one in without.candidates}
    both = [
        (one, other)
        for one in handed.candidates
        if (other := known.get((one.levels, one.cutoffs, one.slope, one.gate)))
    ]
    assert {len(one.levels) for one, _ in both} == {1, 2, 3}
    for one, other in both:
        assert one.mean_latency_s - other.mean_latency_s == pytest.approx(
            0.0005 * (sum(one.reached[1:]) + one.gated_share), abs=1e-9
        )


async def test_a_decision_and_a_vote_count_where_a_text_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr("pliant.deployments.cascade.profile.time.perf_counter", lambda: 0.001 * next(ticks))
    table = (await measured(levels(), prune=False)).table
    assert [level.handed_s for level in table.levels] == pytest.approx([0.001, 0.001])


async def test_each_level_reads_each_whole_text_once_some_in_turn_and_pruned_texts_only_as_asked() -> None:
    reader = levels()
    await measured(reader)
    whole = [text.text for text in TEXTS]
    handed = [text.text for text in sample(TEXTS, 0)[:HANDED]]
    assert sorted(reader.models["small"].read_texts[3:]) == sorted(whole + 2 * handed)
    sent_on = handed[ONE_OF - 1 :: ONE_OF]
    large = reader.models["large"].read_texts
    pruned = [text for text in large if text not in set(whole)]
    assert pruned
    assert not any(word.startswith("w") for text in pruned for word in words_of(text))
    unpruned = levels()
    found = await measured(unpruned, prune=False)
    assert sorted(unpruned.models["large"].read_texts[3:]) == sorted(whole + handed + sent_on)
    assert not any(any(candidate.alphas) for candidate in found.table.candidates)


async def test_pairs_are_profiled_as_single_texts_are() -> None:
    def halved(text: LabelledText) -> LabelledText:
        words = str(text.text).split()
        return text._replace(text=Pair(" ".join(words[:1]), " ".join(words[1:])))

    reader = levels()
    found = await measured(reader, [*map(halved, TEXTS)])
    single = await measured(levels())
    assert (found.table.pairs, single.table.pairs) == (True, False)
    assert [level.accuracy for level in found.table.levels] == [level.accuracy for level in single.table.levels]
    assert any(any(one.alphas) for one in found.table.candidates)
    assert all(isinstance(text, Pair) for text in reader.models["large"].read_texts)
    assert choose_for(cascade(), found).pairs


async def test_pruned_words_make_cascades_faster() -> None:
    table = (await measured(levels())).table
    pairs = [one for one in table.candidates if len(one.levels) == 2]
    pruned = min(one.mean_latency_s for one in pairs if any(one.alphas))
    assert pruned < min(one.mean_latency_s for one in pairs if not any(one.alphas))


async def test_labels_may_be_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pliant.deployments.cascade.profile.time.perf_counter", lambda: 0.0)
    straight, turned = await measured(levels(), prune=False), await measured(levels("large"), prune=False)
    assert turned.table.candidates == straight.table.candidates
    np.testing.assert_array_equal(turned.probabilities, straight.probabilities)


async def test_labels_that_mean_other_things_are_told() -> None:
    reader = levels()
    reader.models["large"].labels = [LABELS[1], LABELS[2], LABELS[0]]
    told = [Level("small", LABELS, True), Level("large", LABELS, False)]
    with pytest.raises(DataError, match="large and small: two levels agree on"):
        await profile(reader, told, TEXTS, 0, True, lambda _text, _done: None)


async def test_levels_in_the_wrong_order_do_without_pruning(caplog: pytest.LogCaptureFixture) -> None:
    reader = Levels(Model(*LARGE), Model(*SMALL, attentive=False))
    found = await measured(reader)
    assert "not listed in rising accuracy (large 9" in caplog.text
    assert not any(any(candidate.alphas) for candidate in found.table.candidates)
    assert ("small", "large") in {candidate.levels for candidate in found.table.candidates}


async def test_texts_that_a_level_cannot_take_count_for_none() -> None:
    long = [LabelledText("no " * TOO_LONG + f"no t{number}", "no") for number in range(30)]
    table = (await measured(levels(), [*TEXTS, *long])).table
    assert table.left_out == 30
    assert table.texts == len(TEXTS)
    with pytest.raises(DataError, match="30 of 180 labelled texts are too long for a level; at least 200"):
        await measured(levels(), [*TEXTS[:150], *long])


async def test_a_third_level_tells_how_far_the_others_agree_on_words() -> None:
    reader = Levels(Model(*SMALL), Model(*MIDDLE), Model(*LARGE))
    table = (await measured(reader, texts(400))).table
    [same] = table.agreements
    assert (same.pruner, same.reader) == ("small", "middle")
    assert same.top_half == 1
    assert {len(candidate.levels) for candidate in table.candidates} == {1, 2, 3}


async def test_texts_of_one_word_have_no_agreement_to_report() -> None:
    given = [LabelledText(f"{text.label}{number}", text.label) for number, text in enumerate(texts(400))]
    reader = Levels(*(Wordy(name, *how) for name, *how in (SMALL, MIDDLE, LARGE)))
    table = (await measured(reader, given)).table
    assert table.agreements == ()
    assert {len(candidate.levels) for candidate in table.candidates} == {1, 2, 3}


class Wordy(Model):
    """Reads texts of one word, which says the label and a number."""

    def logits(self, text: str) -> np.ndarray:
        label = next(label for label in LABELS if text.startswith(label))
        return super().logits(f"{label} {text.removeprefix(label)}")


class Busy(Levels):
    """Each level has a way of 2 ms, and some texts meet a queue there, or a machine that does something else, when it
    is `busy`."""

    busy = False

    async def read(self, service: str, text: str, importance: bool, exits: Sequence[int] = ()) -> Seen:
        seen = await super().read(service, text, importance, exits)
        chance = int(hashlib.sha256((service + text).encode()).hexdigest(), 16)
        waits_s = 5.0 * (self.busy and chance % 20 == 0)
        compute_s = seen.compute_s + 3.0 * (self.busy and chance % 20 == 1)
        return seen._replace(seconds=compute_s + 0.002 + waits_s, compute_s=compute_s)


async def test_a_few_slow_waits_and_readings_move_neither_mean_nor_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels may have other clients while they are profiled."""
    monkeypatch.setattr("pliant.deployments.cascade.readings.time.perf_counter", lambda: 0.0)
    idle, busy = (Busy(*levels().models.values()) for _ in range(2))
    busy.busy = True
    alone, beside = await measured(idle), await measured(busy)
    assert beside.table == alone.table
    assert any(any(one.alphas) for one in alone.table.candidates)
    for level, model in zip(alone.table.levels, idle.models.values(), strict=True):
        words = [len(text.text.split()) for text in TEXTS]
        assert level.mean_latency_s == pytest.approx(0.002 + model.seconds * np.mean(words))
        assert level.p99_latency_s <= 0.002 + model.seconds * max(words) + 1e-9


class Slow(Levels):
    """To know which words are important takes a level `importance_s`."""

    importance_s = 0.0

    async def read(self, service: str, text: str, importance: bool, exits: Sequence[int] = ()) -> Seen:
        return (await super().read(service, text, importance, exits))._replace(
            importance_s=self.importance_s if importance else 0.0
        )


async def test_texts_pay_once_for_importance_however_many_levels_read_them_pruned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pliant.deployments.cascade.readings.time.perf_counter", lambda: 0.0)
    models = [Model(*SMALL), Model(*MIDDLE), Model(*LARGE)]
    free, paid = Slow(*models), Slow(*models)
    paid.importance_s = 1e-6
    without, told = await measured(free, texts(400)), await measured(paid, texts(400))
    pairs = list(zip(without.table.candidates, told.table.candidates, strict=True))
    assert {(len(one.levels), one.pruner) for one, _ in pairs if any(one.alphas)} == {(2, 0), (3, 0), (3, 1)}
    for one, other in pairs:
        onward = 0.0 if one.pruner is None else sum(one.shares[one.pruner + 1 :])
        assert (other.levels, other.cutoffs, other.alphas) == (one.levels, one.cutoffs, one.alphas)
        assert other.mean_latency_s - one.mean_latency_s == pytest.approx(1e-6 * onward, rel=1e-3, abs=1e-12)


@pytest.fixture
def search_returned(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the search for candidates, which runs in a thread, has come to an end."""
    returned = threading.Event()

    def wrapped(*given: Any) -> list[Candidate]:
        try:
            return find_candidates(*given)
        finally:
            returned.set()

    monkeypatch.setattr("pliant.deployments.cascade.profile.find_candidates", wrapped)
    return returned


async def test_a_level_that_is_lost_ends_the_profile_and_its_thread(search_returned: threading.Event) -> None:
    reader = levels()
    failing = reader.models["large"]
    logits = failing.logits

    def once_pruned(text: str) -> np.ndarray:
        if text not in {one.text for one in TEXTS}:
            raise ConnectionError("gone")
        return logits(text)

    failing.logits = once_pruned  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        await measured(reader)
    assert await asyncio.to_thread(search_returned.wait, HANGS_AFTER_S)


async def test_a_profile_can_be_cancelled_while_it_rereads(search_returned: threading.Event) -> None:
    reader = levels()
    rereading = asyncio.Event()

    def progress(text: str, _done: float) -> None:
        if "pruned" in text:
            reader.pause = asyncio.Event()
            rereading.set()

    told = [Level("small", LABELS, True), Level("large", LABELS, False)]
    task = asyncio.create_task(profile(reader, told, TEXTS, 0, True, progress))
    await rereading.wait()
    assert not search_returned.is_set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(search_returned.wait, HANGS_AFTER_S)


async def test_a_profile_is_kept_whole(tmp_path: Path) -> None:
    found = await measured(levels())
    keep(tmp_path / "kept", found)
    again = load(tmp_path / "kept")
    assert again
    assert again.table == found.table
    np.testing.assert_array_equal(again.probabilities, found.probabilities)
    np.testing.assert_array_equal(again.draws, found.draws)
    with np.load(tmp_path / "kept" / "readings.npz") as arrays:
        assert len(arrays["importance.small"]) == arrays["words.small"].sum()
        assert arrays["confidence"].shape == arrays["latency_s"].shape
    assert load(tmp_path / "nothing") is None
    assert folder_of("c", "x").name == "c-x"


async def test_the_picture_shows_what_is_chosen(tmp_path: Path) -> None:
    table = (await measured(levels(), prune=False)).table
    plot(table, tmp_path / "plot.png", table.candidates[-1])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_another_model_seed_text_or_machine_is_another_profile(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("weights")
    encoder = EncoderConfig(kind="encoder", model="m", replicas={"min": 1, "max": 1})
    encoders, folders = {"small": encoder, "large": encoder}, {"small": tmp_path, "large": tmp_path}
    on = {"small": ["aoti"], "large": ["aoti"]}
    names = {
        identity(cascade(), encoders, folders, TEXTS, on),
        identity(cascade(seed=1), encoders, folders, TEXTS, on),
        identity(cascade(prune=False), encoders, folders, TEXTS, on),
        identity(cascade(), encoders, folders, TEXTS[1:], on),
        identity(cascade(), encoders, folders, TEXTS, {**on, "large": ["eager"]}),
        identity(cascade(), {**encoders, "large": encoder.model_copy(update={"lengths": (8,)})}, folders, TEXTS, on),
    }
    (tmp_path / "model.safetensors").write_text("others")
    names.add(identity(cascade(), encoders, folders, TEXTS, on))
    assert len(names) == 7
    assert identity(cascade(accuracy_loss=0.1, degrade=True), encoders, folders, TEXTS, on) in names


async def test_the_choice_keeps_the_promise_and_is_faster_than_the_best_model() -> None:
    found = await measured(levels())
    choice = choose_for(cascade(accuracy_loss=0.02), found)
    assert (choice.unmet, choice.fallback, choice.conformal) == (None, None, None)
    assert choice.candidate.levels == ("small", "large")
    assert choice.candidate.loss + MARGIN * choice.candidate.loss_error <= 0.02
    assert choice.candidate.mean_latency_s < found.table.levels[1].mean_latency_s
    assert choice.texts == found.table.texts
    small, large = found.table.levels
    assert large.handed_s > 0
    assert choice.latency_s == (small.mean_latency_s, large.mean_latency_s + large.handed_s)


async def test_a_promise_that_cannot_be_kept_stops_the_cascade_unless_it_may_degrade() -> None:
    found = await measured(levels())
    with pytest.raises(NoCandidateError, match=r"accuracy_target 0\.999"):
        choose_for(cascade(accuracy_loss=None, accuracy_target=0.999), found)
    closest = choose_for(cascade(accuracy_loss=None, accuracy_target=0.999, degrade=True), found)
    assert closest.unmet
    assert "accuracy_target 0.999" in closest.unmet
    assert closest.candidate.loss <= 0
    late = choose_for(cascade(slo_ms=0.001, degrade=True), found)
    assert late.unmet
    assert "slo_ms" in late.unmet
    kept = accurate(found.table.candidates, accuracy_loss=0.01)
    assert late.candidate.p99_latency_s == min(one.p99_latency_s for one in kept)


@pytest.mark.parametrize("conformal", [None, {"epsilon": 0.03}])
async def test_equally_accurate_levels_have_a_choice_too(conformal: dict[str, float] | None) -> None:
    """The last resort is there whatever was found."""
    found = await measured(Levels(Model("small", 0.9, 0.001), Model("large", 0.9, 0.01)), prune=False)
    same = replace(found, table=found.table.model_copy(update={"candidates": tied(found.table.candidates)}))
    for service in (
        cascade(accuracy_loss=None, accuracy_target=0.999, degrade=True, conformal=conformal),
        cascade(accuracy_loss=0.0, slo_ms=0.001, degrade=True, conformal=conformal),
    ):
        choice = choose_for(service, same)
        assert choice.unmet
        best = same.table.levels[same.table.best].name
        assert choice.candidate.levels == ((best if conformal else "small"),)


def tied(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """None of which is sure to lose nothing."""
    return tuple(replace(one, loss=0.0, loss_error=0.01, p99_latency_s=one.mean_latency_s) for one in candidates)


async def test_a_service_that_may_degrade_has_another_level_to_fall_back_on() -> None:
    models = Model(*SMALL), Model(*MIDDLE), Model(*LARGE)
    found = await measured(Levels(*models), prune=False)
    for changes, first, fallback in (
        ({"accuracy_loss": 0.9}, "small", "middle"),
        ({"accuracy_loss": 0.9, "degrade": False}, "small", None),
        ({"conformal": {"epsilon": 1e-4, "delta": 0.05}}, "large", "small"),
    ):
        given = {"levels": ("small", "middle", "large"), "degrade": True, **changes}
        choice = choose_for(cascade(**given), found)
        assert choice.candidate.levels[0] == first
        assert (choice.fallback and choice.fallback.levels) == (fallback and (fallback,))


async def test_a_conformal_promise_leaves_certified_pairs_and_the_best_model() -> None:
    reader = Levels(Model("small", 0.9, 0.001), Model("middle", 0.95, 0.004), Model("large", 0.99, 0.01))
    found = await measured(reader, texts(2000), prune=False)
    promise = {"epsilon": 0.03, "delta": 0.1}
    choice = choose_for(cascade(levels=("small", "middle", "large"), conformal=promise, accuracy_loss=0.5), found)
    candidate = choice.candidate
    assert choice.unmet is None
    assert candidate.levels[-1] == "large"
    assert len(candidate.levels) == 2
    index = [level.name for level in found.table.levels].index(candidate.levels[0])
    policy = Cascade((1.0, 1.0), candidate.cutoffs, candidate.weights, candidate.slope)
    early = [
        not policy.goes_on(text.text, 0, row)
        for text, row in zip(sample(texts(2000), 0), found.probabilities[index], strict=True)
    ]
    answers = found.probabilities.argmax(axis=-1)
    assert (answers[index] != answers[2])[early].mean() < 0.03
    strict = choose_for(cascade(conformal={"epsilon": 1e-6}, accuracy_loss=0.5), found)
    assert strict.candidate.levels == ("large",)
    assert choice.conformal
    assert choice.conformal.startswith("epsilon 0.03, delta 0.1: small")
    assert f"{candidate.levels[0]} certifies " in choice.conformal
    assert strict.conformal
    assert "small: no cut-off can be certified: needs about 7" in strict.conformal


def test_a_table_is_what_it_says_it_is() -> None:
    with pytest.raises(ValueError, match="extra"):
        CascadeTable.model_validate({"labels": [], "seed": 0, "extra": 1})
