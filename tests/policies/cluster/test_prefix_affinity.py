"""Prompts go where most of them is known, within the bound on load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.adapter_affinity import bound, preferred
from pliant.policies.cluster.prefix_affinity import PrefixAffinity, blocks

IDLE = {"a": 0, "b": 0, "c": 0}


def names(*prompt: int, root: str = "") -> list[bytes]:
    return blocks(root, prompt, 2)


def test_blocks_are_named_by_all_before_them_and_their_root() -> None:
    assert len(names(1, 2, 3, 4, 5)) == 2
    assert names(1, 2, 3, 4)[:1] == names(1, 2, 9, 9)[:1]
    assert names(1, 2, 3, 4)[1] != names(9, 9, 3, 4)[1]
    assert not set(names(1, 2)).intersection(names(1, 2, root="adapter"))


def test_the_next_turn_goes_where_the_first_went_and_a_longer_prefix_wins() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    affinity.sent(names(1, 2, 3, 4), "b")
    assert affinity.choose(names(1, 2, 3, 4, 5, 6), 6, IDLE) == "b"
    affinity.sent(names(1, 2, 3, 4, 5, 6), "c")
    assert affinity.choose(names(1, 2, 3, 4, 5, 6, 7, 8), 8, IDLE) == "c"


def test_a_replica_that_is_gone_or_full_is_passed_over() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    affinity.sent(names(1, 2, 3, 4), "b")
    assert affinity.choose(names(1, 2, 3, 4), 4, {"a": 5, "c": 0}) == "c"
    assert affinity.choose(names(1, 2, 3, 4), 4, {"a": 5, "b": 900, "c": 0}) == "c"


def test_where_nothing_is_known_the_adapter_decides() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    assert affinity.choose(names(1, 2), 2, IDLE, "x") == preferred("x", 2, IDLE)


def test_only_so_many_blocks_are_kept_and_the_first_ones_the_longest() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity(most=2)
    affinity.sent(names(1, 2, 3, 4, 5, 6), "a")
    assert affinity.known(names(1, 2, 3, 4, 5, 6)) == {"a": 2}


def test_what_replicas_say_they_hold_counts_too_until_they_are_gone() -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    prompt = names(1, 2, 3, 4, 5, 6)
    affinity.sent(names(1, 2), "a")
    affinity.holds("b", {prompt[1], names(7, 7)[0]})
    affinity.holds("c", {names(9, 9)[0]})
    assert affinity.known(prompt) == {"a": 1, "b": 2}
    assert affinity.choose(prompt, 6, IDLE) == "b"
    affinity.remove("b")
    assert affinity.known(prompt) == {"a": 1}


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=9), st.sampled_from("abc")), max_size=12),
    st.lists(st.integers(0, 1), max_size=9),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 100), min_size=1),
    st.integers(1, 30),
)
def test_it_is_the_longest_known_prefix_within_the_bound(
    before: list[tuple[list[int], str]], prompt: list[int], live: dict[str, int], tokens: int
) -> None:
    affinity: PrefixAffinity[str] = PrefixAffinity()
    last: dict[tuple[int, ...], str] = {}
    for earlier, replica in before:
        affinity.sent(names(*earlier), replica)
        last |= {tuple(earlier[:end]): replica for end in range(2, len(earlier) + 1, 2)}
    chosen = affinity.choose(names(*prompt), tokens, live)
    assert live[chosen] + tokens <= bound(tokens, live)
    known = [last.get(tuple(prompt[:end])) for end in range(2, len(prompt) + 1, 2)]
    known = known[: known.index(None)] if None in known else known
    allowed = [replica for replica in known if replica in live and live[replica] + tokens <= bound(tokens, live)]
    assert chosen == allowed[-1] if allowed else live[chosen] == min(live.values())
