"""What `pliant serve` tells: each thing once, and when it happens."""

from __future__ import annotations

from typing import Any

from pliant.cli.serve_events import Row, Snapshot, Story, rows

KINDS = {"topics": "encoder", "chat": "llm"}


def replica(**changes: Any) -> dict[str, Any]:
    return {"compiling": [], "uncompiled": {}, **changes}


def snapshot(at_s: float = 1.0, gateway: str = "g", deployments: Any = None, **changes: Any) -> Snapshot:
    """Topics is ready with two replicas, chat loads; `changes` are those of topics."""
    topics = {
        "kind": "encoder",
        "ready": True,
        "state": "ready, 2 of 2 replicas",
        "done": None,
        "requests": {"ok": 5},
        "plan": {},
        "replicas": {"a": replica(), "b": replica()},
    }
    chat = {
        "kind": "llm",
        "ready": False,
        "state": "training, 40%",
        "done": 0.4,
        "requests": {},
        "plan": {},
        "replicas": {},
    }
    stats = {"gateway": gateway, "services": {"topics": {**topics, **changes}, "chat": chat}}
    return Snapshot(at_s, "starting Ray", stats, deployments=deployments or {})


def story() -> Story:
    return Story({"topics": "curl topics"})


def test_before_the_gateway_answers_all_wait_for_the_same() -> None:
    assert rows(Snapshot(0.0, "starting Ray"), KINDS) == [
        Row("topics", "encoder", "starting Ray", None, False),
        Row("chat", "llm", "starting Ray", None, False),
    ]
    assert story().events(Snapshot(0.0, "starting Ray"), KINDS) == []


def test_a_start_that_takes_long_is_told_with_where_to_look() -> None:
    told = story()
    late = [told.events(Snapshot(at_s, phase), KINDS) for at_s, phase in ((89, "a"), (90, "a"), (91, "a"), (92, "b"))]
    assert late == [[], [said("a")], [], [said("b")]]


def test_a_gateway_that_answers_no_more_is_no_start() -> None:
    told = story()
    told.events(snapshot(), KINDS)
    assert said("a") not in told.events(Snapshot(100.0, "a"), KINDS)


def test_a_gateway_that_wants_a_key_is_no_start_that_takes_long() -> None:
    assert story().events(Snapshot(100.0, "a", refused=True), KINDS) == []


def said(phase: str) -> str:
    return f"{phase}: nothing answers yet; the log may say why"


def test_a_service_that_gets_ready_says_how_to_try_it() -> None:
    told = story()
    assert told.events(snapshot(), KINDS) == ["topics is ready; try:\n  curl topics"]
    assert told.events(snapshot(), KINDS) == []
    assert rows(snapshot(), KINDS)[1] == Row("chat", "llm", "training, 40%", 0.4, False)


def test_one_that_is_ready_no_more_and_again() -> None:
    told = story()
    told.events(snapshot(), KINDS)
    gone = snapshot(ready=False, state="starting, 0 of 2 replicas", replicas={})
    assert told.events(gone, KINDS) == [
        "topics cannot answer now: starting, 0 of 2 replicas",
        "topics: replica a has left; 0 run",
        "topics: replica b has left; 0 run",
    ]
    assert told.events(snapshot(replicas={"c": replica()}), KINDS) == [
        "topics is ready again",
        "topics: replica c has come; 1 run",
    ]


def test_plans_and_what_replicas_compute_on_and_why() -> None:
    told, eager = story(), replica(backend="eager", reason="")
    told.events(snapshot(replicas={"a": eager, "b": eager}), KINDS)
    plan = {"version": 3, "reason": "shift", "replicas": {"64": 2, "512": 0}}
    compiled = replica(backend="c", reason="packed: it is faster")
    assert told.events(snapshot(plan=plan, replicas={"a": compiled, "b": eager}), KINDS) == [
        "topics: 1 of 2 replicas compute on c",
        "topics: packed: it is faster",
        "topics: plan 3 (shift): 2 for 64 tokens",
    ]
    assert told.events(snapshot(plan=plan, replicas={"a": compiled, "b": eager}), KINDS) == []
    assert told.events(snapshot(plan=plan, replicas={"a": compiled, "b": compiled}), KINDS) == [
        "topics: 2 of 2 replicas compute on c"
    ]


def test_a_missing_compiler_is_reported_once_for_all() -> None:
    told = story()
    told.events(snapshot(replicas={"a": replica(compiling=[64]), "b": replica(compiling=[64])}), KINDS)
    uncompiled = replica(uncompiled={"64": "No C++ compiler was found"})
    now = snapshot(replicas={"a": uncompiled, "b": uncompiled})
    assert told.events(now, KINDS) == ["topics: No C++ compiler was found"]
    assert told.events(now, KINDS) == []


def test_a_length_that_cannot_be_compiled_hides_no_other() -> None:
    told, eager = story(), replica(backend="eager")
    told.events(snapshot(replicas={"a": eager, "b": eager}), KINDS)
    stays = replica(backend="eager", uncompiled={"512": "512 tokens: no memory"})
    assert told.events(snapshot(replicas={"a": stays, "b": replica(backend="aoti")}), KINDS) == [
        "topics: 512 tokens: no memory",
        "topics: 1 of 2 replicas compute on aoti",
    ]


def test_shedding_begins_and_ends() -> None:
    told = story()
    told.events(snapshot(), KINDS)
    shed = {"ok": 5, "shed": 3}
    assert told.events(snapshot(2.0, requests=shed), KINDS) == ["topics refuses requests that it cannot answer in time"]
    assert told.events(snapshot(9.0, requests=shed), KINDS) == []
    assert told.events(snapshot(13.0, requests=shed), KINDS) == ["topics refuses no more"]


def test_gateways_count_for_themselves() -> None:
    told = story()
    told.events(snapshot(requests={"shed": 3}), KINDS)
    assert told.events(snapshot(requests={}, gateway="h"), KINDS) == []
    assert told.events(snapshot(requests={"shed": 3}), KINDS) == []


def test_what_serve_gave_up_says_why_in_one_line() -> None:
    message = "It failed to start 3 times in a row.\nTraceback\npliant.errors.ModelError: /m: has no weights\n"
    failed = {"chat": {"status": "DEPLOY_FAILED", "message": message, "replicas": {}}}
    told = story()
    expected = "failed: pliant.errors.ModelError: /m: has no weights"
    assert f"chat {expected}" in told.events(snapshot(deployments=failed), KINDS)
    assert rows(snapshot(deployments=failed), KINDS)[1].state == expected
    assert not any("chat" in event for event in told.events(snapshot(deployments=failed), KINDS))
