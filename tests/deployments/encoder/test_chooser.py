"""Which replica a gateway sends a text to, through reports that come late, twice, or from the dead."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import pytest
from support.doubles import report

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.errand import TextWant
from pliant.deployments.encoder.kind import KIND
from pliant.deployments.encoder.messages import Report
from pliant.deployments.serving.table import Choice, NoReplicaError, NoTimeError, ReplicaTable

ARLO = {"dispatch": "arlo", "slo_ms": 1000}


class Gateway:
    """What one knows of two replicas, or of others."""

    def __init__(self, **replicas: Report | None) -> None:
        self.chooser = EncoderChooser(slo_s=1.0)
        self.table: ReplicaTable[TextWant, Report] = ReplicaTable(self.chooser)
        self.table.sync(replicas or {"short": report(64), "long": report(512)})

    def choose(
        self, length: int, budget_s: float | None = None, slack_share: float = 1.0, avoid: Collection[str] = ()
    ) -> Choice:
        return self.table.choose(TextWant(length, budget_s, slack_share), avoid)

    def chosen(self, length: int, **options: Any) -> str:
        """Nothing is sent there."""
        choice = self.choose(length, **options)
        self.table.done(choice)
        return choice.replica


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_the_shortest_runtime_that_fits_is_chosen(gateway: Gateway) -> None:
    assert gateway.chosen(64) == "short"
    assert gateway.chosen(65) == "long"
    assert gateway.chooser.serves(512)
    assert not gateway.chooser.serves(513)


def test_where_replicas_take_all_lengths_home_is_a_preference() -> None:
    home = Gateway(near={**report(512), "home": 64}, far={**report(512), "home": 512})
    assert [home.chosen(length) for length in (64, 65, 512)] == ["near", "far", "far"]
    assert {home.choose(64).replica for _ in range(4)} == {"near", "far"}, "short texts may spill over"
    assert home.chosen(512, avoid=["far"]) == "near"


def test_a_report_of_an_older_version_has_no_home() -> None:
    old: Any = report(64)
    del old["home"]
    assert Gateway(short=old, long=report(512)).chosen(64) == "short"


def test_replicas_that_are_later_than_predicted_get_less_to_do() -> None:
    margins = {"anonymous": 1.0, "other": 0.0}
    sent = Gateway(only={**report(64), "margins": margins})
    for _ in range(5):
        sent.choose(64, budget_s=0.1)
    with pytest.raises(NoTimeError):
        sent.choose(64, budget_s=0.1)
    sent.choose(64, budget_s=0.12)
    old: Any = report(64)
    del old["margins"]
    assert Gateway(short=old).chosen(64, budget_s=0.1) == "short"


def test_the_papers_rule_can_be_had() -> None:
    chooser = KIND.chooser(EncoderConfig.model_validate({"kind": "encoder", "model": "m", "replicas": 1, **ARLO}))
    table: ReplicaTable[TextWant, Report] = ReplicaTable(chooser)
    table.sync({"short": report(64), "long": report(512)})
    chosen = [table.choose(TextWant(10, None, 1.0), ()).replica for _ in range(100)]
    assert chosen[:80] == ["short"] * 80, "up to 0.85 of what it can do within the SLO, however idle others are"
    assert "long" in chosen[80:90]


def test_a_refusal_corrects_the_table_at_once_and_stale_news_do_not_undo_it(gateway: Gateway) -> None:
    gateway.table.observe("short", report(128, version=3))
    assert gateway.chosen(100) == "short"
    gateway.table.sync({"short": report(64, version=1), "long": report(512)})
    assert gateway.chosen(100) == "short"


def test_a_replica_that_switches_gets_nothing(gateway: Gateway) -> None:
    gateway.table.observe("short", report(0, version=2))
    assert gateway.chosen(10) == "long"
    gateway.table.observe("short", report(64, version=3))
    assert gateway.chosen(10) == "short"


def test_a_replica_that_switched_still_has_what_it_was_sent(gateway: Gateway) -> None:
    sent = [gateway.choose(10) for _ in range(2)]
    gateway.table.observe(sent[0].replica, report(0, version=2))
    gateway.table.observe(sent[0].replica, report(64, version=3))
    busy = gateway.choose(10, avoid=({"short", "long"} - {sent[0].replica}))
    assert busy.predicted_s == pytest.approx(0.01 + 0.01 * sum(choice.replica == busy.replica for choice in sent))
    for choice in (*sent, busy):
        gateway.table.done(choice)
    assert gateway.choose(10).predicted_s == pytest.approx(0.01)


def test_the_dead_do_not_come_back_while_the_controller_still_lists_them(gateway: Gateway) -> None:
    choice = gateway.choose(500)
    gateway.table.lose("long")
    gateway.table.sync({"short": report(64), "long": report(512)})
    gateway.table.trust("long")
    gateway.table.done(choice)
    with pytest.raises(NoReplicaError):
        gateway.choose(500)
    gateway.table.sync({"short": report(64), "new": report(512)})
    assert gateway.chosen(500) == "new"


def test_an_unreachable_replica_gets_nothing_until_it_is_trusted_again(gateway: Gateway) -> None:
    gateway.table.suspect("short")
    assert gateway.chosen(10) == "long"
    gateway.table.trust("short")
    assert gateway.chosen(10) == "short"


def test_a_replica_that_the_planner_moves_gets_nothing_whatever_it_reports_meanwhile(gateway: Gateway) -> None:
    gateway.table.stop_routing({"short"})
    assert gateway.chosen(10) == "long"
    gateway.table.observe("short", report(64, service_s=0.02))
    assert gateway.chosen(10) == "long"
    gateway.table.observe("short", report(128, version=3))
    gateway.table.stop_routing(())
    assert gateway.chosen(100) == "short"


def test_moving_and_unreachable_are_two_reasons(gateway: Gateway) -> None:
    gateway.table.stop_routing({"short"})
    gateway.table.suspect("short")
    gateway.table.stop_routing(())
    assert gateway.chosen(10) == "long"
    gateway.table.trust("short")
    assert gateway.chosen(10) == "short"


def test_moving_replicas_that_left_are_forgotten(gateway: Gateway) -> None:
    gateway.table.stop_routing({"short"})
    gateway.table.sync({"long": report(512)})
    gateway.table.stop_routing(())
    assert gateway.chosen(10) == "long"


def test_a_late_word_from_a_replica_that_left_does_not_bring_it_back(gateway: Gateway) -> None:
    gateway.table.sync({"short": report(64)})
    gateway.table.observe("long", report(512, version=5))
    assert not gateway.chooser.serves(512)


def test_a_replica_that_has_not_reported_yet_gets_nothing() -> None:
    gateway = Gateway(new=None)
    with pytest.raises(NoReplicaError):
        gateway.choose(1)


def test_people_see_reports_and_outstanding_requests(gateway: Gateway) -> None:
    first, second = gateway.choose(500), gateway.choose(500)
    gateway.table.done(first)
    assert second.replica == "long"
    assert gateway.table.replicas()["long"]["outstanding"] == 1
    assert gateway.table.replicas()["long"]["max_length"] == 512
    assert gateway.table.replicas()["short"]["outstanding"] == 0


def test_who_is_to_be_avoided_is_not_chosen(gateway: Gateway) -> None:
    assert gateway.chosen(10, avoid={"short"}) == "long"
    with pytest.raises(NoReplicaError):
        gateway.choose(10, avoid={"short", "long"})


def test_what_other_gateways_have_sent_counts() -> None:
    gateway = Gateway(free=report(64), crowded=report(64))
    crowded = report(64)
    crowded["held"] = {"another gateway": 0.5}
    gateway.table.observe("crowded", crowded)
    gateway.choose(10, avoid={"crowded"})
    assert [gateway.chosen(10, budget_s=0.2) for _ in range(3)] == ["free"] * 3
    with pytest.raises(NoTimeError):
        gateway.choose(10, budget_s=0.2, avoid={"free"})


def test_what_a_replica_says_of_this_gateway_does_not_count_twice(gateway: Gateway) -> None:
    gateway.choose(500)
    held = report(512)
    held["held"] = {gateway.table.gateway: 0.01}
    gateway.table.observe("long", held)
    assert gateway.choose(500).predicted_s == pytest.approx(0.02)


def test_work_is_predicted_by_length() -> None:
    dynamic = report(512)
    dynamic["curve"] = ((16, 0.001, 0.001), (512, 0.1, 0.1))
    gateway = Gateway(only=dynamic)
    assert gateway.choose(16).predicted_s == pytest.approx(0.001)
    assert gateway.choose(512).predicted_s == pytest.approx(0.101)
    assert gateway.choose(16).predicted_s == pytest.approx(0.102)


def test_no_time_tells_when_to_come_back(gateway: Gateway) -> None:
    gateway.choose(500)
    with pytest.raises(NoTimeError) as busy:
        gateway.choose(500, budget_s=0.015)
    assert (busy.value.retry_after_s, busy.value.service_s) == (pytest.approx(0.005), pytest.approx(0.01))
    with pytest.raises(NoTimeError) as hopeless:
        gateway.choose(500, budget_s=0.005)
    assert hopeless.value.retry_after_s == math.inf


def test_gateways_that_share_replicas_prefer_different_ones() -> None:
    names, replicas = frozenset({"one", "two"}), {name: report(64) for name in ("a", "b", "c", "d")}
    gateways = {name: Gateway(**replicas) for name in names}
    for name, gateway in gateways.items():
        gateway.chooser.share(name, names)
    first, second = ({gateways[name].choose(10).replica for _ in range(2)} for name in ("one", "two"))
    assert len(first) == len(second) == 2
    assert not first & second
    gateways["one"].chooser.share("one", frozenset({"one"}))
    assert {gateways["one"].choose(10).replica for _ in range(2)} == second, "alone, it has all, and these are idle"


def test_a_gateway_chooses_replicas_only_whose_model_reads_texts_as_its_own_does() -> None:
    gateway = Gateway(old={**report(64), "reads": "a"}, plain=report(64), new={**report(64), "reads": "b"})
    assert {gateway.choose(8).replica for _ in range(9)} == {"old", "plain", "new"}
    gateway.chooser.read_as("b")
    assert {gateway.choose(8).replica for _ in range(9)} == {"plain", "new"}
    gateway.table.observe("old", {**report(64, version=2), "reads": "a"})
    assert {gateway.choose(8).replica for _ in range(9)} == {"plain", "new"}
    for left in ("plain", "new"):
        gateway.table.lose(left)
    assert not gateway.chooser.serves(8)
    with pytest.raises(NoReplicaError):
        gateway.choose(8)
    gateway.table.observe("old", {**report(64, version=3), "reads": "b"})
    assert gateway.chosen(8) == "old"


def test_the_numbers_of_the_paper_s_rule_are_those_of_the_service() -> None:
    """With a threshold of a hundredth of the SLO of a second two texts of 5 ms congest a replica."""

    def short(dispatch: object) -> int:
        options = {"kind": "encoder", "model": "m", "replicas": 1, **ARLO, "dispatch": dispatch}
        table: ReplicaTable[TextWant, Report] = ReplicaTable(KIND.chooser(EncoderConfig.model_validate(options)))
        table.sync({"short": report(64, service_s=0.005), "long": report(512, service_s=0.01)})
        return [table.choose(TextWant(8, None, 1.0)).replica for _ in range(50)].index("long")

    assert short({"threshold": 0.01, "decay": 1}) == 2
    assert short({"threshold": 0.1, "decay": 1}) == 20
    assert short({"threshold": 0.1, "decay": 0.9}) == 20
