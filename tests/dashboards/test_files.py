"""What Grafana and Prometheus get is what is in the repository, names only what there is, and is valid."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pliant.cli.command import app
from pliant.dashboards.boards import BOARDS
from pliant.dashboards.files import files, write
from pliant.dashboards.grafana import Dashboard
from pliant.dashboards.rules import ALERTS, RECORDINGS

ROOT = Path(__file__).parents[2]
EXPRESSIONS = [
    *(query.expression for board in BOARDS for panel in board.panels for query in panel.queries),
    *(each.expression for each in RECORDINGS),
    *(each.expression for each in ALERTS),
]


def test_the_folder_is_what_the_command_writes(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["dashboards", str(tmp_path)]).exit_code == 0
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    kept = ROOT / "dashboards"
    assert written == files()
    assert written == {str(path.relative_to(kept)): path.read_text() for path in kept.rglob("*") if path.is_file()}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_is_documented_for_the_page_that_it_is_read_from(expression: str) -> None:
    rows = re.findall(r"^\| (`pliant_.*?) \| ([GR, ]+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    places = {name: places for names, places in rows for name in re.findall(r"`(pliant_\w+)`", names)}
    for ray, name in re.findall(r"(?<![\w:])(ray_)?(pliant_\w+)", re.sub(r"pliant:bad:\w+", "", expression)):
        assert ("R" if ray else "G") in places[name.removesuffix("_bucket")], name


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_panels_are_side_by_side(board: Dashboard) -> None:
    panels = board.as_json()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart = [one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at] for at, size in ("xw", "yh")]
        assert any(apart)
    assert max(panel["gridPos"]["x"] + panel["gridPos"]["w"] for panel in panels) == 24


def test_every_alert_has_its_section() -> None:
    sections = re.findall(r"^## (Pliant\w+)$", (ROOT / "docs" / "incidents.md").read_text(), re.M)
    assert sections == [alert.name for alert in ALERTS]


def test_alerts_are_tested() -> None:
    tested = yaml.safe_load((Path(__file__).parent / "alerts.yml").read_text())["tests"]
    fired = {each["alertname"] for test in tested for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert fired == {alert.name for alert in ALERTS}


def promtool(*arguments: str | Path) -> str:
    tool = shutil.which("promtool")
    if tool is None and os.environ.get("PLIANT_PROMETHEUS") != "required":
        pytest.skip("there is no promtool")
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    write(tmp_path)
    promtool("check", "config", tmp_path / "prometheus" / "prometheus.yml")


def test_alerts_fire_when_they_are_to_and_not_before(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "alerts.yml").write_text((Path(__file__).parent / "alerts.yml").read_text())
    promtool("test", "rules", tmp_path / "alerts.yml")


def test_dashboards_are_written_where_ray_writes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(tmp_path / "dashboards"))
    from pliant.cli.serve import write_boards

    write_boards()
    assert {json.loads(path.read_text())["uid"] for path in (tmp_path / "dashboards").iterdir()} == {
        f"pliant-{board.name}" for board in BOARDS
    }
