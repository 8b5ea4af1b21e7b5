"""A profile finds the curves and the staircase of runtimes whose speed is known, and compiles no more than it needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from pliant.errors import ModelError
from pliant.formats.pass_times import PassTimes
from pliant.kernels.encoder import compiled_classifier, latency_profile
from pliant.kernels.encoder.latency_profile import find_steps, measure_profile, profile
from pliant.kernels.runtime_cache import RuntimeSpec, can_compile
from pliant.torchvision_ops import declare

LENGTHS = tuple(range(8, 513, 8))
EDGES = tuple(range(64, 512, 64))
EVEN = EDGES[1:]
"""Where static runtimes of a smooth curve are measured, but for the two that decide."""

Seconds = Callable[[int, Any], float]
"""Of a text of so many tokens, on a dynamic runtime or not, or on a "packed" one."""
UNCOMPILED = 1.5
"""What the model takes that is not compiled, in times of a dynamic runtime."""


def smooth(length: float) -> float:
    return 1e-3 + 1e-5 * length + 2e-8 * length**2


def stairs(length: float) -> float:
    return smooth(64 * np.ceil(length / 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    declare()
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
    )
    folder = tmp_path_factory.mktemp("models") / "bert"
    hf.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


class Packed:
    """As `compiled` says that it is, too."""

    def __init__(self, folder: Path, times: PassTimes) -> None:
        self.times = times
        self._run = compiled_classifier.load(folder, 512, dynamic="packed")  # type: ignore[arg-type]

    def __call__(self, ids: np.ndarray) -> None:
        self._run(ids)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Seconds], list[tuple[int, bool]]]:
    """Puts runtimes of known speed in the place of compiled ones; gives the list of what has been compiled."""

    def put(seconds: Seconds) -> list[tuple[int, bool]]:
        asked = []
        now = 0.0

        class Runtime:
            def __init__(self, max_length: int, dynamic: bool, compiling: bool) -> None:
                self.backend = "aoti" if compiling else "eager"
                self._max_length = max_length
                self._dynamic = dynamic

            def __call__(self, ids: np.ndarray) -> None:
                nonlocal now
                assert len(ids) <= self._max_length
                now += seconds(len(ids), self._dynamic) * (1.0 if self.backend == "aoti" else UNCOMPILED)

        def load(_folder: Path, max_length: int, *, dynamic: bool, compiling: bool = True, **_: object) -> Runtime:
            if compiling:
                asked.append((max_length, dynamic))
            return Runtime(max_length, dynamic, compiling)

        monkeypatch.setattr(compiled_classifier, "load", load)
        monkeypatch.setattr(latency_profile.packed_runtime, "suits", lambda _folder, **_: False)
        monkeypatch.setattr(latency_profile, "time", SimpleNamespace(perf_counter=lambda: now))
        return asked

    return put


def test_where_static_is_no_faster_two_lengths_decide(folder, compiled) -> None:
    asked = compiled(lambda length, dynamic: smooth(length) * (1.0 if dynamic else 0.98))
    reports: list[float] = []
    made = measure_profile(RuntimeSpec(folder, 512, dynamic=True), lambda _text, done: reports.append(done))
    assert asked == [(512, True), (64, False), (512, False)]
    assert reports == sorted(reports)
    assert (reports[0], reports[-1]) == (0, 1)
    assert (made.lengths, made.steps, made.static_at) == (LENGTHS, (), (64, 512))
    np.testing.assert_allclose(made.dynamic_s, [smooth(length) for length in LENGTHS], rtol=1e-6)
    assert made.unpadded_saving == pytest.approx(0.02)
    assert not made.static_pays
    assert (made.model, made.dtype, made.threads) == ("bert", "float32", 1)


def test_where_static_is_faster_each_edge_is_measured(folder, compiled) -> None:
    """The shape of the paper's figure 2: a staircase, and static code that saves most on short texts."""

    def seconds(length: int, dynamic: bool) -> float:
        return stairs(length) * (1.0 if dynamic else 0.3 + 0.5 * length / 512)

    asked = compiled(seconds)
    made = measure_profile(RuntimeSpec(folder, 512, dynamic=True), lambda _text, _done: None)
    assert asked == [(512, True), (64, False), (512, False), *((edge, False) for edge in EDGES[1:])]
    assert made.steps == EDGES
    assert made.static_at == (*EDGES, 512)
    for length in made.static_at:
        assert made.service_s(length, "static") == pytest.approx(seconds(length, False))
    assert made.static_pays


@pytest.mark.parametrize(
    ("packed", "takes", "static", "asked_for", "serves"),
    [
        (1.1, 0.95, False, [(512, True)], "packed"),
        (1.1, 0.95, True, [(512, True), (64, False), (512, False), *((edge, False) for edge in EVEN)], "packed"),
        (1.1, 0.98, True, [(512, True), (64, False), (512, False)], "packed"),
        (1.15, 0.93, False, [(512, True), (64, False), (512, False)], "packed"),
        (1.15, 0.5, False, [(512, True), (64, False), (512, False), *((edge, False) for edge in EVEN)], "static"),
        (1.3, 0.96, False, [(512, True), (64, False), (512, False)], "dynamic"),
        (1.3, 0.5, False, [(512, True), (64, False), (512, False), *((edge, False) for edge in EVEN)], "static"),
        (0.95, 0.95, False, [(512, True)], "packed"),
        (0.9, 0.95, False, [], "packed"),
        (0.9, 0.98, True, [(512, True), (64, False), (512, False)], "packed"),
    ],
)
def test_nothing_is_compiled_that_a_packed_runtime_leaves_no_chance(
    folder, compiled, monkeypatch, packed, takes, static, asked_for, serves
) -> None:
    asked = compiled(lambda length, kind: smooth(length) * {"packed": packed, True: 1.0, False: takes}[kind])
    times = PassTimes(counts=(1,), lengths=(512,), seconds=((smooth(512),),))
    monkeypatch.setattr(latency_profile.packed_runtime, "suits", lambda _folder, **_: True)
    monkeypatch.setattr(latency_profile.timed_runtime, "load", lambda *_, **__: Packed(folder, times))
    load = Mock(wraps=compiled_classifier.load)
    monkeypatch.setattr(compiled_classifier, "load", load)
    made = measure_profile(RuntimeSpec(folder, 512, dynamic=True), lambda _text, _done: None, static)
    assert [each for each in asked if each[1] != "packed"] == asked_for
    assert sum(not call.kwargs.get("compiling", True) for call in load.mock_calls) == (not static)
    assert made.fastest() == serves
    assert made.static_pays == (takes == 0.5)
    assert ("none were compiled" in made.summary()) == (len(asked_for) <= 1)
    assert made.compiled == bool(asked_for)
    assert ("than the uncompiled model. Others could not" in made.summary()) == (not asked_for)
    assert ("uncompiled" in made.reason()) == (not asked_for)


@pytest.mark.parametrize("longest", [3, 8, 20, 100, 8192])
def test_any_longest_length_has_a_profile(folder, compiled, longest) -> None:
    compiled(lambda length, dynamic: smooth(length) * (1.0 if dynamic else 0.5))
    made = measure_profile(RuntimeSpec(folder, longest, dynamic=True), lambda _text, _done: None)
    assert made.longest == longest
    assert len(made.lengths) <= 64
    assert len(made.static_at) <= 8


@pytest.mark.parametrize("seed", range(5))
def test_finds_a_staircase_through_noise_and_none_on_a_slope(seed) -> None:
    slow_moments = 1 + 0.03 * np.random.default_rng(seed).exponential(size=(8, len(LENGTHS)))
    found = find_steps(LENGTHS, slow_moments * [stairs(length) for length in LENGTHS])
    assert len(found) >= 5
    assert set(found) <= set(EDGES)
    assert find_steps(LENGTHS, slow_moments * [smooth(length) for length in LENGTHS]) == ()
    assert find_steps(LENGTHS, slow_moments) == ()


def test_uncompiled_profiles_are_kept_apart(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert not can_compile(RuntimeSpec(folder, 40, dynamic=True))
    made = profile(folder, 40)
    monkeypatch.setattr(latency_profile, "run_in_background", None)
    assert profile(folder, 40) == made
    (kept,) = (path for path in (tmp_path / "profiles").iterdir() if path.is_dir())
    assert kept.name.endswith("-uncompiled")


def test_another_version_of_a_model_is_not_measured_again(folder, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    made = profile(folder, 40)
    monkeypatch.setattr(latency_profile, "run_in_background", None)
    assert profile(shutil.copytree(folder, tmp_path / "next"), 40) == made.model_copy(update={"model": "next"})


def test_refuses_lengths_that_the_model_cannot_take(folder) -> None:
    with pytest.raises(ModelError, match="choose 3 to 512"):
        profile(folder, 513)
