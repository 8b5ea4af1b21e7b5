"""Cascades in cluster.yaml: what is accepted, and that each mistake is told in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertConfig

from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import ServingConfig, check_models
from pliant.config.encoder import EncoderConfig
from pliant.deployments import kinds
from pliant.errors import ConfigError
from pliant.models import encoder_exits, sources
from pliant.models.encoder_exits import ExitsInfo

CASCADE = {"kind": "cascade", "levels": ["small", "large"], "data": "zoo/topics", "accuracy_loss": 0.01}
SMALL = {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}
LARGE = {**SMALL, "model": "zoo/topics-large"}


def parse(large: Any = LARGE, **changes: Any) -> ServingConfig:
    cascade = {key: value for key, value in {**CASCADE, **changes}.items() if value is not None}
    return kinds.parse({"services": {"small": SMALL, "large": large, "c": cascade}})


def read(check: bool, **changes: Any) -> None:
    parsed = parse(**changes)
    if check:
        check_models(parsed)


def problem(check: bool = False, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        read(check, **changes)
    [told] = error.value.problems
    assert "\n" not in told
    return told


def test_the_first_levels_tell_which_words_are_important() -> None:
    parsed = parse()
    check_models(parsed)
    assert parsed.of(CascadeConfig)["c"].levels == ("small", "large")
    assert [service.importance for service in parsed.of(EncoderConfig).values()] == [True, False]
    assert not any(service.importance for service in parse(prune=False).of(EncoderConfig).values())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"levels": ["small"]}, "services.c.levels: got ['small']; tuple should have at least 2 items"),
        ({"levels": ["a", "b", "c", "d", "e", "f"]}, "services.c.levels: got ["),
        ({"levels": ["small", "small"]}, "services.c: got "),
        ({"levels": ["small", "huge"]}, "services.c.levels.1: got huge, no service; must be an encoder service: small"),
        ({"levels": ["c", "large"]}, "services.c.levels.0: got c, cascade; must be an encoder service: small, large"),
        ({"accuracy_loss": None}, "services.c: got "),
        ({"accuracy_target": 0.9}, "services.c: got "),
        ({"accuracy_loss": 1.5}, "services.c.accuracy_loss: got 1.5; input should be less than 1"),
        ({"data": None}, "services.c.data: missing"),
        ({"conformal": {"epsilon": 2}}, "services.c.conformal.epsilon: got 2; input should be less than 1"),
        ({"level": []}, "services.c.level: unknown key; did you mean levels? allowed: accuracy_loss"),
    ],
)
def test_each_mistake_is_one_line(changes: dict[str, Any], line: str) -> None:
    assert problem(**changes).startswith(line)


def test_what_accuracy_means_must_be_clear() -> None:
    told = "needs either accuracy_loss, such as 0.01, or accuracy_target, such as 0.9"
    assert problem(accuracy_loss=None).endswith(told)
    assert problem(levels=["small", "small"]).endswith("each may be there once")


def model(folder: Path, labels: list[str], **options: Any) -> dict[str, Any]:
    path = folder / "model"
    path.mkdir()
    shape = BertConfig(id2label=dict(enumerate(labels)), architectures=["BertForSequenceClassification"], **options)
    (path / "config.json").write_text(shape.to_json_string())
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors").write_text("")
    return {**LARGE, "model": str(path)}


def test_labels_must_be_the_same_in_any_order(tmp_path: Path) -> None:
    labels = sources.check("zoo/topics-small").labels
    check_models(parse(large=model(tmp_path, list(labels)[::-1])))


@pytest.mark.parametrize(
    ("labels", "options", "line"),
    [
        (["a", "b"], {}, "levels.1: large and small need the same labels, in any order; only one of them has a, b, "),
        (["a"], {}, "levels.1: large does not choose one of several labels"),
        (["a", "b"], {"problem_type": "multi_label_classification"}, "levels.1: large does not choose one of several"),
        (["a", "a"], {}, "levels.1: large has labels of the same name"),
    ],
)
def test_models_must_fit_together(tmp_path: Path, labels: list[str], options: dict[str, Any], line: str) -> None:
    assert problem(check=True, large=model(tmp_path, labels, **options)).startswith(f"services.c.{line}")


def test_later_levels_must_take_what_earlier_ones_take() -> None:
    told = problem(check=True, large={**LARGE, "lengths": [64]})
    assert told == (
        "services.c.levels.1: large takes at most 64 tokens, and small, which reads texts before, 512; give both the "
        "same longest length"
    )


def test_what_one_level_cuts_those_after_it_must_not_refuse() -> None:
    small, cutting = {**SMALL, "truncate": True}, {**LARGE, "truncate": True}
    with pytest.raises(ConfigError) as error:
        kinds.parse({"services": {"small": small, "large": LARGE, "c": CASCADE}})
    assert error.value.problems == [
        "services.c.levels.1: large refuses texts that are too long, and small, which reads them before, cuts them; "
        "set truncate: true for both, or for neither"
    ]
    kinds.parse({"services": {"small": small, "large": cutting, "c": CASCADE}})
    kinds.parse({"services": {"small": SMALL, "large": cutting, "c": CASCADE}})


def test_the_labelled_texts_are_looked_at(tmp_path: Path) -> None:
    assert "services.c.data: nowhere: cannot be read" in problem(check=True, data="nowhere")
    (tmp_path / "few").write_text('{"text": "a", "label": "strings"}\n')
    assert "has 1 different texts" in problem(check=True, data=str(tmp_path / "few"))


def with_exits(tmp_path: Path, *levels: str, **changes: Any) -> ServingConfig:
    labels = list(sources.check("zoo/topics-small").labels)
    service = {**model(tmp_path, labels), **changes}
    (tmp_path / "model" / "exits").mkdir()
    encoder_exits.write(tmp_path / "model", ExitsInfo((0, 1, 3), 0.5))
    parsed = parse(large=service, levels=list(levels))
    check_models(parsed)
    return parsed


def test_exits_are_levels_and_their_service_has_them_read(tmp_path: Path) -> None:
    parsed = with_exits(tmp_path, "large@0", "large@3", "large", "small")
    assert parsed.of(CascadeConfig)["c"].parts() == ("large", "small")
    large, small = (parsed.of(EncoderConfig)[name] for name in ("large", "small"))
    assert (large.exit_levels, large.exits, large.importance) == (True, False, True)
    assert (small.exit_levels, small.importance) == (False, False)


@pytest.mark.parametrize(
    ("levels", "changes", "line"),
    [
        (["large@2", "large"], {}, "c.levels.0: got large@2; large has exits behind layers 0, 1, 3, and all of it is"),
        (
            ["small", "large@12"],
            {},
            "c.levels.1: got large@12; large has exits behind layers 0, 1, 3, and all of it is",
        ),
        (["large", "large@1"], {}, "c.levels.1: large@1 comes before what the text has been through; list exits in"),
        (["large@3", "large@1"], {}, "c.levels.1: large@1 comes before what the text has been through; list exits in"),
        (["large@1", "large"], {"exits": True}, "c.levels.0: large@1 is to have a cut-off of this cascade, and texts"),
        (["large@1", "large"], {"residency": "one"}, "large.exits: texts leave early only where a replica computes"),
        (["small@1", "large"], {}, "small.model: zoo/topics-small: has no exits; train some with pliant train-exits"),
        (["huge@1", "large"], {}, "c.levels.0: got huge@1, no service; must be an encoder service: small, large"),
        (["large@01", "large"], {}, "c.levels.0: got 'large@01'; string should match pattern"),
    ],
)
def test_exits_that_cannot_be_levels(tmp_path: Path, levels: list[str], changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_exits(tmp_path, *levels, **changes)
    assert error.value.problems[0].startswith(f"services.{line}")


def test_the_example_is_a_pair_where_the_labelled_texts_are_pairs(tmp_path: Path) -> None:
    given = {}
    lines = {"pairs": {"text": "a", "text_pair": "b", "label": "no"}, "single": {"text": "a", "label": "no"}}
    for name, line in lines.items():
        (tmp_path / name).write_text("\n" + json.dumps(line))
        config = CascadeConfig.model_validate({**CASCADE, "data": str(tmp_path / name)})
        given[name] = config.example("c").body["inputs"]
    assert set(given["pairs"]) == {"text", "text_pair"}
    assert isinstance(given["single"], str)
    assert CascadeConfig.model_validate(CASCADE).example("c").body["inputs"] == given["single"]
