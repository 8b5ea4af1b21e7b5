"""`pliant doctor`: looks at this machine, at the nodes of a running Ray and at a running cluster; says what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.text import Text

from pliant.cli import doctor_facts, top
from pliant.cli.doctor_checks import Finding, examine
from pliant.cli.doctor_facts import Facts, Node, Port, Unknown, Wants, known
from pliant.cli.serve import serve_answers
from pliant.cli.terminal import console
from pliant.config.cluster import ClusterConfig, check_models
from pliant.config.http import HttpOptions
from pliant.deployments.kinds import read
from pliant.deployments.serving.history import troubles
from pliant.errors import ConfigError, PliantError

_STYLES = {"ok": "green", "warning": "yellow", "problem": "red"}
_ANSWERS_S = 5.0
"""Within which a cluster that is well answers."""
_RAY_PORT, _RAY_S_OWN = 6379, "gcs_server"
"""Where `ray start --head` listens, and what does so."""


def diagnose(path: Path, url: str | None, as_json: bool) -> int:
    """Look at all that serving the file at `path` needs, and at the cluster at `url`, by default the file's own.

    Prints a line for each check; returns the exit status, 1 if there is a problem.
    """
    findings = list(examine(_look(path, url)))
    if as_json:
        console.print_json(json.dumps([{"check": name, **finding._asdict()} for name, finding in findings]))
    else:
        _show(findings)
    return int(any(finding.level == "problem" for _, finding in findings))


def _show(findings: Sequence[tuple[str, Finding]]) -> None:
    for name, finding in findings:
        console.print(Text.assemble((f"{finding.level:8}", _STYLES[finding.level]), f"{name:14}{finding.says}"))
        if finding.level != "ok":
            console.print(f"{'':22}→ {finding.fix}", markup=False)


def _look(path: Path, url: str | None) -> Facts:
    file = known(lambda: _read(path))
    http, address = (HttpOptions(), HttpOptions().url) if isinstance(file, Unknown) else (file.http, file.address)
    found, ray = _nodes()
    return Facts(
        file=file if isinstance(file, Unknown) else known(lambda: _wants(file)),
        url=url or address,
        troubles=_troubles(url or address, http, asked_for=url is not None),
        ports=[known(lambda: _clients_port(http)), known(_ray_port)],
        nodes=found,
        ray=ray,
    )


def _read(path: Path) -> ClusterConfig:
    try:
        return read(path)
    except ConfigError as error:
        raise PliantError("; ".join(error.problems)) from None


def _wants(cluster: ClusterConfig) -> Wants:
    try:
        check_models(cluster.serving)
    except ConfigError as error:
        raise PliantError("; ".join(error.problems)) from None
    return doctor_facts.wants(cluster)


def _nodes() -> tuple[list[Node], bool | Unknown]:
    """Those of the Ray that runs here or is named; this machine, where none can be asked."""
    runs = known(lambda: bool(os.environ.get("RAY_ADDRESS")) or doctor_facts.ray_runs())
    if runs is not True:
        return [_here()], runs
    from pliant.deployments import nodes

    visits = known(lambda: nodes.visit(doctor_facts.machine))
    if isinstance(visits, Unknown):
        return [_here()], visits
    found = [
        Node(each.host, Unknown(each.reason))
        if isinstance(each, nodes.Unreached)
        else Node(each.host, each.found, each.guarded, each.clock_s, each.clock_within_s)
        for each in visits
    ]
    return found, True


def _here() -> Node:
    return Node("this machine", doctor_facts.machine())


def _troubles(url: str, http: HttpOptions, asked_for: bool) -> list[str] | Unknown | None:
    try:
        with top.client(url, http.trust(), _ANSWERS_S) as client:
            return troubles(top.ask(client, url))
    except PliantError as error:
        nobody = isinstance(error.__cause__, httpx.ConnectError)
        return None if nobody and not asked_for else Unknown(str(error))
    except Exception as error:
        return Unknown(f"{url}/stats: {error!r}")


def _clients_port(http: HttpOptions) -> Port:
    holder = doctor_facts.holder(http.port)
    fix = "stop it, or choose another port in http_options"
    return Port(http.port, "the cluster", holder, bool(holder) and serve_answers(http, _ANSWERS_S), fix)


def _ray_port() -> Port:
    holder = doctor_facts.holder(_RAY_PORT)
    fix = "stop it, or give `ray start --head` another --port; `pliant serve` needs none"
    return Port(_RAY_PORT, "`ray start --head`", holder, bool(holder) and _RAY_S_OWN in str(holder), fix)
