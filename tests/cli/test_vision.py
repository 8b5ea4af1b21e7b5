"""The commands for vision services, on a model that is quick and a server that says what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from support.vision_folders import task_folder, vision_folder
from support.vision_profile import PROFILE
from typer.testing import CliRunner

from pliant import zoo
from pliant.cli import command
from pliant.cli import serve as serve_cli
from pliant.cli import vision as vision_cli
from pliant.config.vision import VisionConfig
from pliant.deployments.kinds import read
from pliant.deployments.vision import assembly
from pliant.deployments.vision.assembly import Loaded
from pliant.formats.vision_task import PROFILING, read_task
from pliant.kernels.vision import executor as vit_executor
from pliant.models import sources
from pliant.models.vision_info import read_vision
from pliant.training import vision as vision_training

ROOT = Path(__file__).parents[2]


def run(*arguments: object) -> tuple[int, str]:
    """The exit code, and all that a person is told."""
    result = CliRunner().invoke(command.app, list(map(str, arguments)))
    told = " ".join(f"{result.output} {result.exception or ''}".split())
    assert "Traceback" not in told
    return result.exit_code, told


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """17 tokens in 3 layers."""
    folder = tmp_path_factory.mktemp("model")
    vision_folder(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dark and bright noise."""
    path = tmp_path_factory.mktemp("data") / "noise.npz"
    labels = np.arange(40) % 2
    noise = np.random.default_rng(0).integers(0, 100, (40, 16, 16, 3))
    np.savez(path, images=(noise + 150 * labels[:, None, None, None]).astype(np.uint8), labels=labels)
    return path


def train(backbone: Path, data: Path, out: Path, *options: object) -> tuple[int, str]:
    quick = ("--name", "bright", "--labels", "dark,bright", "--epochs", 1, "--gammas", "-4,2")
    return run("train-prompts", backbone, data, out, *quick, *options)


def test_a_task_is_trained_and_reported(backbone: Path, data: Path, tmp_path: Path) -> None:
    code, told = train(backbone, data, tmp_path / "a" / "task", "--slo-ms", 300, "--utility", 0.5)
    assert code == 0, told
    task = read_task(tmp_path / "a" / "task", read_vision(backbone))
    assert (task.name, task.labels, task.slo_ms, task.utility) == ("bright", ("dark", "bright"), 300, 0.5)
    assert (task.prompts, list(task.accuracies), task.profiling_images) == ((2,), [-4, 0, 2], 8)
    assert "accuracy on 8 images" in told
    for gamma, accuracy in task.accuracies.items():
        assert f"{gamma:+d}" in told or gamma == 0
        assert f"{accuracy:.1%}" in told
    assert f"pliant register-task URL SERVICE bright {tmp_path / 'a' / 'task'}" in told


def test_the_seed_draws_what_is_set_aside(backbone: Path, data: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert train(backbone, data, tmp_path / name, "--gammas", "0", "--seed", seed)[0] == 0
    kept = [(tmp_path / name / PROFILING).read_bytes() for name in "abc"]
    assert kept[0] == kept[1] != kept[2]


def test_labels_may_have_spaces_around_them(backbone: Path, data: Path, tmp_path: Path) -> None:
    assert train(backbone, data, tmp_path / "task", "--gammas", "0", "--labels", " dark , bright,")[0] == 0
    assert read_task(tmp_path / "task", read_vision(backbone)).labels == ("dark", "bright")


def test_a_full_disk_is_reported(backbone: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_file(_tensors: object, _path: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(vision_training, "save_file", save_file)
    code, told = train(backbone, data, tmp_path / "task", "--gammas", "0")
    assert code == 1
    assert f"{tmp_path / 'task'}: cannot be written: Error while serializing: I/O error: No space left" in told


def test_gammas_are_the_papers_unless_they_are_given(backbone: Path) -> None:
    info = read_vision(backbone)
    assert vision_cli._gammas("auto", info) == (-7, -5, -3, -2, 0, 2, 4, 8)
    assert vision_cli._gammas("4,-3,2", info) == (-3, 0, 2, 4)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--gammas", "-4;2"), "--gammas: got '-4;2'; must be auto, or numbers such as -10,-5,2,4,8"),
        (("--gammas", "-9,2"), "--gammas: got '-9,2'; those of this model go from -8 to 512"),
        (("--gammas", "513"), "--gammas: got '513'"),
        (("--name", "a/b"), "task 'a/b': its name is 'a/b'; it must be at most 64 letters"),
        (("--labels", "dark"), "its labels are ['dark']; it must list from 2"),
        (("--labels", "dark,dark"), "it has the label 'dark' 2 times"),
        (("--labels", "dark,bright,none"), "noise.npz: has no images of 'none'"),
        (("--slo-ms", 0), "its slo_ms is 0.0; it must be a number above 0"),
        (("--utility", -1), "its utility is -1.0"),
    ],
)
def test_mistakes_in_options_are_reported_in_one_line(
    options: tuple[object, ...], line: str, backbone: Path, data: Path, tmp_path: Path
) -> None:
    code, told = train(backbone, data, tmp_path / "task", *options)
    assert code == 1
    assert line in told
    assert not (tmp_path / "task").exists()


def test_other_mistakes_are_reported_in_one_line(backbone: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert (
        "has no images of 'dark'; there are labels: none" in train(backbone, tmp_path / "empty", tmp_path / "task")[1]
    )
    assert "cannot be read: No such file" in train(backbone, tmp_path / "nowhere", tmp_path / "task")[1]
    assert "has no config.json" in train(tmp_path / "empty", data, tmp_path / "task")[1]
    assert "the zoo has no such model" in train(Path("zoo/nothing"), data, tmp_path / "task")[1]
    assert f"{data}: is there already" in train(backbone, data, data)[1]
    assert f"{tmp_path}: is there already" in train(backbone, data, tmp_path)[1]
    assert "cannot be written: Not a directory" in train(backbone, data, data / "task")[1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["empty"]


def test_a_missing_gpu_is_reported(backbone: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "--device: got cuda, but there is no GPU" in train(backbone, data, tmp_path / "task", "--device", "cuda")[1]


class Cluster:
    """Answers what it is told to, and remembers what it was asked."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b"{}"
        self.asked: list[tuple[str, str | None, Any]] = []
        told = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                told.asked.append((self.path, self.headers["Authorization"], json.loads(body)))
                self.send_response(told.status)
                self.end_headers()
                self.wfile.write(told.body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


def test_a_task_is_registered(cluster: Cluster) -> None:
    cluster.body = json.dumps({"labels": ["[b]no", "yes"], "slo_ms": 600.0, "prompts": [2, 4]}).encode()
    code, told = run("register-task", cluster.url, "digits", "odd", "/tasks/odd")
    assert code == 0, told
    assert told.strip() == "digits serves odd now: labels: [b]no, yes slo_ms: 600.0 prompts: 2, 4"
    assert run("register-task", cluster.url, "a/b", "c d", "odd", "--replace", "--api-key", "k")[0] == 0
    address = "/v2/repository/models/{}/tasks/{}/load"
    assert cluster.asked == [
        (address.format("digits", "odd"), None, {"parameters": {"path": "/tasks/odd", "replace": False}}),
        (address.format("a%2Fb", "c%20d"), "Bearer k", {"parameters": {"path": "odd", "replace": True}}),
    ]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b'{"error": "there is no folder [x]"}', "refused with 404: there is no folder [x]"),
        (b"[1]", "refused with 404: Not Found"),
        (b"<html>", "refused with 404: Not Found"),
    ],
)
def test_a_refusal_is_reported(body: bytes, line: str, cluster: Cluster) -> None:
    cluster.status, cluster.body = 404, body
    code, told = run("register-task", cluster.url, "digits", "odd", "/tasks/odd")
    assert code == 1
    assert line in told


def test_an_answer_of_something_else_is_no_success(cluster: Cluster) -> None:
    cluster.body = b"<html>"
    code, told = run("register-task", cluster.url, "digits", "odd", "/tasks/odd")
    assert code == 1
    assert "is no cluster of pliant" in told


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "127.0.0.1:8000", "http://[", "file:///etc"])
def test_what_cannot_be_reached_is_reported(url: str) -> None:
    code, told = run("register-task", url, "digits", "odd", "/tasks/odd")
    assert code == 1
    assert f"{url}: cannot be reached: " in told


def test_a_profile_is_shown_and_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "fetch_vision", lambda _model, progress: tmp_path)
    monkeypatch.setattr(sources, "fetch_tasks", lambda _folder, _progress: tmp_path)
    monkeypatch.setattr(vision_cli, "_measured", lambda _name, _service, _update: PROFILE)
    code, told = run("profile", "digits", "--config", ROOT / "cluster.yaml", "--out", tmp_path / "new")
    assert code == 0, told
    assert "95.0% │ - │ no" in told
    assert "gamma 2 is not used with these tasks: 0 is at least as fast, and as accurate for each" in told
    assert json.loads((tmp_path / "new" / "profile-digits.json").read_text())["useless"] == {"2": 0}
    assert (tmp_path / "new" / "profile-digits.png").exists()


def test_a_profile_has_what_the_service_measures(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    info = read_vision(backbone)
    task_folder(tmp_path / "tasks" / "a", info, prompts=(1, 2), images=6)
    task_folder(tmp_path / "tasks" / "b", info, prompts=(2,))
    task_folder(tmp_path / "tasks" / "c", info, utility="none")
    (tmp_path / "tasks" / ".made.json").write_text("{}")
    gammas = (-2, 0, 1, 2)
    executor = vit_executor.load(backbone)
    loaded = Loaded(
        executor=executor,
        gammas=gammas,
        latency=lambda gamma, rows: (3 + gamma) * rows / 1e3,
        measured=(1, 2, 8),
        memory_bytes=executor.memory_bytes,
        identity="here",
        own={},
    )
    monkeypatch.setattr(assembly, "load", lambda _config, _progress: loaded)
    service = VisionConfig(kind="vision", model=str(backbone), tasks=str(tmp_path / "tasks"))
    reports: list[tuple[str, float]] = []
    found = vision_cli._measured("digits", service, lambda text, done: reports.append((text, done)))
    assert (found.gammas, found.batches) == (gammas, (1, 2, 8)), "and no batch that was not measured"
    assert found.seconds[1] == pytest.approx((0.003, 0.006, 0.024))
    assert found.memory_bytes[0][0] == executor.memory_bytes(-2, 1)
    assert {name: sorted(each) for name, each in found.accuracies.items()} == {"a": [-2, 0, 1, 2], "b": [-2, 0, 2]}
    assert all(0 <= accuracy <= 1 for accuracy in found.accuracies["a"].values())
    assert found.accuracies["b"] == {-2: 0.7, 0: 0.8, 2: 0.9}
    assert 2 not in found.useless
    assert [text for text, _ in reports] == [f"measuring accuracies of {name}" for name in "abc"]


def test_a_service_without_tasks_has_the_accuracies_that_it_assumes(
    backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = vit_executor.load(backbone)
    loaded = Loaded(
        executor, (-2, 0), lambda _gamma, _rows: 1.0, (1, 4), executor.memory_bytes, "here", {-2: 0.9, 0: 1.0}
    )
    monkeypatch.setattr(assembly, "load", lambda _config, _progress: loaded)
    service = VisionConfig(kind="vision", model=str(backbone), tasks={})
    found = vision_cli._measured("digits", service, lambda _text, _done: None)
    assert found.accuracies == {"model, assumed": {-2: 0.9, 0: 1.0}}
    assert found.useless == {-2: 0}


def test_what_the_zoo_lacks_is_trained_while_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: set[str] = set()
    monkeypatch.setattr(zoo, "train_ahead", wanted.update)
    serve_cli._train_ahead(read(ROOT / "cluster.yaml").serving)
    classifiers = {"topics-small", "topics-large", "topics-embedding", "library"}
    assert wanted == {*classifiers, "digits-vit", "digits-tasks", "tiny-llama", "adapters"}


def test_the_whole_zoo_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    monkeypatch.setattr(zoo, "ensure", lambda name, _progress, niceness: trained.append(name))
    assert run("zoo", "--train")[0] == 0
    assert trained == [*zoo.NAMES, "adapters", "digits-tasks"]


def test_the_example_is_a_digit_that_is_decoded() -> None:
    import base64

    from pliant.deployments.http.images import ImageReader
    from pliant.zoo import digits

    info = sources.check_vision("zoo/digits-vit")
    serving = read(ROOT / "cluster.yaml").serving
    path, body = serving.services["digits"].example("digits")
    pixels = ImageReader(info, 1).decode(base64.b64decode(body["inputs"]))
    held_out = digits.held_out()
    (same,) = np.flatnonzero((held_out.images == pixels).all(axis=(1, 2, 3)))
    assert held_out.labels[same] == 3
    greeting = serve_cli._examples(read(ROOT / "cluster.yaml"))["digits"]
    assert (path, body["parameters"]) == ("models/digits", {"task": "digit", "top_k": 2})
    assert f"/models/digits -d '{json.dumps(body)}'" in greeting
