"""Debian's Prometheus reads the cluster as `pliant dashboards` has it: every panel shows something, every rule works.

Without a prometheus this is skipped, but where $PLIANT_PROMETHEUS is set to `required`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.images import base64_png
from support.waiting import HANGS_AFTER_S, PATIENT_MS, wait_until

from e2e.cluster import Cluster
from e2e.load import Load
from pliant.bench.ray_session import free_port
from pliant.dashboards.boards import BOARDS
from pliant.dashboards.files import RAY_S_LIST, write
from pliant.dashboards.rules import ALERTS, RECORDINGS

NAMES = [*(each.name for each in RECORDINGS), *(each.name for each in ALERTS)]
EVENTS = {
    "ray_pliant_edge_answers_total",
    "ray_pliant_edge_retries_total",
    "ray_pliant_retries_total",
    "ray_pliant_cascade_degraded_total",
    "ray_pliant_cascade_words_total",
    "pliant_cascade_reroute_drifting",
    "ray_pliant_cascade_checks_total",
    "ray_pliant_cascade_checks_differing_total",
    "ray_pliant_cascade_rerouted_total",
    "ray_pliant_padding_tokens_total",
    "pliant_adapter_cache_evictions_total",
    "pliant_plan_predicted_latency_seconds",
}
"""Metrics of which nothing is there before what they count has happened."""


IMAGE = base64_png(np.zeros((8, 8), np.uint8))


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    program = shutil.which("prometheus")
    if program is None and os.environ.get("PLIANT_PROMETHEUS") != "required":
        pytest.skip("there is no prometheus")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    write(folder)
    config = folder / "prometheus" / "prometheus.yml"
    content = config.read_text().replace(RAY_S_LIST, str(cluster.started.folder / "ray" / Path(RAY_S_LIST).name))
    content = content.replace("localhost:8000", cluster.host)
    config.write_text(content)
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([str(program), *options], stdout=log, stderr=log) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def ask(http: httpx.Client, number: int) -> str:
    text = {"inputs": "Return a copy of the string", "parameters": {"slo_ms": PATIENT_MS}}
    words = {"model": ("chat", "logging-8")[number % 2], "prompt": "The for statement", "max_tokens": 4}
    calls: list[tuple[str, Any]] = [
        ("/models/topics", text),
        ("/models/e2e-made", text),
        ("/models/topics", {"inputs": "word " * 600}),
        ("/v1/completions", words),
        ("/models/digits", {"inputs": IMAGE, "parameters": {"task": "digit", "slo_ms": PATIENT_MS}}),
    ]
    path, body = calls[number % len(calls)]
    return str(http.post(path, json=body).status_code)


def test_every_panel_shows_something(cluster: Cluster, prometheus: str) -> None:
    asked = [query.expression for board in BOARDS for panel in board.panels for query in panel.queries]
    asked = [each.replace("$service", ".*").replace("$__rate_interval", "1m") for each in asked]
    asked += [each.name for each in RECORDINGS]
    wanted = {each for each in asked if not EVENTS & set(re.findall(r"\w*pliant_\w+", each))}

    def answers(expression: str) -> bool:
        found = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}, timeout=HANGS_AFTER_S)
        assert found.status_code in (200, 503), found.text  # 503: it starts
        return found.status_code == 200 and bool(found.json()["data"]["result"])

    def missing() -> set[str]:
        with contextlib.suppress(httpx.TransportError):  # it starts
            wanted.difference_update({each for each in wanted if answers(each)})
        return set(wanted)

    load = Load(cluster.address, 2, ask)
    with load.running():
        wait_until(lambda: not missing(), missing)
    for each in asked:
        answers(each)


def test_rules_are_computed_and_nothing_is_wrong_with_them(prometheus: str) -> None:
    def rules() -> list[dict[str, Any]]:
        groups = httpx.get(f"{prometheus}/api/v1/rules", timeout=HANGS_AFTER_S).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert {rule["name"]: rule["health"] for rule in rules()} == dict.fromkeys(NAMES, "ok")


def test_targets_are_found(cluster: Cluster, prometheus: str) -> None:
    def up() -> set[str]:
        targets = httpx.get(f"{prometheus}/api/v1/targets", timeout=HANGS_AFTER_S).json()["data"]["activeTargets"]
        return {target["labels"]["job"] for target in targets if target["health"] == "up"}

    wait_until(lambda: {"ray", "pliant"} <= up(), up)
