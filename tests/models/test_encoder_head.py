"""A folder's files alone tell the task of an encoder, and how its states become an answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from pliant.errors import ModelError
from pliant.models.encoder_head import HeadShape, Sizes, Stage, head_of, task_of

SIZES = Sizes("bert", 32, 1e-12)


def folder(root: Path, *modules: tuple[str, dict[str, Any]]) -> Path:
    """One of sentence-transformers' with these modules, and their settings."""
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    for index, (kind, settings) in enumerate(modules, 1):
        path = f"{index}_{kind}"
        listed.append({"type": f"sentence_transformers.models.{kind}", "path": path})
        (root / path).mkdir()
        (root / path / "config.json").write_text(json.dumps(settings))
    (root / "modules.json").write_text(json.dumps(listed))
    return root


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("BertForSequenceClassification", "classify"),
        ("RobertaForTokenClassification", "tokens"),
        ("MPNetModel", "embed"),
        ("BertForMaskedLM", "embed"),
    ],
)
def test_the_architecture_tells_the_task(architecture: str, task: str, tmp_path: Path) -> None:
    assert task_of(tmp_path, {"architectures": [architecture]}) == task


@pytest.mark.parametrize(
    "config", [{}, {"architectures": []}, {"architectures": ["BertForQuestionAnswering"]}], ids=str
)
def test_what_is_no_task_here_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="choose one that ends in ForSequenceClassification, ForTokenClassification"):
        task_of(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "labels"),
    [({}, 2), ({"num_labels": 5}, 5), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3), ({"id2label": {0: "a"}}, 1)],
)
def test_labels_are_counted(config: dict[str, Any], labels: int, tmp_path: Path) -> None:
    for ending in ("ForSequenceClassification", "ForTokenClassification"):
        assert head_of(tmp_path, config | {"architectures": [f"Bert{ending}"]}, SIZES).outputs == labels


def test_without_modules_an_embedding_is_the_mean(tmp_path: Path) -> None:
    assert head_of(tmp_path, {"architectures": ["BertModel"]}, SIZES) == HeadShape("embed", ("mean",), (), False, 32)


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        ({"pooling_mode": "cls"}, ("cls",)),
        ({"pooling_mode": ["mean", "max"]}, ("mean", "max")),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, ("lasttoken",)),
        ({}, ("mean",)),
    ],
)
def test_modules_tell_how_tokens_become_an_embedding(
    settings: dict[str, Any], pooling: tuple[str, ...], tmp_path: Path
) -> None:
    width = 32 * len(pooling)
    dense = {"in_features": width, "out_features": 7, "bias": False, "activation_function": "torch.nn.modules.GELU"}
    made = folder(tmp_path, ("Pooling", settings), ("Dense", dense), ("Normalize", {}))
    stage = Stage(width, 7, bias=False, activation="gelu", weights="2_Dense")
    assert head_of(made, {"architectures": ["BertModel"]}, SIZES) == HeadShape("embed", pooling, (stage,), True, 7)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([("Pooling", {"pooling_mode": "median"})], "pools by 'median'"),
        ([("Pooling", {"include_prompt": False})], "leaves prompts out"),
        ([("Pooling", {}), ("LSTM", {})], "has a LSTM; only"),
        (
            [("Dense", {"in_features": 32, "out_features": 8})],
            "has no Pooling: a vector for each token is not supported",
        ),
        ([("Pooling", {}), ("Dense", {"in_features": 5, "out_features": 7})], "Dense of 5 to 7 numbers by Tanh"),
        ([("Pooling", {}), ("Dense", {"in_features": 32, "out_features": 7, "use_residual": True})], "residual"),
        ([("Pooling", {}), ("Normalize", {}), ("Dense", {"in_features": 32, "out_features": 7})], "after Normalize"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_modules_that_are_not_known_are_refused(modules: list[Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        head_of(folder(tmp_path, *modules), {"architectures": ["BertModel"]}, SIZES)


def test_a_module_s_type_may_be_in_any_part_of_sentence_transformers(tmp_path: Path) -> None:
    types = ["sentence_transformers.base.modules.transformer.Transformer", "sentence_transformers.models.Pooling"]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": each} for each in types]))
    assert head_of(tmp_path, {}, SIZES).pooling == ("mean",)


def test_a_type_without_a_package_is_of_another_one(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "Mine"}]))
    with pytest.raises(ModelError, match="has no Pooling"):
        head_of(tmp_path, {"architectures": ["BertModel"]}, SIZES)


def test_modules_of_other_packages_are_refused(tmp_path: Path) -> None:
    types = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling", "pylate.models.Dense"]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": each} for each in types]))
    with pytest.raises(ModelError, match=r"has a pylate\.models\.Dense; only Transformer, Pooling"):
        head_of(tmp_path, {}, SIZES)


@pytest.mark.parametrize("text", ["{", "5", "[5]", '[{"path": ""}]'])
def test_modules_that_are_no_list_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"its modules\.json is no list of modules"):
        task_of(tmp_path, {})
