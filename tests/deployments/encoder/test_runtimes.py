"""What a replica computes on: packed at once, and then what was measured to be fastest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import tiny_classifiers
from support.caches import with_libraries
from support.doubles import Sleeper, profile

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder import runtimes
from pliant.deployments.encoder.computing import BatchRuntime, Held, compute
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.messages import Answer, ImportanceRequest, Query
from pliant.deployments.encoder.runtimes import ModelRuntimes
from pliant.errors import CannotCompileError
from pliant.kernels import c_compiler, gpu_memory
from pliant.kernels.encoder import compiled_classifier, timed_runtime
from pliant.kernels.encoder.texts import Stop
from pliant.models import encoder_exits, sources
from pliant.models.encoder_exits import ExitsInfo

TAKES = 60
QUERY = Query(np.array([2, 3, 4], "<i4").tobytes(), 3, None, 1.0, importance_request=ImportanceRequest(1.0, 2.0))

needs_compiler = pytest.mark.skipif(c_compiler.compiler() is None, reason="needs a C compiler")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLIANT_CACHE", str(with_libraries(tmp_path / "cache")))
    folder = tiny_classifiers.save(tmp_path / "m", "bert")
    monkeypatch.setattr(runtimes.sources, "fetch", lambda _model, **_: folder)
    return folder


def encoder(**options: Any) -> EncoderConfig:
    return EncoderConfig(kind="encoder", model="m", replicas={"min": 1, "max": 1}, **{"lengths": (16, TAKES)} | options)


def settle(found: ModelRuntimes, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """As if it had been measured so."""
    measured = profile(changes.pop("static_share", 1.0)).model_copy(update=changes)
    monkeypatch.setattr(runtimes, "profile", lambda _config: measured)
    found.settle_lengths()


@needs_compiler
def test_packs_at_once_and_cuts_passes_once_they_are_measured(model: Path) -> None:
    found = ModelRuntimes(encoder())
    assert found.resident
    unmeasured = found.load(16)
    assert isinstance(unmeasured, BatchRuntime)
    assert (unmeasured.backend, unmeasured.max_length, unmeasured.times) == ("c", TAKES, None)
    assert Held(unmeasured, {16: 1.0}).batcher is None
    assert compute(unmeasured, [QUERY])[0].importance is not None, "cascades can begin with it"
    assert found.missing() == {TAKES}
    found.compile(TAKES, lambda: 0.0)
    measured = found.load(16)
    assert isinstance(measured, BatchRuntime)
    assert measured.times
    assert Held(measured, {16: 1.0}).batcher
    assert found.missing() == set()


def test_without_a_compiler_it_stays_uncompiled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    monkeypatch.setattr(compiled_classifier, "cxx_compiler", lambda: None)
    found = ModelRuntimes(encoder())
    with pytest.raises(CannotCompileError, match="uncompiled"):
        found.compile(TAKES, lambda: 0.0)
    assert found.load(16).backend == "eager"
    assert found.resident, "the uncompiled model takes all lengths, too"


@needs_compiler
def test_the_compiler_may_have_gone(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = ModelRuntimes(encoder())
    found.compile(TAKES, lambda: 0.0)
    monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    assert found.load(16).backend == "eager"
    assert "no C compiler" in caplog.text


@needs_compiler
def test_what_is_fastest_follows_from_measurement(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModelRuntimes(encoder(lengths=(64, 512)))
    assert found.reason == ""
    fast = profile(1.0).dynamic_s
    settle(found, monkeypatch, packed_s=tuple(0.5 * second for second in fast))
    assert found.resident
    assert found.reason.startswith("packed: ")
    settle(found, monkeypatch, packed_s=tuple(2 * second for second in fast))
    assert found.resident
    assert found.reason.startswith("dynamic: ")
    settle(found, monkeypatch, static_share=0.3)
    assert not found.resident
    assert found.reason.startswith("static: ")
    assert found.missing() == {64, 512}, "one for each length"


def test_one_length_in_each_replica_needs_no_measurement(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModelRuntimes(encoder(residency="one"))
    monkeypatch.delattr(runtimes, "profile")
    found.settle_lengths()
    assert not found.resident
    assert found.lengths == (16, TAKES)
    assert found.load(16).max_length == 16
    assert found.reason == "static: residency is one"


def test_where_all_lengths_are_taken_homes_double(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = sources.describe(model).max_length
    assert ModelRuntimes(encoder(lengths="auto")).lengths == (32, 64, takes)


def test_models_of_transformers_are_not_packed(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_classifiers.save(tmp_path / "a", "albert")
    monkeypatch.setattr(runtimes.sources, "fetch", lambda _model, **_: folder)
    found = ModelRuntimes(encoder())
    assert found.load(16).backend == "eager"
    assert found.missing() == {TAKES}
    prepared: list[int] = []
    monkeypatch.setattr(compiled_classifier, "prepare", lambda *, max_length, **_: prepared.append(max_length))
    found.compile(TAKES, lambda: 0.0)
    assert prepared == [TAKES], "for any length"


STOPPING = QUERY._replace(importance_request=None, stops=(Stop(1, 1.0, 0.0),))


@pytest.fixture
def exits(model: Path) -> None:
    """One, behind the first layer."""
    (model / "exits").mkdir()
    save_file(
        {"weights": np.ones((1, 3, 32), "f4"), "biases": np.zeros((1, 3), "f4")}, model / "exits/model.safetensors"
    )
    encoder_exits.write(model, ExitsInfo((1,), 0.0))


@needs_compiler
def test_a_cascades_exits_are_read_whatever_was_measured_to_be_fastest(
    exits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ModelRuntimes(encoder(exit_levels=True))
    settle(found, monkeypatch, packed_s=())
    [plain], [leaving] = (compute(found.load(16), [query]) for query in (QUERY, STOPPING))
    assert (plain.layers, leaving.layers) == (None, 1), "only texts that say so leave"


async def test_exits_are_read_where_there_is_no_compiler(exits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    monkeypatch.delattr(runtimes, "profile")
    found = ModelRuntimes(encoder(exit_levels=True))
    engine = Engine(found)
    await engine.hold(TAKES)
    assert (engine.report()["backend"], engine.report()["resident"]) == ("torch", True)
    assert found.missing() == {TAKES}
    found.compile(TAKES, lambda: 0.0)
    found.settle_lengths()
    await engine.renew(TAKES)
    assert (found.missing(), found.reason) == (set(), "packed: texts leave early")
    assert isinstance(engine.held, BatchRuntime)
    assert engine.held.times
    plain, leaving = [await engine.infer(query) for query in (QUERY, STOPPING)]
    assert isinstance(plain, Answer)
    assert isinstance(leaving, Answer)
    assert plain.importance, "that of all layers"
    assert engine.report()["layers"] == {1: 1}
    assert leaving.logits != plain.logits


def test_on_gpus_too_and_within_the_share_of_one_that_is_reserved(exits: None, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    loaded: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu_memory, "take_share", shares.append)
    monkeypatch.setattr(runtimes, "device", lambda _config: "a GPU")
    monkeypatch.setattr(timed_runtime, "load", lambda **given: loaded.append(given) or Sleeper(TAKES))
    ModelRuntimes(encoder(exits=True, gpus=0.5, dtype="bfloat16")).load(16)
    [given] = loaded
    assert (given["exits"], given["unasked"], given["device"], given["dtype"]) == (True, True, "cuda", "bfloat16")
    assert shares == [0.5]


def test_a_runtime_that_computes_all_layers_lets_no_text_leave() -> None:
    with pytest.raises(CannotCompileError, match="sleeper computes all layers of a text"):
        compute(Sleeper(16), [STOPPING])
