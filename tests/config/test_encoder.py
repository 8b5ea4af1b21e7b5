"""What cluster.yaml may say of a text classifier, and the line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pliant import zoo
from pliant.config.cluster import check_models
from pliant.config.encoder import Arlo, EncoderConfig
from pliant.deployments.kinds import parse
from pliant.errors import ConfigError
from pliant.models import encoder_exits
from pliant.models.encoder_exits import ExitsInfo

SERVICE = {"kind": "encoder", "model": "zoo/topics-small", "lengths": [32, 64], "replicas": 2}


def parsed(**changes: Any) -> EncoderConfig:
    return parse({"services": {"topics": {**SERVICE, **changes}}}).of(EncoderConfig)["topics"]


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parsed(**changes)
    return error.value.problems


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"slo_ms": "fast"}, "services.topics.slo_ms: got 'fast'; input should be a valid number"),
        ({"slo_ms": 0}, "services.topics.slo_ms: got 0; input should be greater than 0"),
        ({"lenghts": [1]}, "services.topics.lenghts: unknown key; did you mean lengths? allowed: class, cpus, demand"),
        ({"lengths": []}, "services.topics.lengths: got []"),
        ({"lengths": [64, 32]}, "services.topics.lengths: got [64, 32]; lengths must rise, each once"),
        ({"lengths": "some"}, "services.topics.lengths: got 'some'; must be auto, or a list of lengths"),
        ({"dispatch": "first"}, "services.topics.dispatch: got 'first'; must be finish, arlo, or its numbers such as"),
        ({"dispatch": {"decay": 2}}, "services.topics.dispatch.decay: got 2; input should be less than or equal to 1"),
        ({"dispatch": {"alpha": 1}}, "services.topics.dispatch.alpha: unknown key; allowed: decay, peek, threshold"),
        ({"replicas": 0}, "services.topics.replicas: got 0; must be a number of at least 1, or {min: 1, max: 4}"),
        (
            {"replicas": {"min": 3, "max": 2}},
            "services.topics.replicas: got {'min': 3, 'max': 2}; max must be at least",
        ),
        ({"replicas": {"min": 3, "mx": 4, "max": 5}}, "services.topics.replicas.mx: unknown key; did you mean max?"),
        ({"demand_quantile": 1}, "services.topics.demand_quantile: got 1; input should be less than 1"),
        ({"dtype": "int8"}, "services.topics.dtype: got 'int8'; input should be 'float32' or 'bfloat16'"),
    ],
)
def test_each_mistake_is_one_line(changes: dict[str, Any], line: str) -> None:
    [problem] = problems(**changes)
    assert problem.startswith(line)
    assert "\n" not in problem


def test_all_mistakes_are_told_at_once() -> None:
    assert len(problems(dtype="int8", slo_ms=-1, extra=1)) == 3


def test_lengths_may_be_left_to_the_profile() -> None:
    for lengths in (None, "auto"):
        topics = parsed(lengths=lengths)
        assert topics.lengths is None
        assert topics.longest(model_takes=512) == 512
    assert EncoderConfig(kind="encoder", model="zoo/topics-small", replicas=1).lengths is None


def test_the_paper_s_rule_has_its_numbers_or_others() -> None:
    assert parsed(dispatch="finish").dispatch is None
    assert parsed(dispatch="arlo").dispatch == Arlo(threshold=0.85, decay=0.9, peek=6)
    assert parsed(dispatch={"decay": 0.5}).dispatch == Arlo(threshold=0.85, decay=0.5, peek=6)


def test_replicas_are_a_number_or_a_range() -> None:
    fixed, scaled = (parsed(replicas=replicas).replicas for replicas in (3, {"min": 1, "max": 4}))
    assert (fixed.min, fixed.max, fixed.fixed) == (3, 3, True)
    assert (scaled.min, scaled.max, scaled.fixed) == (1, 4, False)


def test_models_are_checked(tmp_path: Path) -> None:
    for changes, line in (
        ({"model": "zoo/nothing"}, "services.topics.model:"),
        ({"model": str(tmp_path / "nothing")}, "services.topics.model:"),
        ({"lengths": [64, 1024]}, "services.topics.lengths: got 1024; zoo/topics-small takes at most 512 tokens"),
    ):
        serving = parse({"services": {"topics": {**SERVICE, **changes}}})
        with pytest.raises(ConfigError) as error:
            check_models(serving)
        assert error.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    ("model", "path", "key"),
    [("zoo/topics-small", "models/x", "inputs"), ("zoo/topics-embedding", "v1/embeddings", "input")],
)
def test_the_example_suits_what_the_model_is_for(model: str, path: str, key: str) -> None:
    example = EncoderConfig(kind="encoder", model=model, replicas=1).example("x")
    assert example.path == path
    assert key in example.body


@pytest.mark.parametrize("residency", [2, "two", None])
def test_what_residency_cannot_be(residency: object) -> None:
    (problem,) = problems(residency=residency)
    assert problem.startswith("services.topics.residency: ")
    assert "'all', 'one' or 'several'" in problem


def test_memory_is_for_several_runtimes() -> None:
    assert parsed(residency="several", memory_mb=800).memory_bytes() == 800 * 2**20
    assert parsed(residency="several").memory_bytes() == 0
    for residency in ("all", "one"):
        (problem,) = problems(residency=residency, memory_mb=800)
        assert "memory_mb is for residency: several" in problem
    assert problems(residency="several", memory_mb=0)


def test_only_classifiers_tell_of_importance() -> None:
    serving = parse({"services": {"s": {**SERVICE, "model": "zoo/topics-embedding", "importance": True}}})
    with pytest.raises(ConfigError, match=r"services\.s\.importance: only what labels texts"):
        check_models(serving)


def test_exits_must_be_trained_and_be_computed(tmp_path: Path) -> None:
    for changes, line in (
        ({}, "services.s.model: zoo/topics-small: has no exits; train some with pliant train-exits"),
        ({"residency": "several"}, "services.s.exits: texts leave early only where a replica computes all lengths"),
        ({"residency": "one"}, "services.s.exits: texts leave early only where a replica computes all lengths"),
    ):
        serving = parse({"services": {"s": {**SERVICE, "exits": True, **changes}}})
        with pytest.raises(ConfigError) as error:
            check_models(serving)
        assert error.value.problems[0].startswith(line)
    zoo.describe("topics-small", tmp_path)
    (tmp_path / "exits").mkdir()
    encoder_exits.write(tmp_path, ExitsInfo(after=(1,), cut_off=0.5))
    for changes in ({}, {"gpus": 1}, {"gpus": 0.5, "dtype": "bfloat16"}, {"dtype": "bfloat16"}):
        check_models(parse({"services": {"s": {**SERVICE, "model": str(tmp_path), "exits": True, **changes}}}))
