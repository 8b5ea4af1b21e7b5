"""One real cluster for all end-to-end tests: the repository's own cluster.yaml, to which tasks may be added."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from e2e.cluster import ROOT, Cluster, serving


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    folder = tmp_path_factory.mktemp("cluster")
    tasks = content["applications"][0]["args"]["services"]["digits"]["tasks"]
    added = {"folder": tasks, "roots": [str(folder / "tasks")], "registry": str(folder / "tasks.json")}
    content["applications"][0]["args"]["services"]["digits"]["tasks"] = added
    with serving(content, folder) as started:
        yield started
