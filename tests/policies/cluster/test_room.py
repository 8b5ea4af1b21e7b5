"""What replicas that do not change leave of a budget."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.cluster.budget import Nodes, Shape
from pliant.policies.cluster.room import counted, free, shape_of

SHAPES = st.builds(Shape, st.sampled_from([0.0, 0.5, 1.0, 2.0]), st.sampled_from([0.05, 0.5, 1.0, 4.0]))


@given(st.lists(SHAPES, max_size=12), st.integers(1, 4), st.integers(0, 8))
def test_no_more_is_taken_than_is_there_and_all_that_has_room(taken: list[Shape], count: int, gpus: int) -> None:
    nodes = [Nodes(count, gpus, 8.0)]
    left = free(nodes, taken)
    assert sum(each.count for each in left) == count
    assert all(0 <= each.gpus <= gpus and 0 <= each.cpus <= 8 for each in left)
    if sum(each.cpus for each in taken) <= 4 and not any(each.gpus for each in taken):
        assert abs(sum(each.count * each.cpus for each in left) - (8 * count - sum(x.cpus for x in taken))) < 1e-6


def test_a_replica_goes_where_least_is_left() -> None:
    nodes = [Nodes(1, 0, 8.0), Nodes(1, 4, 8.0)]
    assert sorted(free(nodes, [Shape(0, 2)]), key=lambda each: each.gpus) == [Nodes(1, 0, 6.0), Nodes(1, 4, 8.0)]
    assert free([Nodes(2, 2, 8.0)], [Shape(3, 1)]) == [Nodes(2, 2, 8.0)]


def test_shares_are_on_one_gpu_as_long_as_it_has_room() -> None:
    assert free([Nodes(1, 4, 32.0)], [Shape(0.25, 1)] * 4) == [Nodes(1, 3, 28.0)]
    assert free([Nodes(1, 4, 32.0)], [Shape(0.25, 1)] * 5) == [Nodes(1, 2, 27.0)]
    assert free([Nodes(1, 2, 8.0)], [Shape(0.6, 1), Shape(0.4, 1), Shape(1, 1)]) == [Nodes(1, 0, 5.0)]


@given(st.lists(SHAPES, max_size=12), st.integers(1, 8))
def test_what_one_node_has_left_beside_shares_and_gangs(taken: list[Shape], gpus: int) -> None:
    [left] = free([Nodes(1, gpus, 100.0)], taken)
    asked = sum(math.floor(each.gpus) for each in taken) + math.ceil(sum(each.gpus % 1 for each in taken))
    assert left.gpus >= gpus - asked
    if asked <= gpus:
        assert left.gpus == gpus - asked


def test_where_all_gpus_are_taken_gpus_are_counted_nevertheless() -> None:
    cluster, left = [Nodes(1, 2, 16.0)], [Nodes(1, 0, 14.0)]
    assert counted(left, cluster) == left
    assert shape_of(1, 1, cluster) == Shape(1, 1)


def test_without_gpus_cpus_are_counted() -> None:
    cpus, gpus = [Nodes(2, 0, 7.9)], [Nodes(2, 8, 96.0)]
    assert counted(cpus, cpus) == [Nodes(2, 7)]
    assert [shape_of(0, each, cpus) for each in (0, 0.05, 1, 1.5)] == [Shape(0.01), Shape(0.05), Shape(1), Shape(2)]
    assert counted(gpus, gpus) == gpus
    assert [shape_of(1, 4, gpus), shape_of(0.5, 0, gpus), shape_of(0, 0, gpus)] == [
        Shape(1, 4),
        Shape(0.5),
        Shape(0, 0.01),
    ]
