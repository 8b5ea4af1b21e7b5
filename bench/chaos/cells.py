"""`python -m pliant.bench.chaos.cells PLAN OUT`: breaks a cluster of its own in all ways of PLAN, and writes what its
clients saw after each; it ends early when the cluster does not get whole again. A process of its own, because it owns
its Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from ray import serve

from pliant import zoo
from pliant.bench.chaos import slow_disk
from pliant.bench.chaos.clients import CHAT, IMAGES, TEXTS, Clients, End
from pliant.bench.chaos.faults import FAULTS, undo
from pliant.bench.chaos.nodes import Nodes, processes
from pliant.bench.load import LoadError
from pliant.bench.report import load_average
from pliant.deployments.app import assemble
from pliant.deployments.kinds import parse

_GATEWAY = "ServeReplica:default:gateway"
_PARTS = {
    "edge": ("haproxy", "ProxyActor"),
    "gateway": (_GATEWAY,),
    "planner": ("ServeReplica:default:planner",),
    **{f"replica of {name}": (f"ServeReplica:default:{name}",) for name in (TEXTS, CHAT, IMAGES)},
    "controller": ("ServeController",),
}
"""What the title of a process of each has; of the first that there is."""
_BEFORE_S, _AFTER_S, _CALM_S = 3.0, 10.0, 3.0
_RECOVERS_WITHIN_S = 60.0
_STARTS_WITHIN_S, _WHOLE_WITHIN_S = 1800.0, 240.0
_SLOW_S = 0.3
"""That a step of a slow disk takes."""


def main() -> None:
    """PLAN is a list of pairs of a part, "node" or "state", and a fault."""
    plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    nodes = Nodes(head_cpus=3, num_cpus=2)
    try:
        for _ in range(2):
            nodes.add()
        address = nodes.connect()
        slow = any(fault == "slow disk" for _, fault in plan)
        serve.run(assemble(parse(_config(out.parent, slow))))
        asyncio.run(_run(address, nodes, plan, lambda found: out.write_text(json.dumps(found))))
    finally:
        nodes.end()


def _config(folder: Path, slow: bool) -> dict[str, Any]:
    (folder / "state").mkdir()
    shutil.copytree(zoo.ensure(zoo.ADAPTERS, lambda _what, _done: None), folder / "adapters")
    each: dict[str, Any] = {"replicas": 2, "cpus": 0.2}
    adapters = {"roots": [str(folder / "adapters")]}
    return {
        "gateway": {"replicas": 2, "cpus": 0.2},
        "state": f"{'slow://' if slow else ''}{folder / 'state'}",
        "services": {
            TEXTS: {**each, "kind": "encoder", "model": "zoo/topics-small", "lengths": [64]},
            CHAT: {**each, "kind": "llm", "model": "zoo/tiny-llama", "max_length": 512, "adapters": adapters},
            IMAGES: {**each, "kind": "vision", "model": "zoo/digits-vit", "tasks": "zoo/digits-tasks"},
        },
    }


async def _run(
    address: str, nodes: Nodes, plan: Sequence[tuple[str, str]], keep: Callable[[list[dict[str, Any]]], object]
) -> None:
    """Give `keep` what was found, after each cell."""
    clients = Clients(address)
    if await _whole_s(address, _STARTS_WITHIN_S) is None:
        raise LoadError("the cluster does not get ready")
    await clients.learn()
    found = []
    for part, fault in plan:
        seen = await _cell(clients, nodes, part, fault)
        whole_s = await _whole_s(address, _WHOLE_WITHIN_S)
        found.append({"part": part, "fault": fault, **seen, "whole_s": whole_s, "load": load_average()[0]})
        print(found[-1], flush=True)
        keep(found)
        if whole_s is None:
            return


async def _cell(clients: Clients, nodes: Nodes, part: str, fault: str) -> dict[str, Any]:
    """What clients saw of one fault."""
    clients.ends.clear()
    asking = asyncio.create_task(clients.run())
    await asyncio.sleep(_BEFORE_S)
    at = time.monotonic()
    victim: psutil.Process | None = None
    if part == "node":
        await asyncio.to_thread(nodes.terminate if fault == "SIGTERM" else nodes.remove, 0)
    elif part == "state":
        slow_disk.begin(_SLOW_S)
    else:
        victim = _victim(part)
        await asyncio.to_thread(FAULTS[fault], victim, [psutil.Process(each) for each in processes(_GATEWAY)])
    await _calm(clients, at)
    if victim:
        with contextlib.suppress(psutil.NoSuchProcess):  # Serve has replaced it meanwhile
            undo(victim)
    slow_disk.end()
    asking.cancel()
    await asyncio.wait([asking])
    if part == "node":
        nodes.add()  # Ray wants the main thread for it
    bad = [end for end in clients.ends if end.bad]
    return {
        "sent": len(clients.ends),
        **{how: sum(end.how == how for end in clients.ends) for how in ("lost", "wrong", "shed")},
        "late": sum(end.late for end in clients.ends),
        "recover_s": round(max((end.ended - at for end in bad), default=0.0), 2),
        "by": dict(Counter(f"{end.kind}: {end.how if end.how != 'ok' else 'late'} {end.what}" for end in bad)),
    }


def _victim(part: str) -> psutil.Process:
    """The youngest: of several HAProxies the others serve what is left of old connections."""
    return max(map(psutil.Process, _titled(_PARTS[part])), key=lambda process: process.create_time())


def _titled(titles: Sequence[str]) -> set[int]:
    """Ids of the processes of the first of `titles` that there are any of."""
    return next(filter(None, map(processes, titles)), set())


async def _calm(clients: Clients, at: float) -> None:
    """Until nothing bad has come for a while, and each kind has been answered meanwhile."""
    while (now := time.monotonic()) < at + _RECOVERS_WITHIN_S:
        lately: list[End] = [end for end in clients.ends if end.ended > now - _CALM_S]
        kinds = {end.kind for end in lately if end.began > at}
        if now > at + _AFTER_S and kinds == clients.kinds.keys() and not any(end.bad for end in lately):
            return
        await asyncio.sleep(0.5)


async def _whole_s(address: str, within_s: float) -> float | None:
    """Seconds until all services have both replicas, all parts are there, and nothing is compiled; None: that is not so
    `within_s`."""
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=10) as http:
        while (waited := time.monotonic() - began) < within_s:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                stats = (await http.get(f"{address}/stats")).json()
                views = stats["services"].values()
                reports = [report for view in views for report in view["replicas"].values()]
                whole = all(view["ready"] and len(view["replicas"]) == 2 for view in views)
                compiling = any(report.get("compiling") for report in reports)
                if whole and stats["planner_reached"] and not compiling and all(map(_titled, _PARTS.values())):
                    return round(waited, 1)
            await asyncio.sleep(1)
    return None


if __name__ == "__main__":
    main()
