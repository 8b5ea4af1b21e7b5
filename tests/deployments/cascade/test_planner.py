"""The planner's side of cascades: profile once, choose, tell gateways, and say what went wrong."""

from __future__ import annotations

import asyncio
import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.choosing import entry
from support.doubles import report
from support.scripted_cascade import Model, Service, texts
from support.waiting import until

from pliant.config.cascade import CascadeConfig
from pliant.deployments.cascade import levels as cascade_levels
from pliant.deployments.cascade import planner as cascades
from pliant.deployments.cascade import table
from pliant.deployments.cascade.choice import Choice, choose_for
from pliant.deployments.cascade.planner import CascadePart
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.messages import Report
from pliant.deployments.kinds import parse
from pliant.deployments.serving.choosing import part as choosing
from pliant.deployments.serving.choosing.follower import ChoiceFollower
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.kind import Planning
from pliant.deployments.serving.messages import News
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.table import ReplicaTable
from pliant.errors import DataError, ModelError
from pliant.models import sources
from pliant.models.revision import revision
from pliant.policies.cascade.resemblance import alike, degree
from pliant.policies.encoder.confidence import softmax
from pliant.training import labelled_texts

pytestmark = pytest.mark.virtual_time

ENCODER = {"kind": "encoder", "model": "m", "replicas": 1, "lengths": [64]}


class House:
    def __init__(self, state: str | None = None, **options: Any) -> None:
        cascade = {"kind": "cascade", "levels": ["small", "large"], "data": "d", "accuracy_loss": 0.02, **options}
        small = {**ENCODER, "importance": True}
        self.config = parse({"state": state, "services": {"small": small, "large": ENCODER, "c": cascade}})
        self.services = {"small": Service(Model("small", 0.85, 0.001)), "large": Service(Model("large", 0.97, 0.01))}
        self.tables: dict[str, ReplicaTable[Any, Report]] = {
            name: ReplicaTable(EncoderChooser(1.0)) for name in self.services
        }
        self.woken: list[str] = []
        self.replicas_report()

    def replicas_report(self, **changes: Any) -> None:
        """What the levels' replicas say of themselves from now on."""
        said: Any = {**report(64), **changes}
        for each in self.tables.values():
            each.sync({"r": said})

    def start(self, pauses_s: tuple[float, float] = (0.01, 0.02)) -> CascadePart:
        async def level(name: str) -> Any:
            return self.services[name]

        async def as_they_are(replicas: Sequence[str]) -> Sequence[str]:
            return replicas

        planning = Planning(self.config, {}, self.tables, lambda: None, level, 1, as_they_are, self.woken.append)
        return CascadePart(planning, pauses_s)

    @property
    def calls(self) -> int:
        return sum(len(service.calls) for service in self.services.values())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.safetensors").write_text("")
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sources, "fetch", lambda _model: tmp_path)
    monkeypatch.setattr(labelled_texts, "read", lambda _data, _labels: texts(400))
    monkeypatch.setattr(choosing, "_WAIT_S", 0.001)
    monkeypatch.setattr(choosing, "_LOOK_S", 10.0)
    monkeypatch.setattr(cascade_levels, "_RETRY_S", 0.001)
    return tmp_path / "cache"


async def test_a_profile_is_made_kept_and_told(cache: Path) -> None:
    house = House()
    part = house.start()
    found = await entry(part, "serves small → large: 9")
    assert found.choice.candidate.levels == ("small", "large")
    [kept] = [path for path in (cache / "cascades").iterdir() if path.is_dir()]
    assert {path.name for path in kept.glob("[!.]*")} == {"table.json", "readings.npz"}
    before = house.calls
    assert before > 800
    again = await entry(house.start(), "serves small → large")
    assert again == found
    assert house.calls == before


@pytest.fixture
def other_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has what follows run on another node, with a cache of its own, where the models came later."""

    def move() -> None:
        monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "other cache"))
        monkeypatch.setattr(sources, "fetch", lambda _model: tmp_path / "other models")

    (tmp_path / "other models").mkdir()
    (tmp_path / "other models" / "model.safetensors").write_text("")
    (tmp_path / "other models" / "zoo.json").write_text('{"seconds": 3}')
    os.utime(tmp_path / "other models" / "model.safetensors", (1, 1))
    (tmp_path / "state").mkdir()
    return move


async def test_a_profile_in_a_state_that_nodes_share_serves_a_planner_on_another(
    tmp_path: Path, other_node: Callable[[], None]
) -> None:
    house = House(state=str(tmp_path / "state"))
    found = await entry(house.start(), "serves small → large: 9")
    [kept] = (tmp_path / "state" / "cascades").iterdir()
    before = house.calls
    other_node()
    again = await entry(house.start(), "serves small → large: 9")
    assert (again, house.calls) == (found, before)
    (tmp_path / "other models" / "model.safetensors").write_text("of another model")
    await entry(house.start(), "serves small → large: 9")
    assert house.calls > before, "another model, another profile"
    assert len(list(kept.parent.iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"PK", None])
async def test_a_damaged_profile_in_the_state_is_measured_again(
    tmp_path: Path, other_node: Callable[[], None], damage: bytes | None
) -> None:
    house = House(state=str(tmp_path / "state"))
    await entry(house.start(), "serves")
    [kept] = (tmp_path / "state" / "cascades").iterdir()
    whole = kept.read_bytes()
    half = len(whole) // 2
    kept.write_bytes(whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :] if damage is None else damage)
    other_node()
    before = house.calls
    part = house.start()
    await entry(part, "serves")
    assert house.calls > before
    with zipfile.ZipFile(kept) as opened:
        assert opened.testzip() is None


async def test_a_profile_that_is_removed_while_the_planner_runs_is_measured_again(
    tmp_path: Path, cache: Path, other_node: Callable[[], None]
) -> None:
    house = House(state=str(tmp_path / "state"), accuracy_loss=None, accuracy_target=0.999, degrade=False)
    part = house.start()
    await entry(part, "cannot keep what it promises")
    [kept] = [path for path in (cache / "cascades").iterdir() if path.is_dir()]
    before = house.calls
    shutil.rmtree(kept)
    await until(lambda: house.calls > before)
    for task in part._tasks:
        task.cancel()


async def test_a_state_that_cannot_be_reached_keeps_nobody_from_serving(tmp_path: Path) -> None:
    house = House(state=str(tmp_path / "not mounted"))
    await entry(house.start(), "serves small → large")
    assert not (tmp_path / "not mounted").exists()


async def test_gateways_hear_of_it_also_from_a_new_planner() -> None:
    house = House()
    part = house.start()

    async def ask(method: str, *args: Any) -> Any:
        return await getattr(part, method)(*args)

    follower = ChoiceFollower(ask, "cascades")
    assert follower.known_as("c") is None
    found = await entry(part, "serves")
    await follower.ask(wait=False, within_s=5)
    assert follower.known_as("c") == found
    part = house.start()
    await entry(part, "serves")
    await follower.ask(wait=False, within_s=5)
    assert follower.known_as("c") == found


async def test_what_is_measured_before_models_are_compiled_serves_until_they_are_and_is_not_kept(cache: Path) -> None:
    house = House()
    house.replicas_report(compiling=[64])
    part = house.start()
    await entry(part, "serves small → large")
    assert not (cache / "cascades").exists()
    before = house.calls
    await asyncio.sleep(0.1)
    assert house.calls == before
    house.replicas_report()
    await until(lambda: house.calls > before)
    await entry(part, "serves small → large")
    assert len([path for path in (cache / "cascades").iterdir() if path.is_dir()]) == 1


async def test_what_replicas_of_an_earlier_version_say_serves_until_they_are_gone_and_is_not_kept(
    tmp_path: Path, cache: Path
) -> None:
    """As in the midst of a deploy."""
    house = House()
    house.replicas_report(revision=revision(tmp_path))
    (tmp_path / "model.safetensors").write_text("of a new version")
    part = house.start()
    await entry(part, "serves small → large")
    await asyncio.sleep(0.1)
    assert not (cache / "cascades").exists()
    before = house.calls
    house.services["small"] = Service(Model("small", 0.45, 0.001))
    house.replicas_report(revision=revision(tmp_path))
    await until(lambda: (cache / "cascades").exists() and house.calls > before)
    await entry(part, "serves small → large")
    [kept] = [path for path in (cache / "cascades").iterdir() if path.is_dir()]
    profiled = table.load(kept)
    assert profiled
    assert profiled.table.levels[0].accuracy < 0.6


async def test_what_was_kept_serves_at_once_while_models_are_compiled_again(cache: Path) -> None:
    await entry(House().start(), "serves small → large")
    house = House()
    house.replicas_report(compiling=[64])
    await entry(house.start(), "serves small → large")
    assert house.calls == 0


async def serving() -> tuple[House, CascadePart, Chosen]:
    """A planner that has chosen the pair."""
    house = House()
    part = house.start()
    return house, part, await entry(part, "serves small → large")


async def test_when_labelled_texts_are_replaced_it_is_profiled_anew_and_serves_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a drift."""
    house, part, first = await serving()
    before = house.calls
    await asyncio.sleep(100)
    assert house.calls == before, "the same texts, the same profile"

    def wrong(*_: Any) -> Any:
        raise DataError("line 7: the text is empty")

    monkeypatch.setattr(labelled_texts, "read", wrong)
    await asyncio.sleep(100)
    assert caplog.text.count("keeps to the labelled data that it was measured on: line 7: the text is empty") == 1
    assert part.catalog.entries["c"] == first
    monkeypatch.setattr(labelled_texts, "read", lambda _data, _labels: texts(600))
    found = await entry(part, "profiles its levels")
    assert found.choice == first.choice, "who comes now can answer"
    second = await entry(part, "serves small → large")
    assert second.choice.texts > first.choice.texts
    part.check()


def kept_in(cache: Path) -> table.Profiled:
    [folder] = [path for path in (cache / "cascades").iterdir() if path.is_dir()]
    profiled = table.load(folder)
    assert profiled
    return profiled


def less_sure(labelled: Counter[int]) -> Counter[int]:
    """Live texts like these, but of the two least degrees twice as many."""
    return Counter({each: number * (6 if each <= min(labelled) + 1 else 3) for each, number in labelled.items()})


async def test_after_a_drift_it_is_profiled_anew_on_the_labelled_texts_that_are_like_live_ones(
    cache: Path,
) -> None:
    house, part, first = await serving()
    before, profiled = len(house.services["small"].calls), kept_in(cache)
    labelled = Counter(map(degree, profiled.confidence[0].tolist()))
    harder = less_sure(labelled)
    part.hear("c", News(sure=harder))
    await asyncio.sleep(100)
    part.hear("c", News(drifts=1, sure=labelled + labelled))
    await asyncio.sleep(100)
    assert part.catalog.entries["c"] == first, "without a drift, or too few texts since, nothing is done"
    part.hear("c", News(drifts=1, sure=harder))
    second = await entry(part, "labelled texts that are like those that come now")
    rows = alike(profiled.confidence[0], labelled + labelled + harder)
    assert 200 < len(rows) < 400
    told = f", by the {len(rows)} of 400 labelled texts that are like those that come now"
    assert second.state.endswith(told)
    assert (second.choice.texts, second.choice.taken_from) == (len(rows), 400)
    assert first.choice.taken_from == 0
    given = labelled_texts.sample(texts(400), house.config.services["c"].seed)
    read = {call[0] for call in house.services["small"].calls[before:]}
    assert read == {given[profiled.given[row]].text for row in rows}
    part.hear("c", News(sure=harder))
    await asyncio.sleep(100)
    assert part.catalog.entries["c"] == second, "the drift is over"
    part.check()


async def test_a_level_that_serves_alone_since_a_drift_does_so_until_other_texts_come(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(config: CascadeConfig, profiled: table.Profiled) -> Choice:
        """By few texts the large level alone."""
        choice = choose_for(config, profiled)
        [alone] = [one for one in profiled.table.candidates if one.levels == ("large",)]
        return choice if profiled.table.texts > 350 else choice._replace(candidate=alone, latency_s=(0.01,))

    monkeypatch.setattr(cascades, "choose_for", chosen)
    house, part, _ = await serving()
    small = Counter(map(degree, kept_in(cache).confidence[0].tolist()))
    harder = less_sure(small)
    part.hear("c", News(drifts=1, sure=harder))
    alone = await entry(part, "serves large:")
    logits = [house.services["large"].model.logits(text.text) for text in texts(400)]
    [temperature] = alone.choice.candidate.temperatures
    large = Counter(degree(float(softmax(row, temperature).max())) for row in logits)
    for _ in range(3):
        part.hear("c", News(sure=Counter({min(large): 5000}) + large))
        await asyncio.sleep(30)
    assert part.catalog.entries["c"] == alone
    part.hear("c", News(sure=Counter({each: 3 * number for each, number in large.items()})))
    again = await entry(part, "serves small → large")
    assert 350 < again.choice.texts <= again.choice.taken_from == 400
    before = house.calls
    part.hear("c", News(sure=harder))
    await asyncio.sleep(100)
    assert house.calls == before, "a drift would show again"
    part.check()


async def test_drifts_of_what_an_earlier_planner_chose_are_not_its_own() -> None:
    house = House(accuracy_loss=None, accuracy_target=0.999, degrade=False)
    part = house.start()
    refused = await entry(part, "cannot keep what it promises")
    part.hear("c", News(drifts=1, sure=Counter({5: 5000})))
    await asyncio.sleep(10)
    assert part.catalog.entries["c"] == refused


@pytest.mark.parametrize("few", [True, False])
async def test_a_drift_to_texts_that_it_has_no_labels_of_changes_nothing_and_asks_for_them(
    few: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house, part, first = await serving()
    before = house.calls
    part.hear("c", News(drifts=1, sure=Counter({0: 5000})))
    if not few:
        monkeypatch.setattr(labelled_texts, "read", lambda _data, _labels: texts(600))
    await asyncio.sleep(100)
    if few:
        assert part.catalog.entries["c"] == first
        assert house.calls == before
        assert "200 are needed to profile it on: put more such texts into its data" in caplog.text
    else:
        found = await entry(part, "serves small → large")
        assert found.choice.texts > first.choice.texts
        assert found.choice.taken_from == 0
    part.check()


async def test_a_profile_of_another_processor_is_none_of_theirs() -> None:
    house = House()
    await entry(house.start(), "serves")
    before = house.calls
    house.replicas_report(device="another processor")
    await entry(house.start(), "serves")
    assert house.calls > before


async def test_it_waits_for_its_levels_and_says_so() -> None:
    house = House()
    house.services["large"].ready = False
    part = house.start()
    await entry(part, "waits for large")
    assert not house.calls
    house.services["large"].ready = True
    await entry(part, "profiles its levels: ")
    await entry(part, "serves")


async def test_replicas_that_fail_meanwhile_are_asked_again() -> None:
    house = House()
    large = house.services["large"]
    large.fails = RequestError(Outcome.UNAVAILABLE, "gone")
    part = house.start()
    await entry(part, "levels read the labelled texts")
    await asyncio.sleep(0.02)
    large.fails = None
    await entry(part, "serves")


async def test_a_profile_that_fails_is_tried_again_for_ever_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    small = house.services["small"]
    small.fails = ValueError("a bug")
    part = house.start()
    found = await entry(part, "could not be profiled yet")
    assert (found.problem, found.refused) == ("ValueError('a bug')", False)
    await asyncio.sleep(0.1)
    assert len(small.calls) > 1
    assert caplog.text.count("could not be profiled yet: ValueError('a bug')") == 1
    assert "Traceback" in caplog.text
    small.fails = None
    await entry(part, "serves small → large")
    part.check()


async def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        if seconds >= 1:
            pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", recorded)
    monkeypatch.setattr(sources, "fetch", lambda _model: (_ for _ in ()).throw(ModelError("no network")))
    part = House().start(pauses_s=(30.0, 600.0))
    while len(pauses) < 8:
        await sleep(0)
    assert pauses[:8] == [30, 60, 120, 240, 480, 600, 600, 600]
    for task in part._tasks:
        task.cancel()


async def test_a_cascade_that_nobody_sees_to_any_more_is_told() -> None:
    house = House()
    house.services["large"].ready = False
    part = house.start()
    await entry(part, "waits for large")
    part.check()
    part._tasks[0].cancel()
    await asyncio.wait(part._tasks)
    with pytest.raises(RuntimeError, match="a service is not started any more"):
        part.check()


async def test_a_promise_that_cannot_be_kept_is_told(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    house = House(slo_ms=1)
    part = house.start()
    found = await entry(part, "cannot keep what it promises; see /stats")
    [kept] = [path for path in (cache / "cascades").iterdir() if path.is_dir()]
    assert found.refused
    assert found.choice is None
    assert "within slo_ms 1; closest is small → large" in found.problem
    assert f"the profile is in {kept}: delete it to have the levels measured again" in found.problem
    before = house.calls
    await asyncio.sleep(0.1)
    assert caplog.text.count("cannot keep what it promises") == 1
    assert house.calls == before
    found = await entry(House(slo_ms=1, degrade=True).start(), "serves")
    assert found.choice.unmet
    assert "does not keep its promise" in caplog.text


@pytest.mark.parametrize("unsettled", [{"compiling": [64]}, {"revision": "fp_of_before"}])
async def test_what_is_refused_before_its_levels_have_settled_is_looked_at_once_they_have(
    tmp_path: Path, unsettled: dict[str, Any]
) -> None:
    house = House(slo_ms=50)
    seconds = {name: service.model.seconds for name, service in house.services.items()}
    for service in house.services.values():
        service.model.seconds = 0.1
    house.replicas_report(**unsettled)
    part = house.start(pauses_s=(30.0, 600.0))
    assert (await entry(part, "cannot keep what it promises")).refused
    for name, service in house.services.items():
        service.model.seconds = seconds[name]
    house.replicas_report(revision=revision(tmp_path))
    settled = asyncio.get_running_loop().time()
    await entry(part, "serves")
    assert asyncio.get_running_loop().time() < settled + 30


async def test_texts_that_come_later_will_do(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    there = False

    def read(_data: str, _labels: object) -> list[labelled_texts.LabelledText]:
        if not there:
            raise DataError("d: cannot be read: No such file")
        return texts(400)

    monkeypatch.setattr(labelled_texts, "read", read)
    part = House().start()
    found = await entry(part, "cannot use its labelled data; see /stats")
    assert (found.refused, found.problem) == (True, "d: cannot be read: No such file")
    await asyncio.sleep(0.1)
    assert caplog.text.count("cannot use its labelled data") == 1
    there = True
    await entry(part, "serves")


async def test_texts_that_tell_nothing_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = 0

    async def mixed_up(*_: object) -> None:
        nonlocal profiles
        profiles += 1
        raise DataError("small and large: labels are mixed up")

    monkeypatch.setattr(cascades, "profile", mixed_up)
    found = await entry(House().start(), "cannot use its labelled data")
    assert found.problem == "small and large: labels are mixed up"
    await asyncio.sleep(0.1)
    assert profiles == 1


async def test_a_profile_that_cannot_be_kept_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_folder: Path, _profiled: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cascades, "keep", full)
    house = House()
    await entry(house.start(), "serves small → large")
    assert "its profile is used, but cannot be kept in" in caplog.text
    assert "No space left" in caplog.text


@pytest.mark.parametrize("damage", ["table.json", "readings.npz", "half", "missing", "zeros"])
async def test_a_damaged_profile_is_measured_again(cache: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    expected = await entry(house.start(), "serves")
    [kept] = [path for path in (cache / "cascades").iterdir() if path.is_dir()]
    before, readings = house.calls, kept / "readings.npz"
    whole = readings.read_bytes()
    if damage in ("table.json", "readings.npz"):
        (kept / damage).write_bytes(b"")
    elif damage == "half":
        readings.write_bytes(whole[: len(whole) // 2])
    elif damage == "zeros":
        readings.write_bytes(whole[:100] + bytes(200) + whole[300:])
    else:
        readings.unlink()
    found = await entry(house.start(), "serves")
    assert found.choice.candidate.levels == expected.choice.candidate.levels
    assert house.calls > before
    assert "is damaged, and removed: it is measured again" in caplog.text
    before = house.calls
    await entry(house.start(), "serves")
    assert house.calls == before


async def test_what_another_process_has_mended_is_not_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await entry(House().start(), "serves")
    [kept] = [path for path in (cache / "cascades").iterdir() if path.is_dir()]
    read, calls = table._read, 0

    def mended(folder: Path) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError("damaged")
        return read(folder)

    monkeypatch.setattr(table, "_read", mended)
    assert table.load(kept)
    assert kept.exists()


async def test_levels_are_awake_while_it_is_found_out_what_serves_and_no_longer() -> None:
    house = House()
    house.services["large"].ready = False
    part = house.start()
    await until(lambda: house.woken.count("large") >= 3)
    assert set(house.woken) == {"small", "large"}
    house.services["large"].ready = True
    await entry(part, "serves small → large")
    woken = len(house.woken)
    await asyncio.sleep(60.0)
    assert len(house.woken) <= woken + 2
