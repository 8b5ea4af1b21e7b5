"""What running images again would earn: pairs of gammas beside the gammas."""

from __future__ import annotations

import numpy as np
import pytest

from pliant.bench.vision import profiles
from pliant.bench.vision.runs import Run, simulate
from pliant.bench.vision.second_passes import Answers, Judged, Known, Pair, accuracies, with_pairs
from pliant.bench.vision.workload import Trace

PAPER = profiles.paper()
IMAGES = 200
EVERY = dict.fromkeys(PAPER.accuracies, np.arange(IMAGES))


def known(confident: bool) -> Known:
    """Answers as accurate as the paper's; `confident`: the surer, the easier the image; else of any."""
    rng = np.random.default_rng(0)
    found: dict[str, dict[int, Answers]] = {}
    for task, shares in PAPER.accuracies.items():
        luck = np.linspace(0, 1, IMAGES, endpoint=False)
        found[task] = {
            gamma: Answers(1 - luck if confident else rng.permutation(IMAGES) / IMAGES, luck < accuracy)
            for gamma, accuracy in shares.items()
        }
    return found


def gain(confident: bool) -> float:
    """Of pairs, in an overload."""
    answers = known(confident)
    true = accuracies(PAPER.gammas, answers, EVERY, EVERY)
    profile, trace = with_pairs(PAPER, answers, EVERY), Trace((1.6, 1.6), seed=1)
    alone, paired = (
        simulate(Run(profile, Judged("", true, gammas), trace)).expected for gammas in (PAPER.gammas, None)
    )
    return paired / alone


def test_of_logits_the_likeliest_label_counts() -> None:
    logits = np.array([[0.0, np.log(3.0)], [2.0, 2.0 - np.log(4.0)]], np.float32)
    sure, right = Answers.of(logits, np.array([1, 1]))
    assert sure.tolist() == pytest.approx([0.75, 0.8])
    assert right.tolist() == [True, False]


def test_the_least_sure_run_again() -> None:
    of_gamma = {
        0: Answers(np.array([0.9, 0.5, 0.6, 0.8]), np.array([True, False, False, False])),
        8: Answers(np.ones(4), np.array([False, True, True, True])),
    }
    every = np.arange(4)
    assert [Pair(0, 8, share).accuracy(of_gamma, every, every) for share in (0.25, 0.5, 0.75)] == [0.5, 0.75, 1.0]
    assert Pair(0, 8, 0.5).accuracy(of_gamma, np.array([1, 2]), every) == 0.5, "the cut-off is that of other images"
    assert Pair(0, 8, 0.1).seconds(PAPER)[9] == PAPER.latency(0, 10) + PAPER.latency(8, 1)


def test_it_pays_where_confidence_says_who_is_wrong() -> None:
    assert gain(confident=True) > 1.005


def test_it_earns_nothing_where_confidence_says_nothing() -> None:
    assert gain(confident=False) == pytest.approx(1, abs=0.003)


def test_pairs_that_gain_nothing_are_left_out() -> None:
    same = {task: dict.fromkeys(PAPER.gammas, of[0]) for task, of in known(confident=True).items()}
    assert with_pairs(PAPER, same, EVERY).gammas == PAPER.gammas


def test_what_is_earned_is_judged_by_other_images() -> None:
    """The second half of each task's images is the harder one."""
    halves = [{task: rows[part] for task, rows in EVERY.items()} for part in (slice(100), slice(100, None))]
    learned, judged = (accuracies(PAPER.gammas, known(confident=True), halves[0], half) for half in halves)
    assert all(of_gamma[0] == 1.0 for of_gamma in learned.values())
    assert judged["CIFAR100"][0] == pytest.approx(0.65)
