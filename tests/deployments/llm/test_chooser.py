"""A gateway finds what a replica says it holds, and nobody else's."""

from __future__ import annotations

from typing import Any

import pytest
from support.scripted import report
from support.scripted_executor import EOS, ScriptedExecutor, byte_tokenizer

from pliant.deployments.llm.chooser import NearPrefix
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.errand import AnswerErrand
from pliant.deployments.llm.request import Generation, Piece
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.tenants import Tenant
from pliant.sampling import Sampling

PROMPT = tuple(range(20))


def answered(tenant: Tenant) -> tuple[dict[str, Any], tuple[int, ...]]:
    """What a replica reports that has answered a prompt, and both together."""
    engine = Engine(ScriptedExecutor(page=4), byte_tokenizer(), (EOS,), 10, 0.05)
    engine.add(Generation("first", PROMPT, 6, Sampling(), ignore_eos=True, tenant=tenant))
    text = list(PROMPT)
    while engine.busy:
        for _, item in engine.step():
            assert isinstance(item, Piece)
            text += item.tokens
    told: dict[str, Any] = {**report(), **engine.report()}
    return told, tuple(text)


def want(prompt: tuple[int, ...], share: bool = False) -> Any:
    return AnswerErrand(Generation("second", prompt, 5, Sampling()), "chat", 1, 1, share).want(late=False)


@pytest.mark.parametrize("behind", [(), (98, 99)])
def test_a_second_turn_goes_where_the_first_was_answered(behind: tuple[int, ...]) -> None:
    told, text = answered(Tenant())
    chooser = NearPrefix()
    chooser.update("busier", told, others=10)  # type: ignore[arg-type]
    chooser.update("idle", report(), others=0)
    assert chooser.choose(want(text + behind), ()).replica == "busier"
    assert chooser.choose(want(text + behind), ("busier",)).replica == "idle"
    assert chooser.choose(want((50, *text[1:])), ()).replica == "idle", "it begins otherwise"
    chooser.remove("busier")
    assert chooser.choose(want(text), ()).replica == "idle"


def test_what_another_tenant_has_there_is_of_no_use() -> None:
    told, text = answered(Tenant("another"))
    chooser = NearPrefix()
    chooser.update("busier", told, others=10)  # type: ignore[arg-type]
    chooser.update("idle", report(), others=0)
    assert chooser.choose(want(text), ()).replica == "idle"


def test_what_was_sent_there_counts_before_it_is_reported() -> None:
    chooser = NearPrefix()
    for name in "abc":
        chooser.update(name, report(), others=0)
    first = chooser.choose(want(PROMPT), ())
    assert {chooser.choose(want((*PROMPT, 7, 8)), ()).replica for _ in range(3)} == {first.replica}


def test_replicas_of_another_version_are_chosen_by_load() -> None:
    old: Any = {key: value for key, value in report().items() if key not in ("memory", "digest")}
    chooser = NearPrefix()
    chooser.update("a", old, others=5)
    chooser.update("b", old, others=0)
    assert chooser.choose(want(PROMPT), ()).replica == "b"


def test_people_are_not_shown_what_a_replica_holds() -> None:
    told, _ = answered(Tenant())
    table: ReplicaTable[Any, Any] = ReplicaTable(NearPrefix())
    table.sync({"a": told})  # type: ignore[dict-item]
    assert told["digest"]
    assert "digest" not in table.replicas()["a"]
