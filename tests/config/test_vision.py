"""What cluster.yaml may say of a vision service, and the line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.vision_folders import vision_folder, vision_model

from pliant.config.cluster import check_models
from pliant.config.vision import TasksConfig, VisionConfig
from pliant.deployments.kinds import parse
from pliant.errors import ConfigError

SERVICE = {"kind": "vision", "model": "zoo/digits-vit", "tasks": "zoo/digits-tasks"}


def parsed(**changes: Any) -> VisionConfig:
    return parse({"services": {"digits": {**SERVICE, **changes}}}).of(VisionConfig)["digits"]


def test_a_text_means_the_folder_of_tasks() -> None:
    assert parsed().tasks == TasksConfig(folder="zoo/digits-tasks")
    assert parsed(tasks={"roots": ["/tasks"]}).tasks.roots == ("/tasks",)


def test_gammas() -> None:
    assert parsed().gammas is None
    assert parsed(gammas="auto").gammas is None
    assert parsed(gammas=[2, 0, -4, 2]).gammas == (-4, 0, 2)
    assert parsed(gammas=[8]).gammas == (8,)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"gammas": "some"}, "services.digits.gammas: got 'some'; must be auto, or a list of token counts such as [-4"),
        ({"gammas": []}, "services.digits.gammas: got []"),
        (
            {"gammas": [2, 4]},
            "services.digits.gammas: got [2, 4]; some tasks may lack prompts, or accuracies, for all of them",
        ),
        ({"gammas": [0, 9999]}, "services.digits.gammas.1: got 9999; input should be less than or equal to 512"),
        ({"policy": "best"}, "services.digits.policy: got 'best'; input should be 'exact' or 'algorithm_2'"),
        ({"utility": 0}, "services.digits.utility: got 0; input should be greater than 0"),
        ({"gammas": [-4, 8]}, "services.digits.gammas: got [-4, 8]; some tasks may lack prompts, or accuracies,"),
        ({"queue": 0}, "services.digits.queue: got 0"),
        ({"queue": 4097}, "services.digits.queue: got 4097"),
        (
            {"tasks": {"folders": "x"}},
            "services.digits.tasks.folders: unknown key; did you mean folder? allowed: folder",
        ),
        ({"tasks": {"roots": ["s3://bucket/tasks"]}}, "services.digits.tasks.roots"),
        ({"batching": {"factor": 0.5}}, "services.digits.batching.factor: got 0.5"),
        ({"batching": {"delta_ms": -1}}, "services.digits.batching.delta_ms: got -1"),
        ({"batching": {"delta_s": 1}}, "services.digits.batching.delta_s: unknown key; did you mean delta_ms?"),
        ({"slots": 3}, "services.digits.slots: unknown key"),
    ],
)
def test_mistakes(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(**changes)
    assert line in str(error.value)


def test_without_tasks_the_model_needs_a_head_of_its_own(tmp_path: Path) -> None:
    def misfit(classes: int, **options: Any) -> str:
        folder = tmp_path / str(classes)
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            vision_folder(folder, vision_model(num_classes=classes))
        service = {"kind": "vision", "model": str(folder), **options}
        try:
            check_models(parse({"services": {"digits": service}}))
        except ConfigError as error:
            return str(error)
        return ""

    assert misfit(5) == ""
    assert misfit(5, gammas=[-4]) == ""
    assert "services.digits.gammas: got 8; the model's own head, the only task, has no prompts" in misfit(5, gammas=[8])
    assert "services.digits.tasks: missing; the model has no head of its own" in misfit(0)
    assert misfit(0, tasks={"roots": [str(tmp_path)]}) == ""


def test_the_model_and_the_tasks_must_exist(tmp_path: Any) -> None:
    serving = parse({"services": {"digits": {**SERVICE, "tasks": str(tmp_path / "x")}}})
    with pytest.raises(ConfigError, match=r"services\.digits\.tasks\.folder: .*there is no such folder"):
        check_models(serving)
    for model in (tmp_path, tmp_path / "none"):
        other = parse({"services": {"digits": {**SERVICE, "model": str(model)}}})
        with pytest.raises(ConfigError, match=r"choose (a folder|one) that holds config\.json, model\.safetensors$"):
            check_models(other)
    other = parse({"services": {"digits": {**SERVICE, "model": "zoo/cats"}}})
    with pytest.raises(ConfigError, match=r"services\.digits\.model: .*the zoo has no such model"):
        check_models(other)


def test_settings_of_a_policy_that_is_not_used_are_a_mistake() -> None:
    given = {"policy": "algorithm_2", "algorithm_2": {"beta": 3}, "batching": {"factor": None}}
    assert parsed(**given).misfit({}) is None
    said = parsed(**{**given, "policy": "exact"}).misfit({})
    assert said == "algorithm_2: policy exact does not read it; write policy: algorithm_2, or leave it out"
