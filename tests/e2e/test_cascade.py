"""Cascades under a real cluster: real clients, the same routing again, a killed level, a profile through replicas."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from e2e.cluster import Cluster, serving
from huggingface_hub import InferenceClient

from pliant import config, labelled_texts, models
from pliant.cache import cache_folder
from pliant.deployments.cascade.table import CascadeTable, LevelTable, Profiled, folder_of, identity, keep
from pliant.deployments.encoder.runtimes import device
from pliant.policies.cascade_candidates import Candidate
from pliant.zoo import corpus

ENCODER = {"kind": "encoder", "lengths": [512], "replicas": 1, "cpus": 0.1, "timeout_s": 1}
CASCADE = {"kind": "cascade", "levels": ["tiny", "large"], "data": "zoo/topics", "accuracy_loss": 0.1, "slo_ms": 20_000}
SERVICES = {
    "tiny": {**ENCODER, "model": "zoo/topics-small"},
    "large": {**ENCODER, "model": "zoo/topics-large"},
    "e2e-lenient": {**CASCADE, "degrade": True},
    "e2e-strict": CASCADE,
    "e2e-made": {**CASCADE, "degrade": True, "seed": 1},
}
HAPPENS_WITHIN_S = 60


def content() -> dict[str, Any]:
    application = {
        "name": "pliant",
        "import_path": config.IMPORT_PATH,
        "route_prefix": "/",
        "args": {"gateway": {"cpus": 0.1}, "services": SERVICES},
    }
    return {"applications": [application]}


def chosen() -> Candidate:
    """About half of the texts go on."""
    return Candidate(
        levels=("tiny", "large"),
        cutoffs=(0.8,),
        alphas=(0.7,),
        temperatures=(1.0, 1.0),
        weights=((1.0,), (0.4, 0.6)),
        slope=10.0,
        accuracy=0.8,
        accuracy_error=0.0,
        loss=0.0,
        loss_error=0.0,
        mean_latency_s=0.01,
        p75_latency_s=0.01,
        p99_latency_s=0.01,
        shares=(0.5, 0.5),
        early_accuracy_gap=0.0,
    )


def prepare(name: str, backend: str) -> None:
    """Keep a profile of one candidate, as its latency here and now is not for a test to say."""
    serving_config = config.parse(content()["applications"][0]["args"])
    cascade, encoders = serving_config.cascades[name], serving_config.encoders
    folders = {level: models.fetch(encoders[level].model) for level in cascade.levels}
    texts = labelled_texts.read(cascade.data, corpus.LABELS)
    level = LevelTable(
        name="tiny",
        temperature=1.0,
        accuracy=0.8,
        calibration_error_before=0.1,
        calibration_error_after=0.1,
        mean_latency_s=0.01,
        p99_latency_s=0.01,
    )
    table = CascadeTable(
        labels=corpus.LABELS,
        seed=cascade.seed,
        calibrated_on=100,
        chosen_on=100,
        left_out=0,
        levels=(level, level.model_copy(update={"name": "large"})),
        agreements=(),
        candidates=(chosen(),),
    )
    backends = {level: [f"{backend} on {device(encoders[level])}"] for level in cascade.levels}
    folder = folder_of(name, identity(cascade, encoders, folders, texts, backends))
    nothing = np.zeros((2, 1))
    keep(folder, Profiled(table, np.ones((2, 1, 1)), nothing, np.zeros(1, np.int64), np.zeros(1), {}))


@pytest.fixture(scope="module")
def cascades(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    def clear() -> None:
        for folder in (cache_folder() / "cascades").glob("e2e-*"):
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()

    clear()
    for name in ("e2e-lenient", "e2e-strict"):
        for backend in ("aoti", "eager"):
            prepare(name, backend)
    with serving(content(), tmp_path_factory.mktemp("cascades")) as cluster:
        yield cluster
    clear()


def ask(cluster: Cluster, name: str, text: str, **parameters: Any) -> httpx.Response:
    body = {"inputs": text, "parameters": {"details": True, "top_k": 1, **parameters}}
    return httpx.post(f"{cluster.address}/models/{name}", json=body, timeout=60)


def facts(cluster: Cluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{cluster.address}/stats", timeout=10).json()["cascades"][name]
    return found


def until(happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + HAPPENS_WITHIN_S
    while not (found := happened()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


TEXTS = [text.text for text in corpus.held_out()[:40]]


def routes(cluster: Cluster) -> list[str]:
    return [ask(cluster, "e2e-strict", text).json()[0][0]["level"] for text in TEXTS]


def test_the_same_text_takes_the_same_way(cascades: Cluster) -> None:
    first = routes(cascades)
    assert set(first) == {"tiny", "large"}
    assert routes(cascades) == first


def test_real_clients(cascades: Cluster) -> None:
    hugging_face = InferenceClient(model=f"{cascades.address}/models/e2e-strict")
    client = triton.InferenceServerClient(cascades.host)
    assert client.is_model_ready("e2e-strict")
    tensor = triton.InferInput("text", [len(TEXTS)], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], dtype=object))
    plain = client.infer("e2e-strict", [tensor])
    detailed = client.infer("e2e-strict", [tensor], parameters={"details": True, "top_k": 1})
    assert [output["name"] for output in plain.get_response()["outputs"]] == ["label", "score"]
    levels, pruned = detailed.as_numpy("level")[:, 0], detailed.as_numpy("words_pruned")[:, 0]
    assert set(levels) == {b"tiny", b"large"}
    assert pruned[levels == b"large"].any()
    assert not pruned[levels == b"tiny"].any()
    for index, text in enumerate(TEXTS[:10]):
        answer = hugging_face.text_classification(text)
        assert answer[0].label.encode() == plain.as_numpy("label")[index, 0]
        assert answer[0].score == pytest.approx(float(plain.as_numpy("score")[index, 0]), abs=1e-6)


def test_levels_serve_their_own_clients_too(cascades: Cluster) -> None:
    for level in ("tiny", "large"):
        answer = httpx.post(f"{cascades.address}/models/{level}", json={"inputs": TEXTS[0]}, timeout=60)
        assert answer.json()[0][0]["label"] in corpus.LABELS


def test_a_killed_level_is_done_without_only_where_that_is_allowed(cascades: Cluster) -> None:
    hard = next(text for text, level in zip(TEXTS, routes(cascades), strict=True) if level == "large")
    for process in cascades.replica_processes("large"):
        process.kill()
    degraded = ask(cascades, "e2e-lenient", hard, slo_ms=500).json()[0][0]
    assert degraded["degraded"]
    assert degraded["level"] == "tiny"
    assert degraded["warning"].startswith("degraded: answered without large, which ")
    refused = ask(cascades, "e2e-strict", hard, slo_ms=500)
    assert refused.status_code in (429, 503)
    assert "e2e-strict needs it for this text" in refused.json()["error"]
    until(lambda: ask(cascades, "e2e-strict", hard).status_code == 200)
    assert not ask(cascades, "e2e-lenient", hard).json()[0][0]["degraded"]


def test_a_profile_is_made_through_replicas_and_outlives_the_planner(cascades: Cluster) -> None:
    assert facts(cascades, "e2e-made")["accuracy"] > 0.5
    [kept] = [folder for folder in (cache_folder() / "cascades").glob("e2e-made-*") if folder.is_dir()]
    table = CascadeTable.model_validate_json((kept / "table.json").read_bytes())
    assert [level.name for level in table.levels] == ["tiny", "large"]
    assert any(any(candidate.alphas) for candidate in table.candidates)
    made = (kept / "table.json").stat().st_mtime_ns
    before = facts(cascades, "e2e-made")["levels"]
    for process in cascades.replica_processes("planner"):
        process.kill()
    for text in TEXTS[:5]:
        assert ask(cascades, "e2e-made", text).status_code == 200
    until(lambda: cascades.replica_processes("planner"))
    until(lambda: facts(cascades, "e2e-made")["state"].startswith("serves"))
    assert facts(cascades, "e2e-made")["levels"] == before
    assert (kept / "table.json").stat().st_mtime_ns == made


def test_metrics_tell_of_cascades(cascades: Cluster) -> None:
    seen = httpx.get(f"{cascades.address}/metrics", timeout=10).text
    assert 'pliant_cascade_ready{service="e2e-strict"} 1.0' in seen
    assert 'pliant_cascade_profiled_reroute_share{level="tiny",service="e2e-strict"} 0.5' in seen
