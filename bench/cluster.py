"""A Ray cluster of the benchmark's own: started for one run, apart from any other on the machine, and removed after."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve import Application

from pliant import ray_settings
from pliant.bench.ray_session import free_port

_OBJECT_STORE_BYTES = 80 * 2**20


@contextmanager
def cluster(applications: Mapping[str, Application], num_gpus: int = 0) -> Iterator[str]:
    """Run `applications`, each under the path /NAME, and give the address of the HTTP server in front of them all."""
    folder = tempfile.mkdtemp(prefix="pliant")  # short, because Ray puts Unix sockets below it
    os.environ.update({**ray_settings.ENVIRONMENT, **os.environ, "RAY_TMPDIR": folder})
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
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
