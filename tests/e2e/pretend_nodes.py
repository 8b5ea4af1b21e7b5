"""A cluster of three nodes with pretend GPUs on this machine, through every failure in turn; writes what clients saw.

`python pretend_nodes.py FILE`: a script, because it owns its Ray. Replicas hold runtimes that only sleep; all else is
as in a real cluster.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from doubles import Sleepers
from e2e.cluster import free_port
from ray import serve
from ray.cluster_utils import Cluster

from pliant.config import EncoderConfig, ServingConfig
from pliant.deployments.app import assemble, encoder
from pliant.deployments.encoder.engine import Runtime
from pliant.deployments.encoder.replica import EncoderReplica

STORE = 80 * 2**20
LENGTHS = (64, 128, 512)
BROKEN = "PLIANT_TEST_BROKEN"
"""Names a file; while it exists, the length in it cannot be loaded."""
CLIENTS = 6
SHORT, LONG = ("generator " * words for words in (30, 300))


class PretendRuntimes(Sleepers):
    def load(self, max_length: int) -> Runtime:
        flag = Path(os.environ[BROKEN])
        self.broken = {int(flag.read_text())} if flag.exists() else set()
        return super().load(max_length)


class PretendReplica(EncoderReplica):
    def runtimes(self, config: EncoderConfig) -> Sleepers:
        assert config.lengths
        return PretendRuntimes(config.lengths, service_s=0, per_token_s=3e-4)


class Clients:
    """Send texts without pause, and count how each ended."""

    def __init__(self, address: str, number: int) -> None:
        self.text = SHORT
        self._address = address
        self._outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        for _ in range(number):
            threading.Thread(target=self._send, daemon=True).start()

    def take(self) -> dict[str, int]:
        """The outcomes since the last time."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, Counter()
        return dict(outcomes)

    def _send(self) -> None:
        with httpx.Client(timeout=60) as http:
            while True:
                body = {"inputs": self.text, "parameters": {"slo_ms": 30_000, "top_k": 1}}
                try:
                    response = http.post(f"{self._address}/models/topics", json=body)
                    outcome = "ok" if response.status_code == 200 else f"{response.status_code} {response.text[:200]}"
                except httpx.TransportError as error:
                    outcome = repr(error)
                with self._lock:
                    self._outcomes[outcome] += 1


class Scenario:
    def __init__(self, address: str) -> None:
        self._address = address
        self.clients = Clients(address, CLIENTS)
        self.phases: dict[str, Any] = {}

    def phase(self, name: str, until: Callable[[dict[str, Any]], bool], within_s: float = 60) -> None:
        """Wait until the service's statistics are as wanted; keep what clients saw meanwhile, and how long it took."""
        started = time.monotonic()
        service: dict[str, Any] = {}
        while True:
            try:
                stats = httpx.get(f"{self._address}/stats", timeout=10).json()
                service = stats["services"]["topics"]
                if service["plan"] and until(service):
                    break
            except (httpx.HTTPError, ValueError, KeyError):
                pass
            if time.monotonic() - started > within_s:
                break
            time.sleep(0.2)
        seconds = time.monotonic() - started
        self.phases[name] = {
            "seconds": round(seconds, 1),
            "reached": seconds <= within_s,
            "outcomes": self.clients.take(),
            "held": sorted(report["max_length"] for report in service.get("replicas", {}).values()),
            "failed": [report["failed"] for report in service.get("replicas", {}).values() if report["failed"]],
            "plan": service.get("plan"),
        }


def holds(*lengths: int) -> Callable[[dict[str, Any]], bool]:
    def reached(service: dict[str, Any]) -> bool:
        held = sorted(report["max_length"] for report in service["replicas"].values())
        return held == sorted(lengths) and sum(service["plan"].get("replicas", {}).values()) == len(lengths)

    return reached


def all_serve(service: dict[str, Any]) -> bool:
    return [report["max_length"] > 0 for report in service["replicas"].values()] == [True] * 4


def has_failed(service: dict[str, Any]) -> bool:
    """Replicas say so, and the planner has heard of it."""
    return any(report["failed"] for report in service["replicas"].values()) and service["plan"]["failed_moves"] > 0


def kill(title: str) -> int:
    """SIGKILL one of our processes whose title contains `title`; its process id."""
    family = psutil.Process().children(recursive=True)
    victim = next(process for process in family if title in " ".join(process.cmdline()))
    victim.kill()
    return int(victim.pid)


def main() -> None:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 4, "num_gpus": 0, "include_dashboard": False, "object_store_memory": STORE},
    )

    def add_node() -> Any:
        return cluster.add_node(num_cpus=1, num_gpus=2, object_store_memory=STORE)

    nodes = [add_node(), add_node()]
    port = free_port()
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    config = ServingConfig.model_validate(
        {
            "gateway": {"replicas": 2, "cpus": 1.2},
            "services": {
                "topics": {
                    "kind": "encoder",
                    "model": "zoo/topics-large",
                    "lengths": LENGTHS,
                    "replicas": 4,
                    "slo_ms": 1000,
                    "cpus": 0.45,
                    "gpus": 1,
                }
            },
        }
    )
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(assemble(config, {"topics": encoder("topics", config.encoders["topics"], PretendReplica)}))
        scenario = Scenario(f"http://127.0.0.1:{port}")
        flag = Path(os.environ[BROKEN])

        scenario.phase("short texts", holds(64, 64, 64, 512))
        scenario.clients.text = LONG
        scenario.phase("long texts", holds(512, 512, 512, 512))
        kill("ServeReplica:default:planner")
        scenario.phase("planner killed", lambda service: "version" in service["plan"] and not service["plan"]["moves"])
        scenario.clients.text = SHORT
        scenario.phase("short texts again", holds(64, 64, 64, 512))
        kill("ServeReplica:default:gateway")
        time.sleep(3)
        scenario.phase("gateway killed", holds(64, 64, 64, 512))
        time.sleep(2)
        scenario.phase("gateway back", holds(64, 64, 64, 512))
        cluster.remove_node(nodes[1], allow_graceful=False)
        scenario.phase("node removed", holds(64, 512))
        flag.write_text("64")
        add_node()
        scenario.phase("node added, 64 broken", lambda service: all_serve(service) and has_failed(service), within_s=90)
        Path(sys.argv[1]).write_text(json.dumps(scenario.phases, indent=1))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
