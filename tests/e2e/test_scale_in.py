"""Fewer replicas while clients ask: nothing is lost, and no text waits for who can read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from e2e.application import IMPORT_PATH
from e2e.cluster import PATIENT_MS, ROOT, Cluster, serving
from e2e.load import Load
from e2e.pretend_nodes import LENGTHS, LONG, SHORT, model
from e2e.scaled import POLICY, SLEEPING, TOLD
from support.waiting import wait_until


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The number of replicas that there are to be."""
    file = tmp_path_factory.mktemp("told") / "replicas"
    file.write_text("3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOLD, str(file))
        yield file


@pytest.fixture(scope="module")
def cluster(told: Path, tmp_path_factory: pytest.TempPathFactory, faults_folder: None) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("scaled")
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["applications"][0]["import_path"] = IMPORT_PATH
    args = content["applications"][0]["args"]
    service = {"kind": "encoder", "model": model(folder / "model"), "lengths": list(LENGTHS), "residency": "one"}
    service |= {"replicas": {"min": 1, "max": 3}, "slo_ms": PATIENT_MS, "cpus": 0.05}
    args |= {"services": {SLEEPING: service}, "budget": {"policy": POLICY}}
    with serving(content, folder) as started:
        yield started


def ask(http: httpx.Client, number: int) -> str:
    response = http.post(f"/models/{SLEEPING}", json={"inputs": LONG if number % 3 == 0 else SHORT})
    return "ok" if response.status_code == 200 else f"{response.status_code} {response.text}"


def held(cluster: Cluster) -> list[int]:
    return sorted(report["max_length"] for report in cluster.stats(SLEEPING).values())


def test_long_texts_have_a_replica_at_every_moment(cluster: Cluster, told: Path) -> None:
    wait_until(lambda: held(cluster) == [LENGTHS[-1]] * 3, cluster.progress)
    load = Load(cluster.address, 3, ask)
    with load.running():
        wait_until(lambda: len(held(cluster)) == 3 and {LENGTHS[0], LENGTHS[-1]} <= {*held(cluster)}, cluster.progress)
        told.write_text("1")
        seen = [held(cluster)]

        def alone() -> bool:
            seen.append(held(cluster))
            return len(seen[-1]) == 1

        wait_until(alone, cluster.progress)
        load.go_on()
        seen.append(held(cluster))
    assert all(LENGTHS[-1] in lengths for lengths in seen), seen
    assert seen[-1] == [LENGTHS[-1]]
    assert set(load.outcomes) == {"ok"}, load.outcomes
