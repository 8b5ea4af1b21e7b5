"""`pliant simulate` of several services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pliant.cli import command

CLUSTER = """
applications:
- import_path: pliant.deployments.app:build
  autoscaling_policy: {policy_function: "pliant.deployments.autoscaling:follow_planner"}
  args:
    budget: {nodes: [{count: 1, gpus: 8, cpus: 32}]}
    services:
      topics: {kind: encoder, model: zoo/topics-large, lengths: [512], replicas: {min: 1, max: 8}, gpus: 1}
      chat: {kind: llm, model: zoo/tiny-llama, replicas: {min: 1, max: 8}, gpus: 1, tpot_ms: 50}
      digits: {kind: vision, model: zoo/digits-vit, replicas: {min: 1, max: 8}, gpus: 0.5}
"""
SPEEDS = """
topics: {text_ms: 20, start_s: 30}
chat: {prompt_tokens_per_s: 15000, step_ms: 15, row_ms: 0.3, prompt_tokens: 500, answer_tokens: 100}
digits: {image_ms: [1.5, 2.5, 4], accuracy: [0.8, 0.9, 0.94]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "speeds.yaml").write_text(SPEEDS)
    rows = [
        f"{second},{service},{early if second < 600 else late}"
        for second in range(1200)
        for service, early, late in (("topics", 160, 20), ("chat", 4, 12), ("digits", 100, 900))
    ]
    (tmp_path / "trace.csv").write_text("\n".join(["second,service,requests", *rows]))
    return tmp_path


def simulate(folder: Path, *more: str) -> tuple[int, str]:
    given = [str(folder / "cluster.yaml"), "--trace", str(folder / "trace.csv"), "--out", str(folder)]
    result = CliRunner().invoke(
        command.app, ["simulate", *given, "--speeds", str(folder / "speeds.yaml"), *more], env={"COLUMNS": "120"}
    )
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_services_of_all_kinds_under_several_policies(folder: Path) -> None:
    code, output = simulate(folder, "--compare", "joint,independent,greedy", "--json")
    assert code == 0, output
    found = json.loads(output)
    assert list(found) == ["joint", "independent", "greedy"]
    for outcome in found.values():
        assert outcome["services"]["topics"]["requests"] == 600 * 180
        assert outcome["gpu_hours"] <= 8 / 3 + 1e-6
        assert all(0 <= each["shed"] <= each["requests"] for each in outcome["services"].values())
    assert found["joint"]["attainment"] > 0.9
    assert any(change["second"] > 600 for change in found["joint"]["changes"]), "GPUs follow the load"


def test_a_table_and_a_plot_and_nodes_of_the_command(folder: Path) -> None:
    code, output = simulate(folder, "--nodes", "2x8gpu32cpu")
    assert code == 0, output
    assert all(word in output for word in ("joint", "topics", "chat", "digits", "GPU hours"))
    assert (folder / "simulate.png").exists()


def test_nodes_that_go_are_missed(folder: Path) -> None:
    def attainment(*more: str) -> float:
        code, output = simulate(folder, "--nodes", "2x4gpu32cpu", "--json", *more)
        assert code == 0, output
        return float(json.loads(output)["joint"]["attainment"])

    assert attainment("--outage", "1x4gpu32cpu@300+300", "--outage", "1x4gpu32cpu@900+120-60") < attainment() - 0.02


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--nodes", "8"), "--nodes: got 8; must be such as 8x8gpu96cpu"),
        (("--nodes", "1x1gpu8cpu"), "give more --nodes, or lower min replicas"),
        (("--outage", "1x8gpu"), "--outage: got 1x8gpu; must be such as 2x8gpu96cpu@3600+600-120"),
        (("--outage", "2x8gpu32cpu@1+1"), "--outage: got 2x8gpu32cpu@1+1; there are not so many such nodes"),
        (("--compare", "joint,other"), "--compare: other: must be one of joint, independent, greedy"),
        (("--gpus", "4", "--trace", "other.csv"), "--trace: one file with --gpus"),
    ],
)
def test_mistakes_are_reported_in_one_line(folder: Path, more: tuple[str, ...], says: str) -> None:
    code, output = simulate(folder, *more)
    assert code == 1
    assert says in output


@pytest.mark.parametrize(
    ("speeds", "says"),
    [
        ("topics: {text_ms: 20}", "speeds: nothing is said of chat"),
        (SPEEDS.replace("text_ms: 20", "text_ms: 0"), "topics.text_ms: Input should be greater than 0"),
        (SPEEDS.replace("text_ms: 20", "text_ms: 900"), "topics: a replica that has nothing else to do misses"),
        (SPEEDS.replace("prompt_tokens: 500, ", ""), "chat: needs prompt_tokens and answer_tokens"),
        (SPEEDS + "other: {text_ms: 3}", "other: no service with replicas; there are: topics, chat, digits"),
        ("[", "is no YAML"),
    ],
)
def test_mistakes_in_speeds_are_reported(folder: Path, speeds: str, says: str) -> None:
    (folder / "speeds.yaml").write_text(speeds)
    code, output = simulate(folder)
    assert code == 1
    assert says in output
