"""A cascade over HTTP: answers keep the shapes that clients know, and tell more where they are asked to."""

from __future__ import annotations

import struct
from collections import Counter
from typing import Any

import pytest
from fastapi.testclient import TestClient
from huggingface_hub import TextClassificationOutputElement
from support.scripted_cascade import LABELS, CascadeRecorder, Model, Service

from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import GatewayConfig
from pliant.deployments import kinds
from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.metrics import CascadeMetrics
from pliant.deployments.http.application import application
from pliant.deployments.serving import metrics
from pliant.deployments.serving.choosing.messages import Chosen
from pliant.deployments.serving.follower import Tally
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.services import Services
from pliant.deployments.serving.status import exposition
from pliant.policies.cascade.candidates import Candidate

INFER = "/v2/models/topics-c/infer"
CANDIDATE = Candidate(
    levels=("small", "large"),
    cutoffs=(1.0,),
    alphas=(0.5,),
    temperatures=(1.0, 1.0),
    weights=((1.0,), (0.5, 0.5)),
    slope=10.0,
    accuracy=0.9,
    accuracy_error=0.01,
    loss=0.0,
    loss_error=0.01,
    mean_latency_s=0.01,
    p75_latency_s=0.01,
    p99_latency_s=0.01,
    shares=(0.4, 0.6),
    early_accuracy_gap=0.0,
)


class House:
    def __init__(
        self, unmet: str | None = None, ready: bool = True, refused: bool = False, pairs: bool = False
    ) -> None:
        self.small, self.large = Service(Model("small", 1.0, 0.001)), Service(Model("large", 1.0, 0.01))
        choice = Choice(CANDIDATE, unmet, (0.001, 0.01), 500, pairs=pairs)
        entry = Chosen("topics-c", "serves" if ready else "profiles its levels: 5%", choice if ready else None)
        if refused:
            entry = Chosen("topics-c", "cannot keep", None, "none of 9; delete /cache/c", refused=True)
        config = CascadeConfig(
            kind="cascade", levels=("small", "large"), data="d", accuracy_loss=0.01, degrade=True, check=0
        )
        levels: Any = {"small": self.small, "large": self.large}
        self.cascade = CascadeClassifier("topics-c", config, levels, lambda: entry, CascadeRecorder())
        services = Services.of("texts", {**levels, "topics-c": self.cascade})
        self.http = TestClient(application(GatewayConfig(), services, self.stats, lambda: self.metrics().encode()))

    def stats(self) -> dict[str, Any]:
        view = {"kind": "cascade", "replica_range": None, "replicas": {}, **self.cascade.facts()}
        return {"planner_reached": True, "services": {"topics-c": view}}

    def metrics(self) -> str:
        return exposition(self.stats(), kinds.loaded()).decode()

    def classify(self, text: str | list[str] = "w1 yes t1", **parameters: Any) -> Any:
        return self.http.post("/models/topics-c", json={"inputs": text, "parameters": parameters}).json()

    def infer(self, *texts: str, **extra: Any) -> Any:
        tensor = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}
        return self.http.post(INFER, json={"inputs": [tensor], **extra}).json()


def test_hugging_face_clients_get_what_they_know() -> None:
    house = House()
    [plain] = house.classify()
    assert [set(item) for item in plain] == [{"label", "score"}] * 3
    [detailed] = house.classify(details=True, top_k=1)
    [item] = detailed
    assert item["label"] == "yes"
    assert (item["level"], item["words_pruned"], item["degraded"]) == ("large", 1, False)
    assert item["confidence"] == pytest.approx(item["score"])
    assert TextClassificationOutputElement.parse_obj_as_list([detailed])[0][0].label == "yes"  # type: ignore[attr-defined,index]


def test_a_degraded_answer_says_so_unasked() -> None:
    house = House()
    house.large.fails = RequestError(Outcome.SHED, "busy", 1)
    [answer] = house.classify(top_k=1)
    assert answer[0]["degraded"]
    assert answer[0]["level"] == "small"
    assert answer[0]["warning"] == "degraded: answered without large, which is overloaded"
    told = house.infer("yes t1", "no t2")["parameters"]["warning"]
    assert told.startswith("text 0: degraded: answered without large")
    assert "text 1: degraded" in told


def test_open_inference_tells_details_on_request() -> None:
    house = House()
    plain = house.infer("w1 yes t1", "no t2", parameters={"top_k": 1})
    assert [output["name"] for output in plain["outputs"]] == ["label", "score"]
    answer = house.infer("w1 yes t1", "no t2", parameters={"top_k": 1, "details": True})
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["level"] == {"name": "level", "datatype": "BYTES", "shape": [2, 1], "data": ["large", "large"]}
    assert outputs["words_pruned"]["data"] == [1, 0]
    assert outputs["degraded"] == {"name": "degraded", "datatype": "INT32", "shape": [2, 1], "data": [0, 0]}
    assert outputs["confidence"]["data"] == pytest.approx(outputs["score"]["data"])


def test_open_inference_tells_what_is_named_also_in_binary() -> None:
    house = House()
    outputs = [{"name": "level", "parameters": {"binary_data": True}}, {"name": "label"}]
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["yes t1"]}
    answer = house.http.post(INFER, json={"inputs": [tensor], "outputs": outputs, "parameters": {"top_k": 1}})
    assert answer.content.endswith(struct.pack("<I", 5) + b"large")
    refused = house.infer("yes t1", outputs=[{"name": "gamma"}])
    assert refused["error"] == "outputs: got 'gamma'; allowed: label, score, level, confidence, words_pruned, degraded"


def test_metadata_tells_levels_and_outputs() -> None:
    metadata = House().http.get("/v2/models/topics-c").json()
    assert metadata["platform"] == "pliant_cascade"
    assert metadata["parameters"] == {"task": "classify", "labels": ",".join(LABELS), "levels": "small,large"}
    assert [output["name"] for output in metadata["outputs"]] == [
        "label",
        "score",
        "level",
        "confidence",
        "words_pruned",
        "degraded",
    ]


def test_a_cascade_that_was_profiled_on_pairs_answers_pairs() -> None:
    house = House(pairs=True)
    given = {"inputs": {"text": "w1 w2", "text_pair": "w3 yes t1"}, "parameters": {"details": True, "top_k": 1}}
    [[item]] = house.http.post("/models/topics-c", json=given).json()
    assert (item["label"], item["level"], item["words_pruned"]) == ("yes", "large", 2)
    metadata = house.http.get("/v2/models/topics-c").json()
    assert [each["name"] for each in metadata["inputs"]] == ["text", "text_pair"]
    assert [each["name"] for each in House().http.get("/v2/models/topics-c").json()["inputs"]] == ["text"]
    pair = [{"name": name, "shape": [1], "datatype": "BYTES", "data": ["yes t1"]} for name in ("text", "text_pair")]
    answer = house.http.post(INFER, json={"inputs": pair, "parameters": {"top_k": 1}}).json()
    assert answer["outputs"][0]["data"] == ["yes"]
    assert "profiled on pairs" in house.infer("yes t1")["error"]


def test_readiness_tells_what_a_cascade_waits_for() -> None:
    http = House(ready=False).http
    assert http.get("/v2/health/ready").json() == {"error": "not ready yet: topics-c (profiles its levels: 5%)"}
    assert "topics-c is not ready yet: profiles its levels: 5%" in http.get("/v2/models/topics-c/ready").json()["error"]
    assert http.get("/v2/models/small/ready").status_code == 200
    assert House().http.get("/v2/health/ready").status_code == 200


def test_the_cluster_does_not_wait_for_a_cascade_that_was_refused() -> None:
    house = House(refused=True)
    assert house.http.get("/v2/health/ready").status_code == 200
    unready = house.http.get("/v2/models/topics-c/ready")
    assert (unready.status_code, unready.json()) == (503, {"error": "topics-c is not ready yet: cannot keep"})
    assert house.classify() == {"error": "topics-c is not ready yet: cannot keep"}
    assert house.http.get("/stats").json()["services"]["topics-c"]["problem"] == "none of 9; delete /cache/c"


def test_prometheus_sees_the_promise_and_the_drift() -> None:
    house = House(unmet="no candidate")
    for _ in range(4):
        house.classify(["w1 yes t1"] * 60)
    seen = house.http.get("/metrics").text
    assert 'pliant_cascade_ready{service="topics-c"} 1.0' in seen
    assert 'pliant_cascade_promise_kept{service="topics-c"} 0.0' in seen
    assert 'pliant_cascade_profiled_reroute_share{level="small",service="topics-c"} 0.6' in seen
    assert 'pliant_cascade_reroute_drifting{level="small",service="topics-c"} 1.0' in seen
    assert 'pliant_cascade_reroute_drifts_total{level="small",service="topics-c"} 1.0' in seen
    assert 'pliant_cascade_checks_total{service="topics-c"} 0.0' in seen
    assert 'pliant_cascade_answers_drifting{service="topics-c"} 0.0' in seen
    waiting = House(ready=False).http.get("/metrics").text
    assert 'pliant_cascade_ready{service="topics-c"} 0.0' in waiting
    assert "pliant_cascade_profiled_accuracy{" not in waiting


@pytest.fixture
def ray_heard(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, ...]]:
    """What Ray's metrics add up to, by name and the values of tags."""
    heard: Counter[tuple[str, ...]] = Counter()

    class Heard:
        def __init__(self, name: str, *_: object, **__: object) -> None:
            self.name = name

        def set_default_tags(self, tags: dict[str, str]) -> None:
            assert tags == {"service": "topics-c"}

        def inc(self, value: float = 1, tags: dict[str, str] | None = None) -> None:
            heard[self.name, *(tags or {}).values()] += value  # type: ignore[assignment]

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            heard[self.name, *(tags or {}).values()] = value  # type: ignore[assignment]

        observe = inc

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, Heard)
    return heard


def test_ray_hears_of_outcomes_routes_and_drifts(ray_heard: Counter[tuple[str, ...]]) -> None:
    outcomes: Counter[str] = Counter()
    recorder = CascadeMetrics("topics-c", "cascade", outcomes, tally := Tally())
    drifting = "pliant_cascade_reroute_drifting", "small"
    for now in (False, True, False):
        recorder.drifted("small", now)
        assert ray_heard[drifting] == now
    for differs in (True, False, True):
        recorder.checked(differs)
    recorder.answers_drifted(True)
    recorder.asked("small")
    for sure in (0.2, 0.97, 0.96):
        recorder.begun(sure)
    recorder.rerouted("small", 5, 3)
    recorder.rerouted("small", 0, 0)
    recorder.degraded("large", "busy")
    recorder.answered("small", 0.25, 0.2, 0.9)
    recorder.ended(Outcome.DEGRADED)
    assert +ray_heard == {
        ("pliant_cascade_checks_total",): 3,
        ("pliant_cascade_checks_differing_total",): 2,
        ("pliant_cascade_answers_drifting",): 1,
        ("pliant_cascade_reroute_drifts_total", "small"): 1,
        ("pliant_cascade_rerouted_total", "small"): 2,
        ("pliant_cascade_words_total", "small"): 5,
        ("pliant_cascade_words_pruned_total", "small"): 3,
        ("pliant_cascade_degraded_total", "large", "busy"): 1,
        ("pliant_cascade_answers_total", "small"): 1,
        ("pliant_cascade_confidence", "small"): 0.9,
        ("pliant_request_latency_seconds", "cascade"): 0.25,
        ("pliant_slo_violations_total", "cascade"): 1,
        ("pliant_requests_total", "cascade", "degraded"): 1,
    }
    assert outcomes == {"degraded": 1}
    news = tally.take()
    assert (news.asked, news.sure, news.drifts) == ({"small": 1}, {0: 1, 7: 2}, 1)
