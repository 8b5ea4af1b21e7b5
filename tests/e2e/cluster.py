"""A real cluster under `pliant serve`, and what tests ask of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from support.waiting import HANGS_AFTER_S, PATIENT_MS, PROCESS_HANGS_AFTER_S, wait_until

from pliant.bench.ray_session import Running, environment, free_port, running, script
from pliant.bench.start.processes import background_seconds
from pliant.cache import cache_folder

ROOT = Path(__file__).parents[2]


@dataclass
class Cluster:
    """A running cluster: where it answers, its configuration file, and the Ray session that it owns."""

    address: str
    path: Path
    started: Running

    @property
    def host(self) -> str:
        """host:port, as tritonclient wants it."""
        return self.address.removeprefix("http://")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """`pliant serve`."""
        return self.started.process

    def get(self, path: str) -> Any:
        """The JSON there."""
        return httpx.get(f"{self.address}{path}", timeout=HANGS_AFTER_S).raise_for_status().json()

    def metrics(self) -> str:
        """The gateway's page for Prometheus."""
        return httpx.get(f"{self.address}/metrics", timeout=HANGS_AFTER_S).raise_for_status().text

    def ray_metrics(self) -> list[str]:
        """The lines of Ray's own page for Prometheus."""
        port = next(self.started.folder.glob("ray/session_latest/metrics_export_port_*")).read_text()
        return httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=HANGS_AFTER_S).text.splitlines()

    def stats(self, service: str = "topics") -> dict[str, dict[str, Any]]:
        """The gateway's view of the service's replicas, by replica id."""
        replicas: dict[str, dict[str, Any]] = self.get("/stats")["services"][service]["replicas"]
        return replicas

    def plan(self, service: str = "topics") -> dict[str, Any]:
        """What the planner last said of the service."""
        plan: dict[str, Any] = self.get("/stats")["services"][service]["plan"]
        return plan

    def progress(self) -> dict[str, Any]:
        """What changes for as long as the cluster gets anywhere, but not with every request: for `wait_until`."""
        try:
            stats = self.get("/stats")
        except httpx.HTTPError as error:
            return {"gateway": repr(error)}
        found: dict[str, Any] = {}
        for name, service in stats["services"].items():
            held = {replica: report.get("max_length") for replica, report in service["replicas"].items()}
            found[name] = f"{service['state']}; {held}"
        made = sorted(path.name for path in cache_folder().glob("*/*"))
        return {**found, "made": made, "background_s": round(background_seconds(psutil.process_iter()), -1)}

    def await_gateway(self) -> None:
        """Wait until it answers, whether any service can or not."""

        def answers() -> bool:
            assert self.process.poll() is None, f"it has ended: {self.started.tail()}"
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.address}/v2/health/live", timeout=HANGS_AFTER_S).status_code == 200
            return False

        wait_until(answers, lambda: background_seconds(psutil.process_iter()))

    def await_ready(self, *services: str) -> None:
        """Wait until these services can answer; or all, and their adapters are there, too."""

        def ready() -> bool:
            assert self.process.poll() is None, f"it has ended: {self.started.tail()}"
            stats = self.get("/stats")
            views = stats["services"]
            there = bool(services) or all(view.get("adapters", 1) for view in views.values())
            return there and all(views[service]["ready"] for service in services or views)

        try:
            wait_until(ready, self.progress)
        except AssertionError as error:
            raise AssertionError(f"the cluster is not ready: {error}\n{self.started.tail()}") from None

    def classify(self, text: str | list[str], **parameters: Any) -> httpx.Response:
        body = {"inputs": text, "parameters": {"slo_ms": PATIENT_MS, **parameters}}
        return httpx.post(f"{self.address}/models/topics", json=body, timeout=HANGS_AFTER_S)

    def ray(self, code: str) -> str:
        """What `code` prints, run by a driver of its own inside this cluster's Ray."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**environment(self.started.folder), "RAY_ADDRESS": self._ray_address},
            capture_output=True,
            text=True,
            timeout=PROCESS_HANGS_AFTER_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def deploy(self, path: Path) -> None:
        """`serve deploy`: PUT another configuration to the running cluster."""
        self.serve("deploy", str(path))

    def serve(self, command: str, *arguments: str) -> str:
        """What `serve COMMAND` prints, asked of this cluster's dashboard."""
        call = [script("serve"), command, "-a", f"http://{self._dashboard}", *arguments]
        variables = environment(self.started.folder)
        done = subprocess.run(call, env=variables, capture_output=True, text=True, timeout=PROCESS_HANGS_AFTER_S)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @cached_property
    def _dashboard(self) -> str:
        return self.ray("import ray; print(ray.init(log_to_driver=False).dashboard_url)").split()[-1]

    @cached_property
    def _ray_address(self) -> str:
        port = next(self.started.folder.glob("ray/session_latest/gcs_server_port_*")).read_text()
        return f"127.0.0.1:{port}"

    def log_lines(self) -> list[dict[str, Any]]:
        """What its processes have logged, where `logging_config` says JSON."""
        files = self.started.folder.glob("ray/session_latest/logs/serve/*.log")
        return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.startswith("{")]

    def replica_processes(self, deployment: str = "topics") -> list[psutil.Process]:
        """The processes of the deployment's replicas."""
        found = []
        title = re.compile(rf"ServeReplica:pliant:{re.escape(deployment)}(?![\w-])")
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if title.search(" ".join(child.cmdline())):
                    found.append(child)
        return found


@contextlib.contextmanager
def serving(content: dict[str, Any], folder: Path) -> Iterator[Cluster]:
    """A cluster of its own for the cluster.yaml `content`, on a free port; ready, and ended afterwards.

    Its application is `e2e.application`, whose kinds are ours and one more.
    """
    port = free_port()
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({**content, "http_options": {"port": port}}))
    command = [sys.executable, "-m", "e2e.command", "serve", str(path)]
    with (
        tempfile.TemporaryDirectory(prefix="pliant", ignore_cleanup_errors=True) as ray_folder,
        running(command, Path(ray_folder), with_tests()) as started,
    ):
        cluster = Cluster(f"http://127.0.0.1:{port}", path, started)
        cluster.await_gateway()
        yield cluster


def with_tests() -> dict[str, str]:
    """The environment of processes that import from `tests`."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
