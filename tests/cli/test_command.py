"""The `pliant` command, and those of it that look at a service: profile and simulate."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.doubles import profile
from typer.testing import CliRunner

from pliant import ray_settings
from pliant.cli import command
from pliant.formats.pass_times import PassTimes
from pliant.formats.profile import Profile

ROOT = Path(__file__).parents[2]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A profile whose static runtimes pay, as `pliant profile` writes it."""
    path = tmp_path / "profile.json"
    path.write_text(profile(static_share=0.5).model_dump_json())
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("second,requests\n" + "".join(f"{second},200\n" for second in range(60)))
    return path


def test_what_a_command_computes_waits_as_replicas_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "app", lambda: None)
    monkeypatch.setenv("GOMP_SPINCOUNT", "5")
    command.main()
    assert os.environ["GOMP_SPINCOUNT"] == "5"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    command.main()
    assert os.environ["GOMP_SPINCOUNT"] == ray_settings.ENVIRONMENT["GOMP_SPINCOUNT"]


def test_check_says_what_a_file_serves() -> None:
    result = CliRunner().invoke(command.app, ["check", str(ROOT / "cluster.yaml")])
    assert result.exit_code == 0, result.output
    assert "fine; serves topics (encoder)" in " ".join(result.output.split())


@pytest.mark.parametrize("arguments", [["check"], ["kubernetes", "--image", "registry.example.org/pliant"]])
def test_what_serve_refuses_is_wrong_too(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("proxy_location: Everywhere\n" + (ROOT / "cluster.yaml").read_text())
    result = CliRunner().invoke(command.app, [*arguments, str(path)])
    assert result.exit_code == 1
    assert "proxy_location: got 'Everywhere'; input should be 'Disabled', " in " ".join(result.output.split())


def simulate(*arguments: object) -> tuple[int, str]:
    given = ["simulate", str(ROOT / "cluster.yaml"), *map(str, arguments)]
    result = CliRunner().invoke(command.app, given)
    return result.exit_code, result.output + (str(result.exception) if result.exception else "")


def test_simulate_tells_what_a_trace_would_cost(measured: Path, trace: Path, tmp_path: Path) -> None:
    code, output = simulate("--trace", trace, "--gpus", 4, "--profile", measured, "--out", tmp_path)
    assert code == 0, output
    assert "answered within the SLO" in output
    assert "4.00 on average, 4 to 4" in output
    assert "start" in output
    assert (tmp_path / "simulate-topics.png").exists()


def test_simulate_computes_in_passes_where_that_is_fastest(measured: Path, trace: Path, tmp_path: Path) -> None:
    found = Profile.model_validate_json(measured.read_text())
    seconds = tuple(0.1 * each for each in found.dynamic_s)
    passes = PassTimes(counts=(1, 32), lengths=(8, 512), seconds=((0.321, 0.321), (0.322, 0.322)))
    measured.write_text(found.model_copy(update={"packed_s": seconds, "passes": passes}).model_dump_json())
    code, output = simulate("--trace", trace, "--gpus", 4, "--profile", measured, "--out", tmp_path)
    assert code == 0, output
    p50_ms = float(output.split("latency P50, P98")[1].split("ms")[0].strip(" │"))
    assert p50_ms > 321, "what a pass takes"


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (("--gpus", "many"), "--gpus: got many; must be a number such as 8, or a range such as 2-8"),
        (("--gpus", "4-2"), "--gpus: got 4-2"),
        (("--service", "other"), "no encoder service other; there are: topics"),
        (("--trace", "nothing.csv"), "nothing.csv: cannot be read: No such file"),
        (("--profile", ROOT / "cluster.yaml"), "is no profile; `pliant profile SERVICE` writes one"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    measured: Path, trace: Path, tmp_path: Path, changed: tuple[str, object], line: str
) -> None:
    arguments = {"--trace": trace, "--gpus": 4, "--profile": measured, "--out": tmp_path} | dict([changed])
    code, output = simulate(*(part for pair in arguments.items() for part in pair))
    assert code == 1
    assert line in output


def test_a_profile_is_written_down(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Profile.model_validate_json(measured.read_text())
    monkeypatch.setattr(command, "_measured", lambda _service: found)
    result = CliRunner().invoke(
        command.app, ["profile", "topics", "--config", str(ROOT / "cluster.yaml"), "--out", str(tmp_path / "new")]
    )
    assert result.exit_code == 0, result.output
    assert "static runtimes serve" in " ".join(result.output.split())
    assert json.loads((tmp_path / "new" / "profile-topics.json").read_text())["device"] == "d"
    assert (tmp_path / "new" / "profile-topics.png").exists()
