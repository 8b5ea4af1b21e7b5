"""What a gateway knows of a language model's replicas while they come, die, and cannot be reached."""

from __future__ import annotations

import pytest
from pliant.deployments.llm.routing_table import LlmRoutingTable, shared
from support.scripted import report

from pliant.policies.cluster.live_tokens import NoReplicaError


def table(*replicas: str) -> LlmRoutingTable:
    made = LlmRoutingTable()
    made.sync({replica: report() for replica in replicas})
    return made


def test_a_process_has_one_table_of_each_service() -> None:
    assert shared("one") is shared("one")
    assert shared("one") is not shared("two")
    assert shared("one").gateway != shared("two").gateway


def test_only_what_others_sent_counts_beside_what_is_outstanding_here() -> None:
    known = table("a", "b")
    assert known.choose(100) == "a"
    known.sync({"a": report(**{known.gateway: 100}), "b": report(other=50, third=40)})
    assert {name: view["live_tokens"] for name, view in known.replicas().items()} == {"a": 100, "b": 90}
    assert known.choose(5) == "b"
    known.done("a", 100)
    assert known.choose(5) == "a", "the report is stale, but its share of this process is known better"


def test_a_dead_replica_is_never_chosen_again() -> None:
    known = table("a", "b")
    known.lose("a")
    known.sync({"a": report(), "b": report()})
    assert {known.choose(1) for _ in range(4)} == {"b"}
    known.done("a", 1)
    known.sync({"b": report()})
    known.lose("b")
    assert not known.ready
    with pytest.raises(NoReplicaError):
        known.choose(1)


def test_a_replica_that_cannot_be_reached_gets_nothing_until_it_is_trusted() -> None:
    known = table("a", "b")
    known.suspect("a")
    assert {known.choose(1) for _ in range(4)} == {"b"}
    known.suspect("b")
    assert not known.ready
    known.trust("a")
    assert known.ready
    assert known.choose(1) == "a"


def test_a_replica_without_a_report_may_be_chosen() -> None:
    known = LlmRoutingTable()
    assert not known.ready
    known.sync({"a": None})
    assert known.ready
    assert known.choose(1) == "a"
    assert known.max_length is None
    assert known.replicas() == {}


def test_an_adapter_has_its_replica() -> None:
    known = table("a", "b", "c")
    home = known.choose(10, adapter="sql")
    assert {known.choose(10, adapter="sql") for _ in range(3)} == {home}
    assert known.choose(10) != home, "requests without an adapter go where least is to do"
    known.suspect(home)
    second = known.choose(10, adapter="sql")
    assert second != home
    known.trust(home)
    assert known.choose(10, {home}, "sql") == second
