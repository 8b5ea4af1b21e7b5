"""One real cluster for all end-to-end tests: the repository's own cluster.yaml."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from e2e.cluster import ROOT, Cluster, environment, free_port, stop, wait_until_ready


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    ray_folder = Path(tempfile.mkdtemp(prefix="pliant"))  # short, because Ray puts Unix sockets below it
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["http_options"]["port"] = free_port()
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [Path(sys.executable).with_name("pliant"), "serve", path],
        env=environment(ray_folder),
        cwd=folder,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    started = Cluster(f"http://127.0.0.1:{content['http_options']['port']}", path, ray_folder, process)
    try:
        wait_until_ready(started, Path(log.name))
        yield started
    finally:
        stop(process)
        shutil.rmtree(ray_folder, ignore_errors=True)
