"""One real cluster for all end-to-end tests: the repository's own cluster.yaml."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from e2e.cluster import ROOT, Cluster, serving


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    with serving(content, tmp_path_factory.mktemp("cluster")) as started:
        yield started
