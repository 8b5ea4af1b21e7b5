"""The console: what it draws, what it sends and when, and to whom."""

from __future__ import annotations

import json
import random
import re
import tracemalloc
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
from fastapi import FastAPI
from support.asgi import Exchange
from support.tenants import tenants

from pliant.config.cluster import GatewayConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.console.charts import draw
from pliant.deployments.http.console.console import Console, _page
from pliant.deployments.kinds import KINDS, loaded
from pliant.deployments.serving.history import STEPS, History
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.panels import Bars, Chart, Flow, Panel, Stacks, Table, number
from pliant.deployments.serving.services import Services

REPORTS: dict[str, list[dict[str, Any]]] = {
    "encoder": [{}, {"max_length": 64, "served": 5, "computed_tokens": 320, "waiting": 1, "backend": "eager"}],
    "cascade": [],
    "llm": [{}, {"live": 3, "slots": 32, "served": 7, "adapters": {"resident": ["<a>"], "bytes": 9, "hits": 1}}],
    "vision": [{}, {"gamma": 2, "gammas": {"2": {"images": 4}}, "in_time": 4, "utility": 3.5}],
}
CASCADE = {
    "levels": ["small", "large"],
    "cutoffs": [0.9],
    "accuracy": 0.8,
    "accuracy_error": 0.01,
    "reroutes": {"small": {"texts": 10, "rerouted": 4, "profiled_share": 0.3, "drift": None}},
}


def stats(served: int = 0) -> dict[str, Any]:
    """What /stats says of a service of each kind."""
    views: dict[str, Any] = {}
    for kind, reports in REPORTS.items():
        replicas = {f"r{index}": {**report, "served": served} for index, report in enumerate(reports)}
        more = CASCADE if kind == "cascade" else {"adapters": 1} if kind == "llm" else {}
        views[f"a-{kind}"] = {"kind": kind, "ready": True, "state": "<ready>", "plan": {}}
        views[f"a-{kind}"]["requests_by_gateway"] = {"g": {"ok": served}}
        views[f"a-{kind}"] |= {"replicas": replicas, **more}
    return {"gateway": "g", "planner_reached": True, "services": views}


def history(steps: int = 2) -> History:
    found = History(loaded(KINDS))
    for step in range(steps):
        found.record(5.0 * step, stats(10 * step))
    return found


def console(clock: list[float], past: History | None = None) -> Console:
    return Console(stats, past or history(), clock=lambda: clock[0])


@pytest.mark.parametrize(
    "panel",
    [
        Chart("<b>", {"<script>": [1.0] * STEPS, "b": [0.5] * STEPS}, stacked=True),
        Chart("a", {"x": [float(step % 7) for step in range(STEPS)], "y": [0.0] * STEPS}),
        Chart("nothing", {}, stacked=True),
        Bars("<b>", {"<i>": 0.5}, unit="%", most=1.0),
        Bars("nothing", {}),
        Stacks("<b>", {"<i>": {"<p>": 3.0, "free": 1.0}, "b": {"<p>": 0.0, "free": 0.0}}, unit="bytes"),
        Stacks("nothing", {}),
        Flow("<b>", {"<i>": 0.5, "b": 0.5}),
        Flow("nothing", {}),
        Table("<b>", ("<c>",), [("<d>",), (1234.5,)]),
        Table("nothing", ("c",), []),
    ],
)
def test_panels_are_well_formed_whatever_they_are_called(panel: Panel) -> None:
    drawn = ElementTree.fromstring(draw(panel))
    assert drawn.tag == "figure"
    assert drawn.findtext("figcaption") == panel.title
    assert not [element for element in drawn.iter() if element.tag in ("script", "i", "d")]


def test_what_is_drawn_is_said_in_words_too() -> None:
    values = [0.0] * (STEPS - 2) + [5.0, 2.5]
    drawn = ElementTree.fromstring(draw(Chart("texts", {"64": values, "512": values}, stacked=True)))
    image = drawn.find("svg")
    assert image is not None
    assert image.attrib["aria-label"] == "texts: 64 2.5, 512 2.5"
    behind, before = (polygon.attrib["points"].split() for polygon in image.findall("polygon"))
    assert (behind[-4], before[-4]) == ("178,1", "178,30"), "one value stands on the other"
    assert len(before) == 6, "equal heights need no points of their own"


def test_a_stack_is_as_wide_as_what_its_parts_hold() -> None:
    parts = {"requests": 1.0 * 2**20, "adapters": 2.0 * 2**20, "free": 1.0 * 2**20}
    drawn = ElementTree.fromstring(draw(Stacks("memory", {"r1": parts}, unit="bytes")))
    [image] = drawn.iter("svg")
    assert image.attrib["aria-label"] == "r1: requests 1.0 MiB, adapters 2.0 MiB, free 1.0 MiB"
    assert [(each.attrib["x"], each.attrib["width"]) for each in image] == [("0.0", "60.0"), ("60.0", "120.0")]
    assert "".join(next(drawn.iter("li")).itertext()) == "r1 3.0 MiB of 4.0 MiB"


def test_a_band_is_as_high_as_what_flows_through_it() -> None:
    drawn = ElementTree.fromstring(draw(Flow("texts", {"small": 0.5, "large": 0.4, "largest": 0.1})))
    image = drawn.find("svg")
    assert image is not None
    assert image.attrib["aria-label"].endswith("large answers 40.0% of 50.0%, largest answers 10.0% of 10.0%")
    heights = [float(re.findall("v([0-9.]+)", path.attrib["d"])[0]) for path in image.findall("path")]
    assert heights == [30.0, 30.0, 24.0, 6.0, 6.0], "what each level answers, and then what it sends on"


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [(0, "", "0"), (0.12345, "", "0.123"), (1234.5, "", "1234"), (0.5, "%", "50.0%"), (3 * 2**20, "bytes", "3.0 MiB")],
)
def test_numbers(value: float, unit: str, said: str) -> None:
    assert number(value, unit) == said


def test_all_kinds_are_shown_with_what_is_wrong_first() -> None:
    sections = console([1.0]).sections()
    assert list(sections) == [
        *("trouble", "now", "services", "budget"),
        *(f"service-a-{kind}" for kind in REPORTS),
        *("events", "try"),
    ]
    for html in sections.values():
        ElementTree.fromstring(f"<section>{html}</section>")
    assert "All services are ready" in sections["trouble"]
    assert "Replicas" in sections["service-a-encoder"]
    assert "60.0%" in sections["service-a-cascade"], "the small level sent 4 of 10 on"
    assert "&lt;a&gt;" in sections["service-a-llm"]
    assert sum(map(len, sections.values())) < 150_000


WORK: dict[str, Mapping[str, Any]] = {
    "encoder": {"tokens": 200, "computed_tokens": 320, "tenants": {"a": 1.5, "b": 0.5}},
    "llm": {
        "classes": [{"waiting": 2, "admitted": 4, "waited_s": 2.0}],
        "prompts": 5,
        "prompts_s": 1.0,
        "tenants": {"a": 90.0, "b": 10.0},
        "adapters": {"resident": ["law", "sql"], "bytes": 9, "hits": 1, "hottest": {"sql": 7, "poems": 2}},
    },
    "vision": {"tenants": {"a": 0.25, "b": 0.75}},
}
"""What one replica has done five seconds after it had done nothing."""


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("encoder", "Tokens per second: padding 24, texts 40"),
        ("encoder", "Computing that waits, by tenant: a 1.5 s, b 0.5 s"),
        ("llm", "Time to the first token, mean: wait for a slot 500 ms, prompt 200 ms"),
        ("llm", "Tokens that wait, by tenant: a 90, b 10"),
        ("llm", "sql 7 1 poems 2 0 law 0 1"),
        ("vision", "Computing that waits, by tenant: a 0.25 s, b 0.75 s"),
    ],
)
def test_a_service_explains_itself(kind: str, shown: str) -> None:
    def view(report: Mapping[str, Any]) -> dict[str, Any]:
        found = stats()
        found["services"][f"a-{kind}"]["replicas"] = {"r": {**REPORTS[kind][1], **report}}
        return found

    idle: dict[str, Any] = {"tokens": 0, "computed_tokens": 0, "prompts": 0, "prompts_s": 0.0}
    if "classes" in WORK[kind]:
        idle["classes"] = [{"waiting": 0, "admitted": 0, "waited_s": 0.0}]
    past = History(loaded(KINDS))
    past.record(0.0, view(idle))
    past.record(5.0, view(WORK[kind]))
    section = Console(lambda: view(WORK[kind]), past).sections()[f"service-a-{kind}"]
    drawn = ElementTree.fromstring(f"<section>{section}</section>")
    texts = [image.attrib["aria-label"] for image in drawn.iter("svg")]
    texts += [" ".join("".join(cell.itertext()) for row in body for cell in row) for body in drawn.iter("tbody")]
    assert shown in texts


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("llm", {"problems": ["sql cannot be read"]}, "sql cannot be read"),
        ("cascade", {"problem": "none of 9 candidates is fit"}, "a-cascade: none of 9 candidates is fit"),
        ("cascade", {"warnings": ["a-cascade: at small, texts have changed"]}, "a-cascade: at small, texts have"),
        ("vision", {"ready": False, "state": "loads"}, "a-vision is not ready: loads"),
    ],
)
def test_the_first_sentence_says_what_needs_a_person(kind: str, more: Mapping[str, Any], said: str) -> None:
    found = stats()
    found["services"][f"a-{kind}"] |= more
    trouble = Console(lambda: found, history()).sections()["trouble"]
    assert said.lower() in trouble.lower()
    assert 'class="bad"' in trouble


def test_everything_has_a_name_and_can_be_reached_by_keyboard() -> None:
    sections = console([1.0]).sections()
    page = ElementTree.fromstring(f"<main>{''.join(sections.values())}</main>")
    tags = [element for tag in ("svg", "meter") for element in page.iter(tag)]
    assert {tag.tag for tag in tags} == {"svg", "meter"}
    assert all(tag.get("aria-label") for tag in tags)
    labelled = {control for label in page.iter("label") for control in label.iter() if control.get("name")}
    assert labelled == {control for control in page.iter() if control.get("name")}
    scrolls = [element for element in page.iter("div") if element.get("class") == "wide"]
    assert scrolls
    assert all(element.get("tabindex") == "0" and element.get("aria-label") for element in scrolls)


def busy(replicas: int, step: int, chance: random.Random) -> dict[str, Any]:
    """What /stats says of a service of each kind with so many replicas in all, whose loads are never the same."""
    found = stats()
    for view in found["services"].values():
        view["replicas"] = {}
        view["requests_by_gateway"] = {"g": {outcome: step * chance.randrange(99) for outcome in Outcome}}
    for index in range(replicas):
        kind = ("encoder", "llm", "vision")[index % 3]
        gammas = {str(gamma): {"images": step * chance.randrange(99)} for gamma in (-8, 0, 8)}
        varies = ("waiting", "live", "served", "computed_tokens", "in_time", "late", "utility")
        loads = {key: step * chance.randrange(99) for key in varies}
        report = {**REPORTS[kind][1], **loads, "max_length": (64, 128, 512)[index % 3], "gammas": gammas}
        found["services"][f"a-{kind}"]["replicas"][f"replica-{index:03}"] = report
    return found


def test_a_quarter_of_an_hour_of_fifty_replicas_is_small_to_keep_and_to_show() -> None:
    chance, past = random.Random(1), History(loaded(KINDS))
    tracemalloc.start()
    for step in range(STEPS + 1):
        past.record(5.0 * step, busy(50, step, chance))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 50 * 2**20
    page, _ = _page()
    shown = Console(lambda: busy(50, STEPS, chance), past).sections()
    assert len(page.encode()) + len(json.dumps(dict(shown)).encode()) < 150_000


def many(services: int, replicas: int, step: int, chance: random.Random) -> dict[str, Any]:
    """What /stats says of so many services, each of a kind and with as many replicas."""
    views = {}
    for index in range(services):
        kind, view = list(busy(replicas, step, chance)["services"].items())[index % len(REPORTS)]
        views[f"{kind}-{index}"] = view
    return {**stats(), "services": views}


def test_of_many_services_each_is_in_the_overview_and_one_is_shown_by_name() -> None:
    chance, past = random.Random(1), History(loaded(KINDS))
    for step in range(STEPS + 1):
        past.record(5.0 * step, many(32, 12, step, chance))
    shown = Console(lambda: many(32, 12, STEPS, chance), past)
    assert all(shown.sections(service)["services"].count("#service-") == 32 for service in ("", "a-llm-30", "nobody"))
    details = [[name for name in shown.sections(each) if name.startswith("service-")] for each in ("a-llm-30", "")]
    assert details[0] == ["service-a-llm-30"]
    assert len(details[1]) == 8
    assert shown.sections("nobody").keys() == shown.sections().keys()


@pytest.mark.virtual_time
async def test_the_page_and_its_first_event_are_small_however_many_services_are_busy() -> None:
    chance, past = random.Random(1), History(loaded(KINDS))
    for step in range(STEPS + 1):
        past.record(5.0 * step, many(32, 12, step, chance))
    gateway = application(GatewayConfig(), Services([]), lambda: many(32, 12, STEPS, chance), lambda: b"", history=past)
    packed = [(b"accept-encoding", b"gzip, br")]
    page = await Exchange(gateway, "/console", "GET", packed).over()
    viewer = await Exchange(gateway, "/console/stream", "GET", packed).settled()
    assert viewer.headers["content-encoding"] == "gzip"
    event = zlib.decompressobj(wbits=31).decompress(viewer.body)
    assert json.loads(event.removeprefix(b"data: ")).keys() >= {"services", "try"}
    assert len(page.body) + len(viewer.body) < 150_000
    await viewer.left()


def test_who_holds_which_gpus_and_why_is_shown_where_there_are_any() -> None:
    found = stats()
    assert "GPUs" not in Console(lambda: found, history()).sections()["budget"]
    llm = found["services"]["a-llm"]
    judged = {"demand_per_s": 2.5, "in_time": 0.91, "one_more": 0.04, "start_s": 8.4, "start_measured": True}
    llm |= {"gpus": 4.0, "plan": {"wanted_replicas": 3, "wanted_because": "<it earns>", "budget": judged}}
    past = History(loaded(KINDS))
    past.record(0.0, found)
    budget = Console(lambda: found, past).sections()["budget"]
    assert 'aria-label="GPUs, by the service that holds them: a-llm 8"' in budget
    for said in ("<td>3</td>", "2.50", "91.0%", "4.0%", "8 s", "&lt;it earns&gt;"):
        assert said in budget


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"planner_reached": False}, "The planner cannot be reached"),
        ({"ready": False, "state": "loading"}, "A-llm is not ready: loading"),
        ({"replicas": {"r": {"ejected": True}}}, "A-llm: replica r fails"),
        ({"replicas": {"r": {"line": "failed"}}}, "A-llm: replica r is called through Ray"),
        ({"problems": ["lora: an adapter is broken"]}, "Lora: an adapter is broken"),
    ],
)
def test_what_is_wrong_is_one_sentence(change: Mapping[str, Any], said: str) -> None:
    found = stats()
    (found if "planner_reached" in change else found["services"]["a-llm"]).update(change)
    assert said in Console(lambda: found, history(0)).sections()["trouble"]


def test_requests_that_were_not_answered_in_time_are_what_is_wrong() -> None:
    past, found = History(loaded(KINDS)), stats()
    past.record(0.0, found)
    for name, missed in (("a-llm", 2), ("a-vision", 8), ("a-encoder", 0)):
        found["services"][name]["requests_by_gateway"] = {"g": {"ok": 10 - missed, "shed": missed}}
    past.record(5.0, found)
    found["services"]["a-encoder"]["requests_by_gateway"] = {"g": {"ok": 10, "failed": 3}}
    past.record(10.0, found)
    sections = Console(lambda: found, past).sections()
    tiles = {tile[1].text: tile[0].text for tile in ElementTree.fromstring(f"<p>{sections['now']}</p>")}
    assert tiles["in time"] == "60.6%"
    assert [tiles[f"{what} per second"] for what in ("answers", "refused", "failed")] == ["0.333", "0.167", "0.05"]
    said = sections["trouble"]
    assert "A-vision answered 20.0% of the last minute&#x27;s requests in time (and 2 more)" in said


@pytest.mark.virtual_time
async def test_only_what_has_changed_is_sent() -> None:
    clock = [1.0]
    past = history()
    shown = console(clock, past)
    changes = shown.changes()
    assert json.loads((await anext(changes)).removeprefix("data: ")).keys() == shown.sections().keys()
    assert (await anext(changes)).startswith(":")
    clock[0] = 3.0
    past.record(10.0, stats(40))
    assert "now" in json.loads((await anext(changes)).removeprefix("data: "))


def app(**configs: dict[str, Any]) -> FastAPI:
    found = tenants(**configs) if configs else None
    return application(GatewayConfig(), Services([]), stats, lambda: b"", tenants=found, history=history())


@pytest.mark.virtual_time
async def test_only_who_may_observe_sees_what_is_shown() -> None:
    guarded = app(sees={"rights": ["observe"]}, asks={"rights": ["infer"]})
    assert (await Exchange(guarded, "/console", "GET").over()).status == 200
    for key, status in ((b"", 401), (b"asks", 403)):
        headers = [(b"authorization", b"Bearer " + key)] if key else []
        assert (await Exchange(guarded, "/console/stream", "GET", headers).over()).status == status
    viewer = await Exchange(guarded, "/console/stream", "GET", [(b"authorization", b"Bearer sees")]).settled()
    assert (viewer.status, viewer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert viewer.body.startswith(b"data: {")
    await viewer.left()


@pytest.mark.virtual_time
async def test_the_page_needs_nothing_but_this_server() -> None:
    page = await Exchange(app(), "/console", "GET").over()
    assert page.status == 200
    text = page.body.decode()
    assert "/*style*/" not in text
    assert "/*script*/" not in text
    assert "://" not in text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
