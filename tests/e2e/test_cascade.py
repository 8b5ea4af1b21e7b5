"""Cascades under a real cluster: real clients, the same routing again, a killed level, a profile through replicas."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from support.waiting import HANGS_AFTER_S, PATIENT_MS, wait_until

from e2e.cluster import Cluster
from e2e.given_cascades import FIRST, LATENCY_S, LENIENT, MADE, SECOND, STRICT
from pliant.cache import cache_folder
from pliant.deployments.cascade.table import CascadeTable
from pliant.zoo import corpus


def ask(cluster: Cluster, name: str, text: str, **parameters: Any) -> httpx.Response:
    body = {"inputs": text, "parameters": {"slo_ms": PATIENT_MS, "details": True, "top_k": 1, **parameters}}
    return httpx.post(f"{cluster.address}/models/{name}", json=body, timeout=HANGS_AFTER_S)


def facts(cluster: Cluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("/stats")["services"][name]
    return found


@pytest.fixture(scope="module", autouse=True)
def _profiled(cluster: Cluster) -> None:
    """Levels are compiled, and cascades serve what was chosen for those."""

    def chosen() -> bool:
        given = [facts(cluster, name).get("mean_latency_s") for name in (LENIENT, STRICT)]
        return given == [LATENCY_S] * 2 and bool(made())

    wait_until(chosen, cluster.progress)


def made() -> list[Path]:
    """The folder with the profile that was made."""
    return [folder for folder in (cache_folder() / "cascades").glob(f"{MADE}-*") if folder.is_dir()]


TEXTS = [text.text for text in corpus.held_out()[:40]]


def routes(cluster: Cluster) -> list[str]:
    return [ask(cluster, STRICT, text).json()[0][0]["level"] for text in TEXTS]


def test_the_same_text_takes_the_same_way(cluster: Cluster) -> None:
    first = routes(cluster)
    assert set(first) == {FIRST, SECOND}
    assert routes(cluster) == first


def test_real_clients(cluster: Cluster) -> None:
    hugging_face = InferenceClient(model=f"{cluster.address}/models/{STRICT}")
    client = triton.InferenceServerClient(cluster.host)
    assert client.is_model_ready(STRICT)
    tensor = triton.InferInput("text", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object))
    plain = client.infer(STRICT, [tensor])
    detailed = client.infer(STRICT, [tensor], parameters={"details": True, "top_k": 1})
    assert [output["name"] for output in plain.get_response()["outputs"]] == ["label", "score"]
    levels, pruned = detailed.as_numpy("level")[:, 0], detailed.as_numpy("words_pruned")[:, 0]
    assert set(levels) == {FIRST.encode(), SECOND.encode()}
    assert pruned[levels == SECOND.encode()].any()
    assert not pruned[levels == FIRST.encode()].any()
    for index, text in enumerate(TEXTS[:10]):
        answer = hugging_face.text_classification(text)
        assert answer[0].label.encode() == plain.as_numpy("label")[index, 0]
        assert answer[0].score == pytest.approx(float(plain.as_numpy("score")[index, 0]), abs=1e-4)


def test_levels_serve_their_own_clients_too(cluster: Cluster) -> None:
    for level in (FIRST, SECOND):
        answer = httpx.post(f"{cluster.address}/models/{level}", json={"inputs": TEXTS[0]}, timeout=HANGS_AFTER_S)
        assert answer.json()[0][0]["label"] in corpus.LABELS


def test_a_killed_level_is_done_without_only_where_that_is_allowed(cluster: Cluster) -> None:
    hard = next(text for text, level in zip(TEXTS, routes(cluster), strict=True) if level == SECOND)
    started = time.monotonic()
    routes(cluster)
    slo_ms = 20 * 1e3 * (time.monotonic() - started) / len(TEXTS)
    for process in cluster.replica_processes(SECOND):
        process.kill()
    degraded = ask(cluster, LENIENT, hard, slo_ms=slo_ms).json()[0][0]
    assert degraded["degraded"]
    assert degraded["level"] == FIRST
    assert degraded["warning"].startswith(f"degraded: answered without {SECOND}, which ")
    strict = ask(cluster, STRICT, hard, slo_ms=slo_ms)
    if strict.status_code == 200:
        assert strict.json()[0][0]["level"] == SECOND, "another replica was there in time"
    else:
        assert strict.status_code in (429, 503)
        assert f"{STRICT} needs it for this text" in strict.json()["error"]
    patient = ask(cluster, STRICT, hard)
    assert patient.status_code == 200, f"it has the time to wait for another replica: {patient.text}"
    assert not ask(cluster, LENIENT, hard).json()[0][0]["degraded"]


def test_a_profile_is_made_through_replicas_and_outlives_the_planner(cluster: Cluster) -> None:
    assert facts(cluster, MADE)["accuracy"] > 0.5
    [folder] = made()
    table = CascadeTable.model_validate_json((folder / "table.json").read_bytes())
    assert [level.name for level in table.levels] == [FIRST, "topics"]
    assert any(any(candidate.alphas) for candidate in table.candidates)
    written = (folder / "table.json").stat().st_mtime_ns
    before = facts(cluster, MADE)["levels"]
    for process in cluster.replica_processes("planner"):
        process.kill()
    for text in TEXTS[:5]:
        assert ask(cluster, MADE, text).status_code == 200
    wait_until(lambda: cluster.replica_processes("planner"), cluster.progress)
    wait_until(lambda: facts(cluster, MADE)["state"].startswith("serves"), cluster.progress)
    assert facts(cluster, MADE)["levels"] == before
    assert (folder / "table.json").stat().st_mtime_ns == written


def test_metrics_tell_of_cascades(cluster: Cluster) -> None:
    ready = f'pliant_cascade_ready{{service="{STRICT}"}} 1.0'
    wait_until(lambda: ready in cluster.metrics(), cluster.progress)
    seen = cluster.metrics()
    assert f'pliant_cascade_profiled_reroute_share{{level="{FIRST}",service="{STRICT}"}} 0.5' in seen


def test_tokens_that_levels_read_are_counted(cluster: Cluster) -> None:
    routes(cluster)

    def counted() -> bool:
        parts = ("pliant_tokens_total{", f'service="{FIRST}"')
        return any(all(part in line for part in parts) for line in cluster.ray_metrics())

    wait_until(counted, cluster.ray_metrics)
