"""Manifests: those in the repository are what the command writes, are of KubeRay's form, and serve what they are to."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.testing import CliRunner

from pliant.cli.command import app
from pliant.deployments.kinds import read
from pliant.errors import ConfigError
from pliant.kubernetes import Shape, check_name, workers

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT.parent / "shared" / "data" / "kuberay" / "ray.io_rayservices.yaml.gz"
FILE = ROOT / "cluster.gpu.yaml"
WRITTEN = ROOT / "deploy" / "kubernetes"
OPTIONS = [
    *("--image", "registry.example.org/pliant:cuda"),
    *("--worker-gpus", "4", "--worker-cpus", "32", "--worker-memory-gb", "256"),
]
"""With which WRITTEN was made of FILE."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((WRITTEN / name).read_text()))


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_API_KEYS", "one")


def test_the_repository_holds_what_the_command_writes(tmp_path: Path) -> None:
    called = CliRunner().invoke(app, ["kubernetes", str(FILE), *OPTIONS, "--out", str(tmp_path)])
    assert called.exit_code == 0, called.output
    kept = WRITTEN
    written = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {str(path.relative_to(kept)): path.read_text() for path in kept.rglob("*") if path.is_file()}


def test_it_serves_what_the_file_says(tmp_path: Path) -> None:
    service = documents("rayservice.yaml")[0]
    path = tmp_path / "cluster.yaml"
    path.write_text(service["spec"]["serveConfigV2"])
    assert read(path).serving == read(FILE).serving


def test_without_tls_in_front_it_is_refused(tmp_path: Path) -> None:
    """Pods serve plain HTTP, so neither keys nor TLS of the file's own will do."""
    called = CliRunner().invoke(app, ["kubernetes", str(ROOT / "cluster.yaml"), *OPTIONS, "--out", str(tmp_path)])
    assert isinstance(called.exception, ConfigError)
    assert str(called.exception).startswith("gateway.behind_proxy: got false; in Kubernetes other pods reach")
    assert not list(tmp_path.iterdir())


def test_a_file_of_keys_comes_from_the_secret(tmp_path: Path) -> None:
    config = yaml.safe_load(FILE.read_text())
    args = config["applications"][0]["args"]
    args["gateway"] = {"keys_file": "/root/keys", "behind_proxy": True}
    args["tenants"] = {"search": {}}
    config["http_options"]["keep_alive_timeout_s"] = 30
    path, out = tmp_path / "cluster.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(config))
    called = CliRunner().invoke(app, ["kubernetes", str(path), *OPTIONS, "--out", str(out)])
    assert called.exit_code == 0, called.output
    service = yaml.safe_load((out / "rayservice.yaml").read_text())["spec"]
    served = yaml.safe_load(service["serveConfigV2"])
    assert served["http_options"] == {"host": "0.0.0.0", "port": 8000, "keep_alive_timeout_s": 30}
    keys = Path(served["applications"][0]["args"]["gateway"]["keys_file"])
    for pod in pods(service["rayClusterConfig"]):
        (mount,) = (each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "keys")
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "keys")
        assert mount["mountPath"] == str(keys.parent)
        assert volume["secret"] == {"secretName": "pliant", "items": [{"key": keys.name, "path": keys.name}]}
    secret = yaml.safe_load((out / "secret.example.yaml").read_text())["stringData"]
    assert secret.keys() == {"PLIANT_HAPROXY_PASSWORD", "OBSERVER_KEY", keys.name}
    monitors = {each["kind"]: each for each in yaml.safe_load_all((out / "monitoring.yaml").read_text())}
    assert "authorization" in monitors["ServiceMonitor"]["spec"]["endpoints"][0]


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the head and of workers."""
    return [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]


def test_labels_meet() -> None:
    """What is selected is what pods and the service have."""
    service = documents("rayservice.yaml")[0]["spec"]
    templates = pods(service["rayClusterConfig"])
    monitors = {each["kind"]: each for each in documents("monitoring.yaml")}
    for labels in (*(pod["metadata"]["labels"] for pod in templates), service["serveService"]["metadata"]["labels"]):
        for monitor in ("PodMonitor", "ServiceMonitor"):
            assert monitors[monitor]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"] for pod in templates for port in pod["spec"]["containers"][0]["ports"]}
    assert monitors["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"] in ports
    secrets = set(re.findall(r"secretKeyRef:\s+name: pliant\s+key: (\w+)", yaml.safe_dump(templates)))
    secrets |= {"PLIANT_HAPROXY_PASSWORD"}
    assert secrets <= documents("secret.example.yaml")[0]["stringData"].keys()


def test_pods_end_later_than_they_drain() -> None:
    group = documents("rayservice.yaml")[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    pod = group["template"]["spec"]
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["pliant", "drain"]
    assert pod["terminationGracePeriodSeconds"] > 90


def test_the_autoscaler_alone_may_ask_kubernetes() -> None:
    """It runs in the head's pod, and reads its token where Kubernetes mounts it unless the pod refuses that."""
    cluster = documents("rayservice.yaml")[0]["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["headGroupSpec"]["template"]["spec"].get("automountServiceAccountToken", True)
    for group in cluster["workerGroupSpecs"]:
        assert group["template"]["spec"]["automountServiceAccountToken"] is False


def test_kuberay_takes_it() -> None:
    """Its schema, closed: a key that it does not know is an error here, and dropped silently by Kubernetes."""
    if not SCHEMA.exists():
        pytest.skip("KubeRay's schema is not there")
    definition = next(yaml.safe_load_all(gzip.decompress(SCHEMA.read_bytes())))
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v1")
    service = documents("rayservice.yaml")[0]
    jsonschema.validate(service, closed(version["schema"]["openAPIV3Schema"]))


def closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(value) for key, value in schema.items()}
    if "x-kubernetes-int-or-string" in schema:
        found.pop("type", None)
    if isinstance(schema.get("properties"), dict) and "type" in schema:
        found.setdefault("additionalProperties", "x-kubernetes-preserve-unknown-fields" in schema)
        if schema["properties"].keys() >= {"kind", "apiVersion", "metadata"}:
            found["properties"]["metadata"] = {"type": "object"}
        if "metadata" in schema["properties"]:
            found["properties"]["metadata"] = {"type": "object"}
    return found


def test_kustomize_takes_it() -> None:
    tool = shutil.which("kubectl")
    if tool is None:
        pytest.skip("there is no kubectl")
    command = [tool, "kustomize", str(WRITTEN)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds = {each["kind"] for each in yaml.safe_load_all(done.stdout)}
    assert kinds >= {"RayService", "PodDisruptionBudget", "NetworkPolicy", "ConfigMap", "PrometheusRule"}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [(Shape(32, 4, 256), (2, 3)), (Shape(64, 8, 256), (1, 2)), (Shape(8, 1, 64), (6, 10))],
)
def test_workers_hold_all_replicas(shape: Shape, expected: tuple[int, int]) -> None:
    """Four to eight replicas of one service, two of the other, each of a GPU and two CPUs; two gateways of two."""
    assert workers(read(FILE), shape) == expected


def test_a_replica_that_fits_on_no_worker_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"services.sentiment: a replica has 2 CPUs and 1 GPUs, more than a worker"):
        workers(read(FILE), Shape(8, 0, 64))


def test_names_that_kubernetes_refuses() -> None:
    assert check_name("pliant-2") == "pliant-2"
    for name in ("Pliant", "2pliant", "a_b", "", "a" * 60, "a-"):
        with pytest.raises(ConfigError, match="--name"):
            check_name(name)


def test_the_image() -> None:
    """Rules of hadolint's that matter here: pinned bases, no root, no lists of packages left, both targets."""
    text = (ROOT / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.M)
    stages = re.findall(r"^FROM \S+ AS (\S+)", text, re.M)
    assert all(":" in base and not base.endswith(":latest") for base in bases if base not in (*stages, "${DEVICE}"))
    assert {"cpu", "cuda"} <= set(stages)
    assert text.count("apt-get install -y --no-install-recommends") == text.count("rm -rf /var/lib/apt/lists/*")
    assert text.rstrip().splitlines()[-3].startswith("USER 100")
    for source in re.findall(r"^COPY (?!--from)(\S+)", text, re.M):
        assert (ROOT / source).exists()
