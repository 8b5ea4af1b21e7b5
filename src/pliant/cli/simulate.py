"""`pliant simulate` without `--gpus`: a trace of several services through the whole cluster, under several policies."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from pliant.cli.terminal import console
from pliant.config.cluster import ServingConfig
from pliant.deployments.serving.budget_policies import by_name
from pliant.errors import ConfigError
from pliant.policies.cluster.budget import BudgetError, Nodes
from pliant.policies.cluster.room import counted
from pliant.simulation import speeds
from pliant.simulation.cluster import comparison, trace
from pliant.simulation.cluster.simulator import Outage, Outcome, Served, Simulation

_NODES = r"([1-9]\d{0,4})x(?:(\d{1,3})gpu)?(\d{1,4})cpu"


def compare(
    config: ServingConfig,
    traces: Sequence[str],
    measured: Path | None,
    nodes: str | None,
    policies: str,
    outages: Sequence[str],
    out: Path,
    as_json: bool,
) -> None:
    """Print what comes of `traces`, files or SERVICE=FILE, under each of the `policies`, if nodes go as `outages` say.

    Raises PliantError.
    """
    if measured is None:
        raise ConfigError(["--speeds: needed without --gpus: a file with the speeds of each service's replicas"])
    there = _nodes(config, nodes)
    away = [_outage(each, there) for each in outages]
    found = speeds.read(measured, config)
    loads = trace.merged([_read(each) for each in traces])
    services = speeds.services(config, loads, found, there)
    try:
        outcomes = {name: _run(name, services, counted(there, there), away) for name in policies.split(",")}
    except BudgetError as error:
        raise ConfigError([f"{error}; give more --nodes, or lower min replicas"]) from None
    if as_json:
        print(json.dumps(comparison.figures(outcomes)))
        return
    console.print(comparison.table(outcomes))
    out.mkdir(parents=True, exist_ok=True)
    comparison.plot(outcomes).savefig(out / "simulate.png", dpi=120, bbox_inches="tight")
    console.print(f"Written to {out / 'simulate.png'}.")


def _run(name: str, services: list[Served], nodes: Sequence[Nodes], outages: Sequence[Outage]) -> Outcome:
    try:
        policy = by_name(name)
    except ValueError as error:
        raise ConfigError([f"--compare: {name}: {error}"]) from None
    simulation = Simulation(services, [], nodes, recorded=True, outages=outages)
    return simulation.run(policy, speeds.at_start(services, nodes))


def _read(given: str) -> dict[str, trace.Load]:
    service, equals, path = given.partition("=")
    return trace.read(Path(path), service) if equals else trace.read(Path(given))


def _nodes(config: ServingConfig, given: str | None) -> list[Nodes]:
    if given is None:
        if not (config.budget and config.budget.nodes):
            raise ConfigError(["--nodes: needed, such as 8x8gpu96cpu, as cluster.yaml has no budget.nodes"])
        return [Nodes(each.count, each.gpus, each.cpus) for each in config.budget.nodes]
    nodes = []
    for part in given.split(","):
        match = re.fullmatch(_NODES, part)
        if not match:
            raise ConfigError([f"--nodes: got {part}; must be such as 8x8gpu96cpu or 2x6cpu, with commas between"])
        nodes.append(_of(match))
    return nodes


def _outage(given: str, there: Sequence[Nodes]) -> Outage:
    match = re.fullmatch(rf"{_NODES}@(\d{{1,7}})\+(\d{{1,7}})(?:-(\d{{1,5}}))?", given)
    if not match:
        raise ConfigError(
            [
                f"--outage: got {given}; must be such as 2x8gpu96cpu@3600+600-120: two such nodes go at 3600 s "
                "for 600 s, with a notice of 120 s"
            ]
        )
    nodes = _of(match)
    if not any(each.count >= nodes.count and (each.gpus, each.cpus) == (nodes.gpus, nodes.cpus) for each in there):
        raise ConfigError([f"--outage: got {given}; there are not so many such nodes"])
    return Outage(counted([nodes], there)[0], int(match[4]), int(match[5]), int(match[6] or 0))


def _of(match: re.Match[str]) -> Nodes:
    return Nodes(int(match[1]), int(match[2] or 0), float(match[3]))
