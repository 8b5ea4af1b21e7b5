"""Which replica gets a request where the one that holds the least does, as several gateways see it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest

from pliant.deployments.serving.least_held import LeastHeld, Share
from pliant.deployments.serving.parcels import Report
from pliant.deployments.serving.table import Choice, NoReplicaError, ReplicaTable

Table = ReplicaTable[Share, Report]


def report(**held: float) -> Report:
    return Report(version=0, held=held, served=0)


def table(**held: dict[str, float]) -> Table:
    """Of replicas that hold this of gateways."""
    made: Table = ReplicaTable(LeastHeld())
    made.sync({replica: report(**each) for replica, each in held.items()})
    return made


def choose(known: Table, amount: int = 1, avoid: Collection[str] = (), near: str | None = None) -> str:
    return known.choose(Share(amount, near), avoid).replica


def test_the_replica_that_holds_the_least_is_next() -> None:
    known = table(a={"other": 3}, b={"other": 1}, c={})
    choices = [known.choose(Share()) for _ in range(5)]
    assert Counter(choice.replica for choice in choices) == {"b": 2, "c": 3}
    known.done(next(choice for choice in choices if choice.replica == "c"))
    assert choose(known) == "c"


def test_only_what_others_sent_counts_beside_what_is_outstanding_here() -> None:
    known = table(a={}, b={})
    first = known.choose(Share(100))
    assert first.replica == "a"
    known.sync({"a": report(**{known.gateway: 100}), "b": report(other=50, third=40)})
    assert choose(known, 5) == "b"
    known.done(first)
    assert choose(known, 5) == "a", "the report is stale, but its share of this process is known better"


def test_what_this_gateway_sent_is_counted_once() -> None:
    known = table(a={}, b={"other": 1})
    known.sync({"a": report(**{known.gateway: 7}), "b": report(other=1)})
    assert choose(known) == "a"


def test_those_to_be_avoided_are() -> None:
    known = table(a={}, b={})
    assert choose(known, avoid={"a"}) == "b"
    with pytest.raises(NoReplicaError):
        choose(known, avoid={"a", "b"})


def test_a_dead_replica_is_never_chosen_again() -> None:
    known = table(a={}, b={})
    at_a = known.choose(Share())
    assert at_a.replica == "a"
    known.lose("a")
    known.sync({"a": report(), "b": report()})
    assert {choose(known) for _ in range(4)} == {"b"}
    known.done(at_a)
    known.sync({"b": report()})
    known.lose("b")
    assert not known.ready
    with pytest.raises(NoReplicaError):
        choose(known)


def test_a_replica_that_cannot_be_reached_gets_nothing_until_it_is_trusted() -> None:
    known = table(a={}, b={})
    known.suspect("a")
    assert {choose(known) for _ in range(4)} == {"b"}
    known.suspect("b")
    assert not known.ready
    known.trust("a")
    assert known.ready
    assert choose(known) == "a"


def test_what_a_replica_holds_still_counts_when_it_is_trusted_again() -> None:
    known = table(a={}, b={})
    assert choose(known, 50) == "a"
    known.suspect("a")
    assert choose(known, 10) == "b"
    known.trust("a")
    assert choose(known, 10) == "b"


def test_a_replica_that_has_said_nothing_is_not_chosen() -> None:
    known: Table = ReplicaTable(LeastHeld())
    known.sync({"a": None})
    assert not known.ready
    assert known.replicas() == {}
    with pytest.raises(NoReplicaError):
        choose(known)


def test_requests_of_one_name_meet_in_one_replica() -> None:
    known = table(a={}, b={}, c={})
    home = choose(known, 10, near="sql")
    assert {choose(known, 10, near="sql") for _ in range(3)} == {home}
    assert choose(known, 10) != home, "requests without a name go where least is to do"
    known.suspect(home)
    second = choose(known, 10, near="sql")
    assert second != home
    known.trust(home)
    assert choose(known, 10, {home}, "sql") == second


def test_a_choice_says_what_it_counts_and_when_it_should_be_answered() -> None:
    assert table(a={}).choose(Share(7, predicted_s=0.5)) == Choice("a", 0.5, 7)
