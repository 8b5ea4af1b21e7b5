"""Cut-offs of exits, against trying them all, and whether they keep what they promise of other texts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pliant.policies.encoder.accuracy_loss import loss_error
from pliant.policies.encoder.exits import MARGIN, STEPS, choose_cut_off, stops


@given(st.integers(1, 3), st.integers(1, 30), st.integers(0, 1000), st.sampled_from([0.0, 0.01, 0.1, 0.5]))
def test_the_lowest_cut_off_from_which_on_the_accuracy_is_kept(exits: int, texts: int, seed: int, loss: float) -> None:
    rng = np.random.default_rng(seed)
    sure, right = rng.random((exits, texts)), rng.random((exits + 1, texts)) < 0.7
    model = right[-1] if seed % 2 else rng.random(texts) < 0.7

    def keeps(cut_off: float) -> bool:
        lost = differing = 0
        for text in range(texts):
            first = next((exit_ for exit_ in range(exits) if sure[exit_, text] > cut_off), exits)
            assert stops(sure, cut_off)[text] == first
            lost += int(model[text]) - int(right[first, text])
            differing += model[text] != right[first, text]
        return lost / texts + MARGIN * loss_error(lost, differing, texts) <= loss

    chosen = choose_cut_off(sure, right, model, loss)
    tried = [step / STEPS for step in range(STEPS)]
    assert all(keeps(cut_off) for cut_off in tried if cut_off >= chosen)
    below = [cut_off for cut_off in tried if cut_off < chosen]
    assert not below or not keeps(below[-1])


def test_the_promise_is_kept_on_other_texts_too() -> None:
    """Without a margin it is not for about half of the choices."""
    rng = np.random.default_rng(0)
    loss, trials, missed, early = 0.01, 100, 0, 0.0
    for _ in range(trials):
        sure, right = calibrated(rng, 750)
        cut_off = choose_cut_off(sure, right, right[-1], loss)
        sure, right = calibrated(rng, 20_000)
        left = stops(sure, cut_off)
        missed += right[-1].mean() - right[left, np.arange(len(left))].mean() > loss
        early += float((left == 0).mean()) / trials
    assert missed <= 0.1 * trials
    assert early > 0.1


def calibrated(rng: np.random.Generator, texts: int) -> tuple[np.ndarray, np.ndarray]:
    """How sure an exit is of texts, which is how often it is right, and whether it and the whole model are."""
    difficulty = rng.random(texts)
    sure = np.clip(1 - 0.7 * difficulty + rng.normal(0, 0.1, texts), 0.2, 0.9999)
    whole = np.where(difficulty < 0.8, 0.97, 0.85)
    return sure[None], np.stack([rng.random(texts) < sure, rng.random(texts) < whole])


def test_at_a_cut_off_of_1_none_leaves() -> None:
    assert stops(np.ones((2, 3)), 1.0).tolist() == [2, 2, 2]
