"""Real digits with the real clients: tasks on one model, more or fewer tokens as the load wants it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError
from support.images import base64_png, png
from support.vision_folders import change_tensors, task_folder
from support.waiting import HANGS_AFTER_S, PATIENT_MS, wait_until
from tritonclient.utils import InferenceServerException

from e2e.cluster import Cluster
from pliant import zoo
from pliant.formats.vision_task import HEAD_BIAS, TASK, WEIGHTS, read_task
from pliant.models.vision_info import read_vision
from pliant.zoo import digits

NEEDS = ("digits",)
PIXELS = digits.held_out().images
SHOWN = digits.held_out().labels
"""The digits on `PIXELS`, which nothing has learned from."""


def replicas(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return cluster.stats("digits")


def tensor(images: np.ndarray[Any, Any] | Sequence[bytes]) -> triton.InferInput:
    """Pixels, or encoded images."""
    if isinstance(images, np.ndarray):
        given = triton.InferInput("image", list(images.shape), "UINT8")
        given.set_data_from_numpy(images)
    else:
        given = triton.InferInput("image", [len(images)], "BYTES")
        given.set_data_from_numpy(np.array(images, dtype=object))
    return given


def infer(cluster: Cluster, images: np.ndarray[Any, Any] | Sequence[bytes], **parameters: Any) -> triton.InferResult:
    client = triton.InferenceServerClient(cluster.host, network_timeout=HANGS_AFTER_S)
    return client.infer("digits", [tensor(images)], parameters=parameters)


@pytest.mark.parametrize(("task", "name"), [("digit", str), ("parity", lambda digit: ("even", "odd")[digit % 2])])
def test_hugging_face_client_sees_digits(cluster: Cluster, task: str, name: Callable[[int], str]) -> None:
    client = InferenceClient(model=f"{cluster.address}/models/digits?task={task}&slo_ms={PATIENT_MS}")
    right = 0
    for pixels, digit in zip(PIXELS[:20], SHOWN, strict=False):
        first, second = client.image_classification(png(pixels), top_k=2)
        right += first.label == name(digit)
        assert 1 >= first.score >= second.score >= 0
    assert right >= 15


def test_hugging_face_client_is_told_which_tasks_there_are(cluster: Cluster) -> None:
    with pytest.raises(HfHubHTTPError) as error:
        InferenceClient().image_classification(png(PIXELS[0]), model=f"{cluster.address}/models/digits")
    assert error.value.response.status_code == 400
    assert "at-least-five, digit, parity" in error.value.response.json()["error"]


def test_triton_client_is_right_as_often_as_the_profile_says(cluster: Cluster) -> None:
    folder = zoo.folder("digits-tasks") / "digit"
    said = read_task(folder, read_vision(zoo.folder("digits-vit"))).accuracies[0]
    labels = []
    for start in range(0, len(PIXELS), 64):
        answer = infer(cluster, PIXELS[start : start + 64], task="digit", slo_ms=PATIENT_MS, top_k=1)
        labels += answer.as_numpy("label")[:, 0].tolist()
        assert set(answer.as_numpy("fate")[:, 0]) == {b"in_time"}
    right = np.mean([label == str(digit).encode() for label, digit in zip(labels, SHOWN, strict=True)])
    assert right > said - 0.06


def test_images_that_come_seldom_get_prompts(cluster: Cluster) -> None:
    def gamma() -> int:
        return int(infer(cluster, PIXELS[:1], task="digit", slo_ms=PATIENT_MS).as_numpy("gamma")[0, 0])

    wait_until(lambda: gamma() > 0)


def test_encoded_images_and_pixels_are_the_same_to_it(cluster: Cluster) -> None:
    for binary in (
        infer(cluster, PIXELS[:4], task="parity", slo_ms=PATIENT_MS),
        infer(cluster, list(map(png, PIXELS[:4])), task="parity", slo_ms=PATIENT_MS),
    ):
        assert binary.as_numpy("label").shape == (4, 2)
    body = {
        "inputs": [base64_png(image) for image in PIXELS[:3]],
        "parameters": {"task": "digit", "slo_ms": PATIENT_MS, "top_k": 1},
    }
    answer = httpx.post(f"{cluster.address}/models/digits", json=body, timeout=HANGS_AFTER_S).json()
    encoded = infer(cluster, list(map(png, PIXELS[:3])), task="digit", slo_ms=PATIENT_MS, top_k=1)
    pixels = infer(cluster, PIXELS[:3], task="digit", slo_ms=PATIENT_MS, top_k=1)
    assert [each[0]["label"].encode() for each in answer] == encoded.as_numpy("label")[:, 0].tolist()
    assert encoded.as_numpy("label").tolist() == pixels.as_numpy("label").tolist()


def test_what_is_no_image_is_refused(cluster: Cluster) -> None:
    bomb = png(np.zeros((8000, 8000, 3), np.uint8))
    for body, status in ((b"%PDF-1.7 ", 415), (bomb, 413), (png(PIXELS[0])[:100], 400)):
        path = f"/models/digits?task=digit&slo_ms={PATIENT_MS}"
        response = httpx.post(f"{cluster.address}{path}", content=body, timeout=HANGS_AFTER_S)
        assert response.status_code == status, response.text
        assert "image" in response.json()["error"]
    with pytest.raises(InferenceServerException, match="task"):
        infer(cluster, PIXELS[:1], task="nothing")


def test_an_image_without_time_is_told_so_at_once(cluster: Cluster) -> None:
    response = httpx.post(
        f"{cluster.address}/models/digits?task=digit&slo_ms=0.01", content=png(PIXELS[0]), timeout=HANGS_AFTER_S
    )
    assert response.status_code in (503, 504), response.text
    assert response.elapsed.total_seconds() < HANGS_AFTER_S, "the service's timeout_s is longer"


def test_tokens_leave_under_a_burst_and_come_back(cluster: Cluster) -> None:
    """512 images at once have less and less time, until replicas choose fewer tokens; alone, an image gets more again.

    How little time that is depends on the machine, and is searched for.
    """

    def calm() -> bool:
        answer = infer(cluster, PIXELS[:1], task="digit", slo_ms=PATIENT_MS)
        return bool(answer.as_numpy("gamma")[0, 0] > 0)

    def ask(slo_ms: float) -> int:
        """The least gamma that 64 images got, or 8 if they were refused."""
        try:
            return int(infer(cluster, PIXELS[:64], task="digit", slo_ms=slo_ms).as_numpy("gamma").min())
        except InferenceServerException as refused:
            if refused.status() not in ("429", "503", "504"):
                raise
            return 8

    wait_until(calm, cluster.progress)
    with ThreadPoolExecutor(8) as pool:
        started = time.monotonic()
        fewest = min(pool.map(ask, [PATIENT_MS] * 8))
        slo_ms = 2e3 * (time.monotonic() - started)
        while fewest > 0:
            slo_ms *= 0.8
            assert slo_ms > 1, replicas(cluster)
            fewest = min(pool.map(ask, [slo_ms] * 8))
    wait_until(lambda: f'pliant_vision_batches_total{{gamma="{fewest}"' in cluster.metrics(), cluster.progress)
    assert "pliant_vision_gamma{" in cluster.metrics()
    wait_until(calm, cluster.progress)


def test_a_task_that_is_registered_at_run_time_answers_on_all_replicas(cluster: Cluster) -> None:
    roots = cluster.path.parent / "tasks"
    folder = task_folder(roots / "mood", read_vision(zoo.folder("digits-vit")), labels=("calm", "wild", "odd"))
    api = f"{cluster.address}/v2/repository/models/digits/tasks"
    loaded = httpx.post(f"{api}/mood/load", json={"parameters": {"path": str(folder)}}, timeout=HANGS_AFTER_S)
    assert loaded.status_code == 200, loaded.text
    assert "mood" in [entry["name"] for entry in httpx.get(api, timeout=HANGS_AFTER_S).json()]
    wait_until(
        lambda: all("mood" in report["tasks"] for report in replicas(cluster).values()),
        cluster.progress,
    )
    before = {name: report["in_time"] for name, report in replicas(cluster).items()}
    answer = infer(cluster, PIXELS[:64], task="mood", slo_ms=PATIENT_MS)
    assert set(answer.as_numpy("label")[:, 0]) <= {b"calm", b"wild", b"odd"}

    def all_answered() -> bool:
        infer(cluster, PIXELS[:64], task="mood", slo_ms=PATIENT_MS)
        return all(report["in_time"] > before.get(name, 0) for name, report in replicas(cluster).items())

    wait_until(all_answered, cluster.progress)
    outside = httpx.post(f"{api}/other/load", json={"parameters": {"path": "/etc"}}, timeout=HANGS_AFTER_S)
    assert outside.status_code == 403, outside.text
    (roots / "broken").mkdir()
    (roots / "broken" / TASK).write_text("{")
    broken = httpx.post(f"{api}/broken/load", json={"parameters": {"path": "broken"}}, timeout=HANGS_AFTER_S)
    assert broken.status_code == 400, broken.text
    endless = task_folder(roots / "endless", read_vision(zoo.folder("digits-vit")))
    change_tensors(endless / WEIGHTS, **{HEAD_BIAS: np.array([np.nan, 1], np.float32)})
    refused = httpx.post(f"{api}/endless/load", json={"parameters": {"path": "endless"}}, timeout=HANGS_AFTER_S)
    assert refused.status_code == 400, refused.text
    assert "a replica cannot load it" in refused.json()["error"]
    assert httpx.post(f"{api}/mood/unload", timeout=HANGS_AFTER_S).status_code == 200
    with pytest.raises(InferenceServerException, match="mood"):
        infer(cluster, PIXELS[:1], task="mood")
