"""Exits beside two models, on tiny models whose exits know more than all of their layers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support import tiny_classifiers
from support.caches import with_libraries

from pliant.bench.cascade import exit_levels
from pliant.bench.cascade.levels import Prepared
from pliant.bench.cascade.study import Scale
from pliant.bench.cascade.tasks import Splits
from pliant.kernels import c_compiler
from pliant.models import sources
from pliant.training.early_layers import Recipe
from pliant.training.labelled_texts import LabelledText

pytestmark = pytest.mark.skipif(c_compiler.compiler() is None, reason="needs a C compiler")


def model(folder: Path, layers: int) -> Path:
    return tiny_classifiers.save_with_words(folder, "bert", num_hidden_layers=layers)


def texts(count: int, labels: tuple[str, ...], seed: int) -> list[LabelledText]:
    """Most words of a label are its own."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        label = index % len(labels)
        words = (f"w{3 + (label if rng.random() < 0.8 else rng.randrange(3)) + 3 * rng.randrange(30)}" for _ in "12345")
        made.append(LabelledText(" ".join(words), labels[label]))
    return made


def test_exits_and_two_models_are_chosen_and_timed_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(with_libraries(tmp_path / "cache")))
    small, large = model(tmp_path / "small", 1), model(tmp_path / "large", 3)
    labels = sources.describe(large).labels
    splits = Splits(*(texts(count, labels, seed) for seed, count in enumerate((300, 250, 80))))
    prepared = Prepared(
        "made", splits, {"small": small, "large": large}, {}, None, Recipe(epochs=8, learning_rate=2e-4)
    )
    said: list[str] = []
    scale = Scale(texts=250, timed=10, passes=2, seeds=2, resplits=1)
    found = {figure.name: figure for figure in exit_levels.figures(prepared, scale, said.append)}
    assert set(found) == {
        f"{which}_cascade_{what}_{loss}made"
        for which in ("exit", "one_encoder")
        for what in (
            "vs_two_models",
            "accuracy_minus_two_models",
            "memory_vs_two_models",
            "vs_best_single",
            "p99_vs_large",
            "accuracy_minus_target",
            "early_accuracy_gap",
        )
        for loss in ("", "loss_0.04_")
    } | {"one_encoder_cascade_resplits_that_keep_the_promise_made"}
    assert "small@0" in found["exit_cascade_vs_two_models_made"].beside, "an exit serves, if only alone"
    assert found["exit_cascade_accuracy_minus_two_models_made"].value > 0.2
    assert "large@0" in found["one_encoder_cascade_vs_two_models_made"].beside
    weights = [(folder / "model.safetensors").stat().st_size for folder in (small, large)]
    for which, trained in (("exit", "small-exit-0"), ("one_encoder", "large-exit-0-1-learned-*")):
        (made,) = (one for one in (tmp_path / "cache/bench/cascade").glob(trained) if one.is_dir())
        size = sum(file.stat().st_size for file in made.rglob("*.safetensors"))
        possible = {size / of for of in (*weights, sum(weights))}
        assert found[f"{which}_cascade_memory_vs_two_models_made"].value in possible
    assert any("training exits" in line for line in said)
