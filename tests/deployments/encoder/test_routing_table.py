"""What a gateway believes of replicas, through reports that come late, twice, or from the dead."""

import pytest
from pliant.deployments.encoder.routing_table import RoutingTable
from support.doubles import report

from pliant.policies.encoder.dispatch import NoRuntimeError


@pytest.fixture
def table() -> RoutingTable:
    table = RoutingTable(slo_s=1.0)
    table.sync({"short": report(64), "long": report(512)})
    return table


def test_the_shortest_runtime_that_fits_is_chosen(table: RoutingTable) -> None:
    assert table.choose(64, None, 1.0) == "short"
    assert table.choose(65, None, 1.0) == "long"
    assert table.serves(512)
    assert not table.serves(513)


def test_a_refusal_corrects_the_table_at_once_and_stale_news_do_not_undo_it(table: RoutingTable) -> None:
    table.observe("short", report(128, version=3))
    assert table.choose(100, None, 1.0) == "short"
    table.sync({"short": report(64, version=1), "long": report(512)})
    assert table.choose(100, None, 1.0) == "short"


def test_a_replica_that_switches_gets_nothing(table: RoutingTable) -> None:
    table.observe("short", report(0, version=2))
    assert table.choose(10, None, 1.0) == "long"
    table.observe("short", report(64, version=3))
    assert table.choose(10, None, 1.0) == "short"


def test_the_dead_do_not_come_back_while_the_controller_still_lists_them(table: RoutingTable) -> None:
    table.lose("long")
    table.sync({"short": report(64), "long": report(512)})
    table.trust("long")
    table.done("long")
    with pytest.raises(NoRuntimeError):
        table.choose(500, None, 1.0)
    table.sync({"short": report(64), "new": report(512)})
    assert table.choose(500, None, 1.0) == "new"


def test_an_unreachable_replica_gets_nothing_until_it_is_trusted_again(table: RoutingTable) -> None:
    table.suspect("short")
    assert table.choose(10, None, 1.0) == "long"
    table.trust("short")
    assert table.choose(10, None, 1.0) == "short"


def test_a_replica_that_the_planner_moves_gets_nothing_whatever_it_reports_meanwhile(table: RoutingTable) -> None:
    table.stop_routing({"short"})
    assert table.choose(10, None, 1.0) == "long"
    table.observe("short", report(64, service_s=0.02))
    assert table.choose(10, None, 1.0) == "long"
    table.observe("short", report(128, version=3))
    table.stop_routing(())
    assert table.choose(100, None, 1.0) == "short"


def test_moving_and_unreachable_are_two_reasons(table: RoutingTable) -> None:
    table.stop_routing({"short"})
    table.suspect("short")
    table.stop_routing(())
    assert table.choose(10, None, 1.0) == "long"
    table.trust("short")
    assert table.choose(10, None, 1.0) == "short"


def test_moving_replicas_that_left_are_forgotten(table: RoutingTable) -> None:
    table.stop_routing({"short"})
    table.sync({"long": report(512)})
    table.stop_routing(())
    assert table.choose(10, None, 1.0) == "long"


def test_a_late_word_from_a_replica_that_left_does_not_bring_it_back(table: RoutingTable) -> None:
    table.sync({"short": report(64)})
    table.observe("long", report(512, version=5))
    assert not table.serves(512)


def test_a_replica_that_has_not_reported_yet_gets_nothing() -> None:
    table = RoutingTable(slo_s=1.0)
    table.sync({"new": None})
    with pytest.raises(NoRuntimeError):
        table.choose(1, None, 1.0)


def test_people_see_reports_and_outstanding_requests(table: RoutingTable) -> None:
    table.choose(10, None, 1.0)
    table.choose(10, None, 1.0)
    table.done("short")
    assert table.replicas()["short"]["outstanding"] == 1
    assert table.replicas()["long"]["max_length"] == 512
