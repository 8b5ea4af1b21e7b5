"""A new version of a model takes over while clients ask: no request fails, and no answer is of both versions."""

from __future__ import annotations

from pathlib import Path

import httpx
import yaml
from support.waiting import PROCESS_HANGS_AFTER_S, wait_until

from e2e.cluster import Cluster
from e2e.load import Load
from pliant.models.revision import revision


def ask(http: httpx.Client, _number: int = 0) -> str:
    response = http.post("/v1/embeddings", json={"model": "vectors", "input": "sat on a mat"})
    if response.status_code != 200:
        return f"{response.status_code} {response.text}"
    answer = response.json()
    vector = [f"{number:.3f}" for number in answer["data"][0]["embedding"][:8]]
    return " ".join([answer["system_fingerprint"], str(answer["usage"]["prompt_tokens"]), *vector])


def test_a_changed_model_takes_over_while_clients_ask(cluster: Cluster, versions: tuple[Path, Path]) -> None:
    before = set(cluster.stats("vectors"))
    with httpx.Client(base_url=cluster.address, timeout=PROCESS_HANGS_AFTER_S) as http:
        first = ask(http)
        content = yaml.safe_load(cluster.path.read_text())
        content["applications"][0]["args"]["services"]["vectors"]["model"] = str(versions[1])
        path = cluster.path.with_name("new.yaml")
        path.write_text(yaml.safe_dump(content))

        def replaced() -> bool:
            try:
                now = cluster.stats("vectors")
            except httpx.HTTPError:
                return False
            return len(now) == 2 and not now.keys() & before

        load = Load(cluster.address, 4, ask)
        with load.running():
            load.go_on()
            cluster.deploy(path)
            wait_until(replaced, cluster.progress)
            load.go_on()
        last = ask(http)
    assert [first.split()[0], last.split()[0]] == [revision(version) for version in versions]
    assert set(load.outcomes) == {first, last}, load.outcomes
    assert cluster.get("/v2/models/vectors")["parameters"]["revision"] == revision(versions[1])
