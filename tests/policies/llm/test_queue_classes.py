"""Classes of requests: clusters against brute force, only those that are there, and their quotas (Chameleon §4.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pliant.policies.llm.queue_classes import QueueClass, QueueClasses, cut_offs_by_classes, share_out, weighted_size

SLO_S = 10.0


def test_weighted_size() -> None:
    maxima = (1000, 200, 64)
    assert weighted_size((500, 50, 16), maxima) == pytest.approx(0.3 * 0.5 + 0.5 * 0.25 + 0.2 * 0.25)
    assert weighted_size((5000, 500, 640), maxima) == pytest.approx(1.0)
    assert weighted_size([(0, 200, 0), (1000, 0, 64)], maxima) == pytest.approx([0.5, 0.5])
    assert weighted_size((10, 0, 0), (10, 10, 0)) == pytest.approx(0.3), "a load without adapters"


def squared_distances(clusters: Iterable[Sequence[float]]) -> float:
    return sum(float(np.square(np.array(cluster) - np.mean(cluster)).sum()) for cluster in clusters if len(cluster))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=10), st.integers(1, 4))
def test_clusters_are_the_best_of_all(steps: list[int], most: int) -> None:
    sizes = sorted(step / 50 for step in steps)
    distinct = sorted(set(sizes))
    found = cut_offs_by_classes(sizes, most)
    assert sorted(map(len, found)) == list(range(min(most, len(distinct))))
    for cut_offs in found:
        edges = [-1.0, *cut_offs, math.inf]
        clusters = [[size for size in sizes if low < size <= high] for low, high in pairwise(edges)]
        partitions = (
            [[size for size in sizes if low <= size < high] for low, high in zip(starts, [*starts[1:], 2], strict=True)]
            for inner in combinations(distinct[1:], len(cut_offs))
            for starts in [[distinct[0], *inner]]
        )
        assert squared_distances(clusters) == pytest.approx(min(map(squared_distances, partitions)), abs=1e-9)
        centroids = [np.mean(cluster) for cluster in clusters]
        assert cut_offs == pytest.approx([(a + b) / 2 for a, b in pairwise(centroids)])


def normal(random: np.random.Generator, mean: float, deviation: float, number: int) -> NDArray[np.float64]:
    return np.clip(random.normal(mean, deviation, number), 0, 1)


@pytest.mark.parametrize(("means", "shares"), [
    ((0.5,), (1,)),
    ((0.2, 0.8), (0.5, 0.5)),
    ((0.1, 0.9), (0.96, 0.04)),
    ((0.1, 0.5, 0.9), (0.5, 0.3, 0.2)),
    ((0.1, 0.3, 0.5, 0.8), (0.25, 0.25, 0.25, 0.25)),
])  # fmt: skip
@pytest.mark.parametrize("requests", [200, 2000])
def test_clusters_that_are_there_are_found(means: Sequence[float], shares: Sequence[float], requests: int) -> None:
    for seed in range(10):
        random = np.random.default_rng(seed)
        clusters = [
            normal(random, mean, 0.03, int(share * requests)) for mean, share in zip(means, shares, strict=True)
        ]
        cut_offs = cut_offs_by_classes(np.concatenate(clusters))[0]
        assert cut_offs == pytest.approx([(a + b) / 2 for a, b in pairwise(means)], abs=0.02)


@pytest.mark.parametrize("requests", [200, 2000])
def test_a_homogeneous_load_has_one_class(requests: int) -> None:
    """However its sizes are spread, as long as there is no gap."""
    split = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        for sizes in (
            np.full(requests, 0.3),
            0.3 + 0.002 * random.integers(0, 2, requests),
            normal(random, 0.5, 0.02, requests),
            normal(random, 0.5, 0.15, requests),
            random.random(requests),
        ):
            split += len(cut_offs_by_classes(sizes)[0]) > 0
    assert split <= 3


shares = st.lists(st.tuples(st.floats(1e-6, 1e12), st.integers(0, 10**10)), min_size=1, max_size=4)


@given(shares, st.integers(0, 10**11))
def test_memory_is_shared_out(classes: list[tuple[float, int]], total: int) -> None:
    needs, floors = zip(*classes, strict=True)
    quotas = share_out(needs, floors, total)
    assert sum(quotas) == total
    if sum(floors) > total:
        assert quotas == pytest.approx([total * floor / sum(floors) for floor in floors], abs=4)
        return
    wanted = [max(need, floor) for need, floor in zip(needs, floors, strict=True)]
    if sum(wanted) <= total:
        assert quotas == pytest.approx([total * want / sum(wanted) for want in wanted], rel=1e-6, abs=8)
        return
    assert all(quota >= floor for quota, floor in zip(quotas, floors, strict=True))
    short = next((index for index, want in enumerate(wanted) if quotas[index] < int(want)), len(wanted))
    assert quotas[short + 1 :] == list(floors[short + 1 :]), "small requests first"


def learned(classes: QueueClasses, total: int, now: float = 100.0) -> list[QueueClass]:
    """What is learned from short requests, 4 a second for 1 s, and long ones, 1 a second for 8 s."""
    for request in range(500):
        at = request / 5
        if request % 5:
            classes.observe(at, 100, 20, 1_000, 5_000)
            classes.ended(100, 20, 1_000, 1.0)
        else:
            classes.observe(at, 2000, 400, 16_000, 100_000)
            classes.ended(2000, 400, 16_000, 8.0)
    return classes.learn(now, total)


def test_quotas_follow_the_queueing_model() -> None:
    classes = QueueClasses(SLO_S)
    total = 10_000_000
    short, long = learned(classes, total)
    needs = (6_000 * 1.0 * (4 + 1 / SLO_S), 116_000 * 8.0 * (1 + 1 / SLO_S))
    assert short.quota == pytest.approx(total * needs[0] / sum(needs), rel=1e-3)
    assert short.quota + long.quota == total
    assert long.cut_off == math.inf
    assert [classes.classify(*request) for request in ((100, 20, 1_000), (2000, 400, 16_000), (9999, 999, 1))] == [
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("total", [116_000 + 6_000, 130_000, 200_000])
def test_a_quota_holds_the_largest_request_of_its_class(total: int) -> None:
    short, long = learned(QueueClasses(SLO_S), total)
    assert (short.quota >= 6_000, long.quota >= 116_000) == (True, True)
    assert short.quota + long.quota == total


def test_memory_too_small_to_be_divided_has_one_class() -> None:
    classes = QueueClasses(SLO_S)
    assert learned(classes, 121_999) == [QueueClass(math.inf, 121_999)]
    assert classes.classify(100, 20, 1_000) == classes.classify(2000, 400, 16_000) == 0


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 1000), st.sampled_from((0, 8, 128))), max_size=120),
    st.lists(st.floats(0, 60), max_size=60),
    st.integers(200_000, 10**7),
)
def test_quotas_of_any_load(requests: list[tuple[int, int, int]], seconds: list[float], total: int) -> None:
    classes = QueueClasses(SLO_S)
    charges = []
    for at, (prompt, output, rank) in enumerate(requests):
        charge = (prompt + output) * 16
        classes.observe(float(at), prompt, output, rank * 100, charge)
        charges.append(charge + rank * 100)
    for (prompt, output, rank), taken in zip(requests, seconds, strict=False):
        classes.ended(prompt, output, rank * 100, taken)
    found = classes.learn(float(len(requests)), total)
    assert 1 <= len(found) <= 4
    assert sum(queue.quota for queue in found) == total
    assert [queue.cut_off for queue in found] == sorted({queue.cut_off for queue in found})
    assert found[-1].cut_off == math.inf
    for (prompt, output, rank), charge in zip(requests, charges, strict=True):
        assert charge <= found[classes.classify(prompt, output, rank * 100)].quota


def test_no_class_is_empty_where_rounding_puts_all_of_it_into_another() -> None:
    classes = QueueClasses(SLO_S)
    for request in range(1000):  # 0.503 is clustered as 0.504, and then lies on the cut-off
        size = (502, 503, 1000)[request % 3] if request < 120 else 1000
        classes.observe(request / 10, size, size, size, 10 if size == 1000 else 1000)
    for total in range(1600, 4000, 100):
        found = classes.learn(100.0, total)
        assert min(queue.quota for queue in found) >= 10


def test_without_an_end_the_size_stands_for_the_duration() -> None:
    """The quotas are those of durations in proportion to the sizes."""
    classes = QueueClasses(SLO_S)
    for request in range(400):
        size = 10 if request % 2 else 100
        classes.observe(request / 10, size, size, 0, size * 1000)
    short, long = classes.learn(40.0, 10_000_000)
    assert long.quota / short.quota == pytest.approx(100, rel=0.01)
    classes.ended(100, 100, 0, 3.0)
    assert classes.learn(40.0, 10_000_000) == [short, long], "one that is known tells the others"


def test_few_requests_have_one_class() -> None:
    classes = QueueClasses(SLO_S)
    assert classes.learn(0.0, 1000) == [QueueClass(math.inf, 1000)]
    for request in range(40):
        classes.observe(float(request), request % 2 * 1000, 10, 0, 100)
    assert classes.learn(50.0, 1000) == [QueueClass(math.inf, 1000)]


def test_the_load_that_was_is_forgotten() -> None:
    classes = QueueClasses(SLO_S, period_s=60.0)
    assert len(learned(classes, 10_000_000)) == 2
    for request in range(100):
        classes.observe(120.0 + request, 100, 20, 1_000, 5_000)
    assert len(classes.learn(220.0, 10_000_000)) == 1


def test_one_long_prompt_does_not_make_the_others_alike() -> None:
    classes = QueueClasses(SLO_S)
    classes.observe(0.0, 1_000_000, 20, 0, 2_000_000)
    for request in range(500):
        classes.observe(request / 5, 100 if request % 2 else 2000, 20, 0, 5_000)
    short, long = classes.learn(100.0, 10_000_000)
    assert classes.classify(100, 20, 0) == 0
    assert classes.classify(2000, 20, 0) == 1
    assert long.quota >= 2_000_000
    assert short.quota >= 5_000


def test_learning_is_due_often_at_first_and_then_periodically() -> None:
    classes = QueueClasses(SLO_S, period_s=300.0)
    due = []
    for request in range(6000):
        now = request / 10
        classes.observe(now, 10 + request % 3, 10, 0, 100)
        if classes.due(now):
            due.append(request + 1)
            classes.learn(now, 10**6)
    assert due == [50, 100, 200, 400, 800, 1600, 4600]
    assert not QueueClasses(SLO_S).due(1000.0)


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="must be positive, got 0 and 300"):
        QueueClasses(0)
