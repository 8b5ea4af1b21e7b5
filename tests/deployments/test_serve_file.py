"""What Ray Serve would refuse is said before it starts, as what pliant refuses is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pliant.deployments import serve_file
from pliant.errors import ConfigError

ROOT = Path(__file__).parents[2]


def write(folder: Path, application: dict[str, Any], **changes: Any) -> Path:
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["applications"][0].update(application)
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.gpu.yaml"])
def test_our_files_are_fine(name: str) -> None:
    serve_file.check(ROOT / name)


@pytest.mark.parametrize(
    ("application", "changes", "line"),
    [
        ({}, {"proxy_location": "Everywhere"}, "proxy_location: got 'Everywhere'; input should be 'Disabled', "),
        ({}, {"target_capacity": 500}, "target_capacity: got 500; input should be less than or equal to 100"),
        ({}, {"grpc_options": {"port": "x"}}, "grpc_options.port: got 'x'; input should be a valid integer"),
        ({"logging_config": {"log_level": "LOUD"}}, {}, "applications.0.logging_config.log_level: got 'LOUD'; "),
        (
            {"deployments": [{"name": "gateway", "num_replicas": -1}]},
            {},
            "applications.0.deployments.0.num_replicas: got -1; input should be greater than 0",
        ),
    ],
)
def test_a_line_says_what_is_wrong(
    tmp_path: Path, application: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        serve_file.check(write(tmp_path, application, **changes))
    assert error.value.problems[0].startswith(line)


def test_serving_ends_with_that_line(tmp_path: Path) -> None:
    path = write(tmp_path, {}, proxy_location="Everywhere")
    ended = subprocess.run(
        [sys.executable, "-m", "pliant.deployments.run", str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("proxy_location: got 'Everywhere'; ")
