"""A cluster of three nodes with pretend GPUs on this machine, through every failure in turn; writes what clients saw.

`python pretend_nodes.py FILE`: a script, because it owns its Ray. Replicas hold runtimes that only sleep, of a model
that has a tokenizer and no weights; all else is as in a real cluster. Beside them it serves a kind of its own, echo.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from ray import serve
from support.doubles import Sleepers
from support.echo.config import EchoConfig
from support.echo.kind import ECHO
from support.waiting import HANGS_AFTER_S, PATIENT_MS, wait_until
from tokenizers import Tokenizer, models, pre_tokenizers

from pliant.bench.chaos.nodes import Nodes, processes, replicas_on
from pliant.config.cluster import Reader
from pliant.config.encoder import EncoderConfig
from pliant.deployments.app import assemble
from pliant.deployments.drain import await_empty
from pliant.deployments.encoder.computing import Runtime
from pliant.deployments.encoder.replica import EncoderReplica
from pliant.deployments.kinds import CONFIGS, KINDS

LENGTHS = (64, 128, 512)
BROKEN = "PLIANT_TEST_BROKEN"
"""Names a file; while it exists, the length in it cannot be loaded."""
CLIENTS = 6
ROUNDS = 5
"""Requests that each of them sends in each phase, at least."""
SHORT, LONG = ("word " * words for words in (30, 300))
PLANNER, GATEWAY = "ServeReplica:default:planner", "ServeReplica:default:gateway"


class PretendRuntimes(Sleepers):
    def load(self, max_length: int) -> Runtime:
        flag = Path(os.environ[BROKEN])
        self.broken = {int(flag.read_text())} if flag.exists() else set()
        return super().load(max_length)


class PretendReplica(EncoderReplica):
    def runtimes(self, config: EncoderConfig) -> Sleepers:
        assert config.lengths
        return PretendRuntimes(config.lengths, service_s=0, per_token_s=3e-4)


def model(folder: Path) -> str:
    """Takes 512 tokens, each a word, and knows two labels, as `Sleepers` do."""
    folder.mkdir()
    config = {
        "architectures": ["BertForSequenceClassification"],
        "model_type": "bert",
        "max_position_embeddings": LENGTHS[-1],
        "pad_token_id": 0,
        "id2label": {"0": "length", "1": "first"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "word": 1}, "[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


class Clients:
    """Send texts without pause, and count how each ended."""

    def __init__(self, address: str, number: int) -> None:
        self.text = SHORT
        self._address = address
        self._outcomes: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ended = [0] * number
        for index in range(number):
            threading.Thread(target=self._send, args=(index,), daemon=True).start()

    @property
    def rounds(self) -> int:
        """How many requests each has sent at least."""
        return min(self._ended)

    def take(self) -> dict[str, int]:
        """The outcomes since the last time."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, Counter()
        return dict(outcomes)

    def _send(self, index: int) -> None:
        with httpx.Client(timeout=HANGS_AFTER_S) as http:
            while True:
                body = {"inputs": self.text, "parameters": {"slo_ms": PATIENT_MS, "top_k": 1}}
                try:
                    response = http.post(f"{self._address}/models/topics", json=body)
                    outcome = "ok" if response.status_code == 200 else f"{response.status_code} {response.text[:200]}"
                except httpx.TransportError as error:
                    outcome = repr(error)
                with self._lock:
                    self._outcomes[outcome] += 1
                self._ended[index] += 1


class Scenario:
    def __init__(self, address: str) -> None:
        self._address = address
        self.clients = Clients(address, CLIENTS)
        self.phases: dict[str, Any] = {}

    def phase(self, name: str, until: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the service's statistics are as wanted, and each client has sent something; keep what they saw."""
        rounds = self.clients.rounds + ROUNDS

        def reached() -> bool:
            service = self._service()
            return self.clients.rounds >= rounds and bool(service["plan"]) and until(service)

        wait_until(reached, self._held)
        service = self._service()
        self.phases[name] = {
            "outcomes": self.clients.take(),
            "held": [length for _, length, _ in self._held()],
            "failed": [report["failed"] for report in service["replicas"].values() if report["failed"]],
            "plan": service["plan"],
            "echo": self._echo(name),
        }

    def _held(self) -> list[tuple[str, int, Any]]:
        """Replicas, what they hold, and what they could not load; by what they hold."""
        replicas = self._service()["replicas"].items()
        found = [(name, report["max_length"], report["failed"]) for name, report in replicas]
        return sorted(found, key=lambda replica: replica[1])

    def _echo(self, text: str) -> Any:
        """What the service that says what it hears answers; asked again where nothing of it is left (503)."""

        def ask() -> httpx.Response | None:
            answer = httpx.post(f"{self._address}/models/echo", json={"inputs": text}, timeout=HANGS_AFTER_S)
            return answer if answer.status_code != 503 else None

        answer = wait_until(ask, self._held)
        return answer.json() if answer.status_code == 200 else answer.text

    def _service(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = httpx.get(f"{self._address}/stats", timeout=HANGS_AFTER_S).json()["services"][
                "topics"
            ]
        except (httpx.HTTPError, ValueError, KeyError):  # the gateway that was asked has gone
            return {"plan": {}, "replicas": {}}
        return found


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
    """SIGKILL one of `processes`; its id."""
    victim = min(processes(title))
    psutil.Process(victim).kill()
    return victim


def main() -> None:
    nodes = Nodes(head_cpus=4, num_cpus=1, num_gpus=2)
    for _ in range(2):
        nodes.add()
    address = nodes.connect()
    config = Reader((*CONFIGS, EchoConfig)).parse(
        {
            "gateway": {"replicas": 2, "cpus": 1.2},
            "services": {
                "topics": {
                    "kind": "encoder",
                    "model": model(Path("model")),
                    "lengths": LENGTHS,
                    "replicas": 4,
                    "slo_ms": 1000,
                    "cpus": 0.45,
                    "gpus": 1,
                },
                "echo": {"kind": "echo", "replicas": 2, "timeout_s": HANGS_AFTER_S},
            },
        }
    )
    try:
        serve.run(assemble(config, {"topics": PretendReplica}, (*KINDS, ECHO)))
        scenario = Scenario(address)
        flag = Path(os.environ[BROKEN])

        scenario.phase("short texts", holds(64, 64, 64, 512))
        scenario.clients.text = LONG
        scenario.phase("long texts", holds(512, 512, 512, 512))
        kill(PLANNER)
        scenario.phase("planner killed", lambda service: "version" in service["plan"] and not service["plan"]["moves"])
        scenario.clients.text = SHORT
        scenario.phase("short texts again", holds(64, 64, 64, 512))
        victim = kill(GATEWAY)
        scenario.phase("gateway killed", lambda _: victim not in processes(GATEWAY))
        scenario.phase("gateway back", lambda service: len(processes(GATEWAY)) == 2 and holds(64, 64, 64, 512)(service))
        nodes.remove(1)
        scenario.phase("node removed", holds(64, 512))
        flag.write_text("64")
        nodes.add()
        scenario.phase("node added, 64 broken", lambda service: all_serve(service) and has_failed(service))
        flag.unlink()
        nodes.add()
        drained = nodes.drain(0)
        scenario.phase("node drained", lambda service: all_serve(service) and not replicas_on(drained))
        assert not await_empty(drained, within_s=0)
        Path(sys.argv[1]).write_text(json.dumps(scenario.phases, indent=1))
    finally:
        nodes.end()


if __name__ == "__main__":
    main()
