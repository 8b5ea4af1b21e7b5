"""Balancing by live tokens: always the emptiest replica, nothing lost in the books, replicas kept close."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pliant.policies.cluster.adapter_affinity import bound
from pliant.policies.cluster.live_tokens import LiveTokens, NoReplicaError

NAMES = st.integers(0, 4)
TOKENS = st.integers(1, 4096)


def replicas(number: int) -> LiveTokens[int]:
    table: LiveTokens[int] = LiveTokens()
    for name in range(number):
        table.report(name, 0)
    return table


def test_the_fewest_live_tokens_win_and_equals_take_turns() -> None:
    table = replicas(3)
    assert [table.choose(10) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    table.report(0, 500)
    assert {table.choose(10) for _ in range(4)} == {1, 2}
    table.release(0, 20)
    table.report(0, 0)
    assert table.choose(100) == 0


def test_a_replica_to_avoid_is_never_chosen() -> None:
    table = replicas(2)
    assert [table.choose(1, avoid={0}) for _ in range(3)] == [1, 1, 1]
    with pytest.raises(NoReplicaError, match="none of 2 replicas"):
        table.choose(1, avoid={0, 1})
    with pytest.raises(NoReplicaError, match="none of 0 replicas"):
        LiveTokens[int]().choose(1)


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 live token, got 0"):
        replicas(1).choose(0)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        replicas(1).report(0, -1)


@given(st.lists(TOKENS, min_size=1, max_size=200), st.integers(1, 8))
def test_replicas_stay_within_one_request_of_each_other(requests: list[int], number: int) -> None:
    table = replicas(number)
    for tokens in requests:
        table.choose(tokens)
    loads = [table.live(name) for name in range(number)]
    assert sum(loads) == sum(requests)
    assert max(loads) - min(loads) <= max(requests)


@given(st.lists(st.tuples(st.booleans(), TOKENS), min_size=1, max_size=100))
def test_two_gateways_that_hear_of_each_other_stay_as_close(requests: list[tuple[bool, int]]) -> None:
    gateways = (replicas(3), replicas(3))
    for second, tokens in requests:
        mine, other = gateways[second], gateways[not second]
        for name in range(3):
            mine.report(name, other.own(name))
        mine.choose(tokens)
    loads = [gateways[0].own(name) + gateways[1].own(name) for name in range(3)]
    assert max(loads) - min(loads) <= max(tokens for _, tokens in requests)


class Books(RuleBasedStateMachine):
    """Against a plain store: replicas come and go while requests are live."""

    def __init__(self) -> None:
        super().__init__()
        self.table: LiveTokens[int] = LiveTokens()
        self.others: dict[int, int] = {}
        self.live: list[tuple[int, int]] = []

    @rule(name=NAMES, others=st.integers(0, 9999))
    def report(self, name: int, others: int) -> None:
        self.table.report(name, others)
        self.others[name] = others

    @rule(name=NAMES)
    def remove(self, name: int) -> None:
        self.table.remove(name)
        self.others.pop(name, None)
        self.live = [(replica, tokens) for replica, tokens in self.live if replica != name]

    @rule(tokens=TOKENS, avoid=st.sets(NAMES), adapter=st.sampled_from((None, "sql", "law")))
    def choose(self, tokens: int, avoid: set[int], adapter: str | None) -> None:
        before = self.loads()
        allowed = self.others.keys() - avoid
        if not allowed:
            with pytest.raises(NoReplicaError):
                self.table.choose(tokens, avoid, adapter)
            return
        replica = self.table.choose(tokens, avoid, adapter)
        assert replica in allowed
        if adapter is None:
            assert before[replica] == min(before[name] for name in allowed)
        else:
            assert before[replica] + tokens <= bound(tokens, {name: before[name] for name in allowed})
        self.live.append((replica, tokens))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        replica, tokens = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.table.release(replica, tokens)

    def loads(self) -> Counter[int]:
        loads = Counter(self.others)
        for replica, tokens in self.live:
            loads[replica] += tokens
        return loads

    @invariant()
    def balanced(self) -> None:
        assert len(self.table) == len(self.others)
        assert {name: self.table.live(name) for name in self.others} == {
            name: self.loads()[name] for name in self.others
        }


TestBooks = Books.TestCase
