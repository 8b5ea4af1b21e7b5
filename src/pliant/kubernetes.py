"""A cluster.yaml as manifests for Kubernetes with the KubeRay operator; `pliant kubernetes` writes them.

Ray's own address stays inside (a network policy, and Ray's tokens); clients reach the service `NAME` on port 8000.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import yaml

from pliant import haproxy, ray_settings
from pliant.config.cluster import IMPORT_PATH, PLANNER_CPUS, ClusterConfig, GatewayConfig
from pliant.dashboards import files, rules
from pliant.errors import ConfigError

_PORT: Final = 8000
_HTTP: Final = {"host": "0.0.0.0", "port": _PORT}
"""Of Serve in a pod, whatever the file says: KubeRay's probes and Prometheus ask without TLS."""
_METRICS: Final = 8080
_PROGRAM: Final = "/opt/pliant/bin/pliant-haproxy"
_FOLDER: Final = "/tmp/pliant-haproxy"
_GATEWAY_PORTS: Final = 30_000
_CACHE: Final = "/var/cache/pliant"
_DRAINS_S: Final = 120
"""Longer than `pliant drain` waits."""

_OBSERVER: Final = "OBSERVER_KEY"
_KEYS: Final = "KEYS_FILE"
"""In the secret: what `gateway.keys_file` of cluster.yaml is to hold."""
_KEYS_FOLDER: Final = "/etc/pliant/secret"
"""Where pods find it: a folder of its own, since a single file would not follow the secret."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """What one worker has."""

    cpus: int
    gpus: int
    memory_gb: int


@dataclass(frozen=True)
class Deployment:
    """What is not in cluster.yaml."""

    name: str
    image: str
    worker: Shape


def manifests(text: str, cluster: ClusterConfig, given: Deployment) -> dict[str, str]:
    """Files by name, for the cluster.yaml `text`, which was read as `cluster`.

    Raises ConfigError if a replica fits on no worker, or if the file relies on TLS of its own, or on none.
    """
    least, most = workers(cluster, given.worker)
    gateway = cluster.serving.gateway
    if not gateway.behind_proxy:
        plain = "in Kubernetes other pods reach the service over plain HTTP, whatever http_options says"
        raise ConfigError([f"gateway.behind_proxy: got false; {plain}: have TLS in front of it, and say true"])
    keys = _Keys.of(gateway)
    documents: dict[str, list[Manifest]] = {
        "rayservice.yaml": [_ray_service(text, keys, given, least, most)],
        "disruption.yaml": [_disruption(given)],
        "network.yaml": [_network(given)],
        "monitoring.yaml": list(_monitoring(given, keys)),
        "secret.example.yaml": [_secret(given, keys)],
    }
    kept = [name for name in documents if "example" not in name]
    documents["kustomization.yaml"] = [_kustomization(kept, given)]
    written = {name: _yaml(each) for name, each in documents.items()}
    return {**written, **{f"dashboards/{name}": content for name, content in files.boards()}}


def workers(cluster: ClusterConfig, shape: Shape) -> tuple[int, int]:
    """How many workers hold the fewest replicas, and how many the most: the largest first, each on the first with room.

    Raises ConfigError if one fits on none.
    """
    gateway = cluster.serving.gateway
    fewest = [*[(0.0, gateway.cpus)] * gateway.replicas.min, (0.0, PLANNER_CPUS)]
    most = [*[(0.0, gateway.cpus)] * gateway.replicas.max, (0.0, PLANNER_CPUS)]
    for name, service in cluster.serving.services.items():
        size, reserved = service.replica_range(), service.resources()
        if size:
            each = gpus, cpus = reserved["num_gpus"], reserved["num_cpus"]
            if gpus > shape.gpus or cpus > shape.cpus:
                has = f"services.{name}: a replica has {cpus:g} CPUs and {gpus:g} GPUs"
                raise ConfigError([f"{has}, more than a worker; give --worker-cpus and --worker-gpus"])
            fewest += [each] * size.min
            most += [each] * size.max
    return _bins(fewest, shape), _bins(most, shape)


def _bins(wanted: Iterable[tuple[float, float]], shape: Shape) -> int:
    free: list[list[float]] = []
    for gpus, cpus in sorted(wanted, reverse=True):
        for left in free:
            if left[0] >= gpus - 1e-9 and left[1] >= cpus - 1e-9:
                break
        else:
            free.append(left := [float(shape.gpus), float(shape.cpus)])
        left[0] -= gpus
        left[1] -= cpus
    return len(free)


@dataclass(frozen=True)
class _Keys:
    """Where the gateway looks for clients' keys."""

    variables: tuple[str, ...]
    file: bool

    @classmethod
    def of(cls, gateway: GatewayConfig) -> _Keys:
        variables = tuple(filter(None, (gateway.api_keys_env, gateway.keys_env)))
        return cls(variables, gateway.keys_file is not None)

    @property
    def secret(self) -> tuple[str, ...]:
        """Their names in the secret."""
        return (*self.variables, _KEYS) if self.file else self.variables


def _serve_config(text: str, keys: _Keys) -> str:
    """The file `text` as pods serve it: on their port, and with the secret's file of keys."""
    config = yaml.safe_load(text)
    given = config.pop("http_options", None) or {}
    kept = {name: value for name, value in given.items() if not name.startswith("ssl_")}
    if keys.file:
        ours = next(each for each in config["applications"] if each["import_path"] == IMPORT_PATH)
        ours["args"]["gateway"]["keys_file"] = f"{_KEYS_FOLDER}/{_KEYS}"
    return yaml.safe_dump({"http_options": {**kept, **_HTTP}, **config}, sort_keys=False, width=120)


def _ray_service(text: str, keys: _Keys, given: Deployment, least: int, most: int) -> Manifest:
    worker = _pod(given, keys, given.worker)
    worker["spec"]["containers"][0]["lifecycle"] = {"preStop": {"exec": {"command": ["pliant", "drain"]}}}
    worker["spec"]["automountServiceAccountToken"] = False  # not of the head: Ray's autoscaler there adds pods with it
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": given.name, "labels": _labels(given)},
        "spec": {
            "serviceUnhealthySecondThreshold": 900,
            "deploymentUnhealthySecondThreshold": 900,
            "excludeHeadPodFromServeSvc": True,
            "serveConfigV2": _Block(_serve_config(text, keys)),
            "serveService": {
                "metadata": {"name": given.name, "labels": _labels(given)},
                "spec": {"type": "ClusterIP", "ports": [{"name": "serve", "port": _PORT, "targetPort": _PORT}]},
            },
            "rayClusterConfig": {
                "rayVersion": version("ray"),
                "authOptions": {"mode": "token"},
                "enableInTreeAutoscaling": True,
                "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 600},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                    "template": _pod(given, keys, Shape(2, 0, 8)),
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "workers",
                        "replicas": least,
                        "minReplicas": least,
                        "maxReplicas": most,
                        "rayStartParams": {},
                        "template": worker,
                    }
                ],
            },
        },
    }


def _pod(given: Deployment, keys: _Keys, shape: Shape) -> Manifest:
    """Of the head or a worker. KubeRay adds the probes: of Ray, and of Serve's proxy where there is one."""
    reserved = {"cpu": str(shape.cpus), "memory": f"{shape.memory_gb}Gi"}
    gpus = {"nvidia.com/gpu": str(shape.gpus)} if shape.gpus else {}
    secrets = (haproxy.PASSWORD, *keys.variables)
    mounts = [{"name": "keys", "mountPath": _KEYS_FOLDER, "readOnly": True}] if keys.file else []
    items = [{"key": _KEYS, "path": _KEYS}]
    volumes = [{"name": "keys", "secret": {"secretName": given.name, "items": items}}] if keys.file else []
    variables = {
        **ray_settings.ENVIRONMENT,
        **haproxy.settings(_PROGRAM, _FOLDER, _GATEWAY_PORTS),
        "PLIANT_CACHE": _CACHE,
    }
    return {
        "metadata": {"labels": _labels(given)},
        "spec": {
            "terminationGracePeriodSeconds": _DRAINS_S,
            "securityContext": {"runAsNonRoot": True, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "ray",
                    "image": given.image,
                    "env": [
                        *({"name": name, "value": value} for name, value in variables.items()),
                        *(
                            {"name": name, "valueFrom": {"secretKeyRef": {"name": given.name, "key": name}}}
                            for name in secrets
                        ),
                    ],
                    "ports": [
                        {"name": "serve", "containerPort": _PORT},
                        {"name": "metrics", "containerPort": _METRICS},
                    ],
                    "resources": {"requests": {**reserved, **gpus}, "limits": {"memory": reserved["memory"], **gpus}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [
                        {"name": "cache", "mountPath": _CACHE},
                        {"name": "memory", "mountPath": "/dev/shm"},
                        *mounts,
                    ],
                }
            ],
            "volumes": [
                {"name": "cache", "emptyDir": {"sizeLimit": "100Gi"}},
                {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(1, shape.memory_gb // 4)}Gi"}},
                *volumes,
            ],
        },
    }


def _disruption(given: Deployment) -> Manifest:
    """Nodes are emptied one worker after another."""
    selected = {**_labels(given), "ray.io/node-type": "worker"}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": given.name, "labels": _labels(given)},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": selected}},
    }


def _network(given: Deployment) -> Manifest:
    """Whoever reaches Ray's ports may run code: only the cluster's own pods and the operator do."""
    own = {"podSelector": {"matchLabels": _labels(given)}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": given.name, "labels": _labels(given)},
        "spec": {
            "podSelector": {"matchLabels": _labels(given)},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own, operator]},
                {"ports": [{"port": _PORT, "protocol": "TCP"}, {"port": _METRICS, "protocol": "TCP"}]},
            ],
        },
    }


def _monitoring(given: Deployment, keys: _Keys) -> Iterator[Manifest]:
    """For the Prometheus operator: Ray's page of each pod, the gateway's of the service, and the alerts."""
    api = "monitoring.coreos.com/v1"
    metadata = {"name": given.name, "labels": _labels(given)}
    selector = {"matchLabels": _labels(given)}
    job = [{"targetLabel": "job", "replacement": "ray"}]
    ray = {"port": "metrics", "interval": "10s", "relabelings": job}
    yield {
        "apiVersion": api,
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {"selector": selector, "podMetricsEndpoints": [ray]},
    }
    page: Manifest = {"port": "serve", "path": "/metrics", "interval": "10s"}
    page["relabelings"] = [{"targetLabel": "job", "replacement": "pliant"}]
    if keys.secret:
        page["authorization"] = {"credentials": {"name": given.name, "key": _OBSERVER}}
    yield {
        "apiVersion": api,
        "kind": "ServiceMonitor",
        "metadata": metadata,
        "spec": {"selector": selector, "endpoints": [page]},
    }
    yield {"apiVersion": api, "kind": "PrometheusRule", "metadata": metadata, "spec": rules.as_yaml()}


def _secret(given: Deployment, keys: _Keys) -> Manifest:
    wanted = {haproxy.PASSWORD: "anything long and random", **dict.fromkeys(keys.secret, "as docs/tenants.md has it")}
    if keys.secret:
        wanted[_OBSERVER] = "a key that may observe"
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": given.name, "labels": _labels(given)},
        "stringData": wanted,
    }


def _kustomization(resources: list[str], given: Deployment) -> Manifest:
    boards = [f"dashboards/{name}" for name, _ in files.boards()]
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
        "configMapGenerator": [
            {"name": f"{given.name}-dashboards", "files": boards, "options": {"labels": {"grafana_dashboard": "1"}}}
        ],
        "generatorOptions": {"disableNameSuffixHash": True},
    }


def _labels(given: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "pliant", "app.kubernetes.io/instance": given.name}


class _Block(str):
    """Text of several lines, shown as it is."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Block, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def _yaml(documents: list[Manifest]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


def check_name(name: str) -> str:
    """`name`, if Kubernetes takes it for a service. Raises ConfigError."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?", name):
        raise ConfigError([f"--name: got {name}; must be small letters, digits and dashes, 50 at most"])
    return name
