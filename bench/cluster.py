"""A Ray cluster of the benchmark's own: started for one run, apart from any other on the machine, and removed after."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import ray
from ray import serve
from ray.serve import Application

from pliant import haproxy, ray_settings
from pliant.bench.ray_session import free_port

_OBJECT_STORE_BYTES = 80 * 2**20
_LOOK_S = 0.2


@contextmanager
def cluster(applications: Mapping[str, Application], num_gpus: int = 0) -> Iterator[str]:
    """Run `applications`, each under the path /NAME, and give the address of the HTTP server in front of them all: of
    HAProxy where `pliant serve` has it, too."""
    folder = tempfile.mkdtemp(prefix="pliant")  # short, because Ray puts Unix sockets below it
    settings = {**ray_settings.ENVIRONMENT, **haproxy.environment(None)}
    os.environ.update({**settings, **os.environ, "RAY_TMPDIR": folder})
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.pop("RAY_ADDRESS", None)
    port = free_port()
    ray.init(
        address="local",
        num_cpus=os.cpu_count(),
        num_gpus=num_gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    try:
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        targets = [serve.RunTarget(app, name=name, route_prefix=f"/{name}") for name, app in applications.items()]
        serve.run_many(targets)
        for name in applications:
            _wait_until_settled(f"http://127.0.0.1:{port}/{name}")
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_settled(address: str) -> None:
    """Until all services of an application of ours can answer, and nothing is compiled in the background any more."""
    while True:
        response = httpx.get(f"{address}/stats", timeout=60)
        if response.status_code == 404:
            return  # a baseline, which has no such page
        stats = response.raise_for_status().json()
        views = stats["services"].values()
        reports = [report for view in views for report in view["replicas"].values()]
        waits = any(not view["ready"] and not view.get("problem") for view in views)
        if not waits and not any(report.get("compiling") for report in reports):
            return
        time.sleep(_LOOK_S)
