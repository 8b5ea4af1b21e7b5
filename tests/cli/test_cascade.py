"""`pliant profile` of a cascade: what it prints and writes, and what would serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.scripted_cascade import LABELS, Model, Service, candidate, texts
from typer.testing import CliRunner

from pliant.cli import cascade as cascade_cli
from pliant.cli import command
from pliant.config.cluster import IMPORT_PATH
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.table import CascadeTable
from pliant.training import labelled_texts

ENCODER = {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}


def cluster(folder: Path, **options: Any) -> Path:
    cascade = {"kind": "cascade", "levels": ["small", "large"], "data": "zoo/topics", "accuracy_loss": 0.02, **options}
    services = {"small": ENCODER, "large": ENCODER, "c": cascade}
    application = {"import_path": IMPORT_PATH, "args": {"services": services}}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which levels were loaded; they are scripted."""
    names: list[str] = []

    async def classifiers(encoders: dict[str, EncoderConfig], _progress: object) -> tuple[Any, Any]:
        names.extend(encoders)
        made = (Model("small", 0.85, 0.001), Model("large", 0.97, 0.01))
        return {model.name: Service(model) for model in made}, {level: ["aoti on a processor"] for level in encoders}

    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cascade_cli, "local_classifiers", classifiers)
    monkeypatch.setattr(cascade_cli, "attention_agreements", lambda profiled, _level, _config: profiled)
    monkeypatch.setattr(cascade_cli.sources, "fetch", lambda _model, progress=None: tmp_path)
    monkeypatch.setattr(command, "check_models", lambda _serving: None)
    monkeypatch.setattr(labelled_texts, "read", lambda _data, labels: texts(400) if labels == list(LABELS) else [])
    return names


def run(path: Path, out: Path) -> tuple[int, str]:
    result = CliRunner().invoke(command.app, ["profile", "c", "--config", str(path), "--out", str(out)])
    return result.exit_code, " ".join((result.output + str(result.exception or "")).split())


def test_a_profile_is_printed_and_written(loaded: list[str], tmp_path: Path) -> None:
    code, output = run(cluster(tmp_path), tmp_path / "out")
    assert code == 0, output
    assert loaded == ["small", "large"]
    assert "c would serve small → large: 9" in output
    assert "Measured on 400 labelled texts; the best of" in output
    table = CascadeTable.model_validate_json((tmp_path / "out" / "profile-c.json").read_bytes())
    assert [level.name for level in table.levels] == ["small", "large"]
    assert (tmp_path / "out" / "profile-c.png").read_bytes().startswith(b"\x89PNG")
    [kept] = [path for path in (tmp_path / "cache" / "cascades").iterdir() if path.is_dir()]
    before = (kept / "readings.npz").stat().st_mtime_ns
    assert run(cluster(tmp_path), tmp_path / "again")[0] == 0
    assert (kept / "readings.npz").stat().st_mtime_ns == before


def test_a_promise_that_cannot_be_kept_is_reported_before_the_cluster_starts(loaded: list[str], tmp_path: Path) -> None:
    code, output = run(cluster(tmp_path, slo_ms=1), tmp_path)
    assert code == 1
    assert "c would not serve: none of" in output
    assert "raise slo_ms, or ask for less accuracy" in output
    assert (tmp_path / "profile-c.png").exists()
    code, output = run(cluster(tmp_path, slo_ms=1, degrade=True), tmp_path)
    assert code == 0
    assert "c would serve the closest, small → large, and say so: none of" in output
    assert "While small cannot answer, large would, alone." in output


def test_what_a_conformal_promise_came_to_is_printed(loaded: list[str], tmp_path: Path) -> None:
    code, output = run(cluster(tmp_path, conformal={"epsilon": 0.05}), tmp_path)
    assert code == 0, output
    assert "epsilon 0.05, delta 0.05: small" in output


def test_what_any_level_before_the_last_answers_counts_as_early() -> None:
    chosen = candidate("t@0", "t@3", "t", shares=(0.0, 0.87, 0.13))
    assert cascade_cli._described(chosen).endswith("with 87% answered early")
