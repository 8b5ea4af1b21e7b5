"""`pliant serve`: check, start, show how far each service is, and stop without losing an answer."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pliant import haproxy, ray_settings, zoo
from pliant.cache import cache_folder
from pliant.cli.serve_events import Row, Snapshot, Story, rows
from pliant.cli.terminal import console
from pliant.config.cluster import ClusterConfig, ServingConfig
from pliant.config.http import HttpOptions
from pliant.dashboards.files import boards
from pliant.errors import ConfigError

_EVERY_S = 0.5
_READY_EVERY_S = 2.0
"""Between looks at a cluster in which all are ready, so that an idle one stays so."""
_LOGS_KEPT = 10


def serve_cluster(path: Path, cluster: ClusterConfig, verbose: bool) -> int:
    """Serve `cluster`, whose file is `path`, until it is interrupted; its exit status. Raises ConfigError."""
    _check_port(cluster)
    log = _log_file()
    console.print(f"Starting {path} at {cluster.address}; the log of Ray and the replicas is {log}")
    _warn_of_few_cpus(cluster)
    started = time.monotonic()
    _train_ahead(cluster.serving)
    write_boards()
    process = _Process(path, cluster.http, None if verbose else log)
    kinds = {name: service.kind for name, service in cluster.serving.services.items()}
    story, watch = Story(_examples(cluster)), _Watch(cluster, process, started)
    due = 0.0
    with _Screen() as screen:
        while process.runs and not process.stopping:
            if time.monotonic() >= due:
                snapshot = watch.look()
                for event in story.events(snapshot, kinds):
                    screen.report(event, snapshot.at_s)
                screen.show(now := rows(snapshot, kinds), snapshot)
                due = time.monotonic() + (_READY_EVERY_S if all(row.ready for row in now) else 0.0)
            time.sleep(_EVERY_S)
    while process.runs:
        _report_stopping(process)
        time.sleep(_EVERY_S)
    return _ended(process, log, verbose)


def _warn_of_few_cpus(cluster: ClusterConfig) -> None:
    """Where a gateway finds none left, nobody answers. A Ray that runs already may have other machines."""
    from pliant.cli.doctor_checks import few_cpus
    from pliant.cli.doctor_facts import ray_runs, reserved

    finding = few_cpus(reserved(cluster)[0], os.cpu_count() or 1, alone=True)
    if finding.level != "ok" and not ray_runs():
        console.print(f"{finding.says[0].upper()}{finding.says[1:]}; {finding.fix}", markup=False)


def _train_ahead(serving: ServingConfig) -> None:
    """Begin to train what the zoo lacks while Ray starts; replicas on this machine wait for it."""
    named = [name for service in serving.services.values() for name in service.fetched()]
    zoo.train_ahead({name.removeprefix("zoo/") for name in named if name.startswith("zoo/")})


def write_boards() -> None:
    """Write our dashboards where the operator has Ray write its own."""
    if given := os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"):
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in boards():
            (folder / name).write_text(content)


def _report_stopping(process: _Process) -> None:
    """Say which replicas are waited for, whenever there are others."""
    left = {name: sum(each["replicas"].values()) for name, each in process.deployments.items()}
    waiting = ", ".join(f"{name} {number}" for name, number in left.items() if number)
    text = f"Stopping; replicas that end what they have accepted: {waiting or 'none'} (Ctrl-C again: at once)"
    if text != process.shown:
        process.shown = text
        console.print(text, markup=False)


def _check_port(cluster: ClusterConfig) -> None:
    """Raise ConfigError if the port is taken, unless by a Serve to which the file is to be deployed."""
    family = socket.AF_INET6 if ":" in cluster.http.host else socket.AF_INET
    try:
        with socket.create_server((cluster.http.host, cluster.http.port), family=family):
            return
    except OSError as error:
        reason = os.strerror(error.errno or 0)
    if serve_answers(cluster.http):
        return
    raise ConfigError(
        [
            f"http_options: {cluster.http.host}:{cluster.http.port} cannot be listened on: {reason}; stop what uses "
            "it, or choose another port"
        ]
    )


def serve_answers(http: HttpOptions, within_s: float = 2.0) -> bool:
    """Whether Serve listens there, and answers within that many seconds."""
    try:
        return httpx.get(f"{http.url}/-/healthz", timeout=within_s, verify=http.trust()).text == "success"
    except httpx.HTTPError:
        return False


def edge(http: HttpOptions) -> dict[str, str]:
    """What has Ray put HAProxy in front of gateways, where it can. Raises ConfigError where it must and cannot."""
    if os.environ.get(haproxy.SWITCH) != "0" and http.ssl_keyfile_password is None:  # of which HAProxy knows none
        tls = None
        if http.ssl_certfile and http.ssl_keyfile:
            authorities = os.path.abspath(http.ssl_ca_certs) if http.ssl_ca_certs else None
            tls = haproxy.Tls(os.path.abspath(http.ssl_certfile), os.path.abspath(http.ssl_keyfile), authorities)
        if found := haproxy.environment(tls):
            return found
    if http.ssl_ca_certs:
        raise ConfigError(["http_options.ssl_ca_certs: only HAProxy asks clients for certificates; " + haproxy.MISSING])
    return {}


def _log_file() -> Path:
    """A new one; old ones are removed."""
    folder = cache_folder() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in sorted(folder.glob("serve-*.log"))[: -_LOGS_KEPT + 1]:
        old.unlink(missing_ok=True)
    return folder / f"serve-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}.log"


class _Process:
    """`serve run` in a session of its own, so that it gets one interrupt, on which it drains, and no other signal."""

    def __init__(self, path: Path, http: HttpOptions, log: Path | None) -> None:
        self.stopping = False
        self.deployments: Mapping[str, Any] = {}
        """What Serve last said of them."""
        self.problems: list[str] = []
        """What it said of the whole application."""
        self.shown = ""
        """What was last said of its end."""
        self._child: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        read, write = os.pipe()
        output = log.open("wb") if log else None
        self._child = subprocess.Popen(
            [sys.executable, "-m", "pliant.deployments.run", str(path)],
            env={**ray_settings.ENVIRONMENT, **edge(http), **os.environ, "PLIANT_STATUS_FD": str(write)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=[write],
            start_new_session=True,
        )
        os.close(write)
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()

    @property
    def runs(self) -> bool:
        assert self._child
        return self._child.poll() is None

    @property
    def status(self) -> int:
        """With which it ended."""
        assert self._child
        return self._child.wait()

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self._child is not None:
            self._child.send_signal(signal.SIGINT)
        self.stopping = True

    def _listen(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as lines:
            for line in lines:
                found = json.loads(line)
                self.deployments, self.problems = found["deployments"], found["problems"]


class _Watch:
    """Looks at the cluster."""

    def __init__(self, cluster: ClusterConfig, process: _Process, started: float) -> None:
        self._address = cluster.address
        self._process = process
        self._started = started
        keys = os.environ.get(cluster.serving.gateway.api_keys_env or "", "")
        key = os.environ.get("PLIANT_API_KEY") or keys.split(",")[0].strip()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=5, verify=cluster.http.trust())

    def look(self) -> Snapshot:
        stats: Mapping[str, Any] = {}
        refused = False
        try:
            response = self._http.get(f"{self._address}/stats")
            refused = response.status_code in (401, 403)
            stats = response.json() if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            pass
        at_s = time.monotonic() - self._started
        return Snapshot(at_s, self._phase(refused), stats, refused, self._process.deployments)

    def _phase(self, refused: bool) -> str:
        if self._process.problems:
            return self._process.problems[0].strip().splitlines()[-1]
        if refused:
            return "the gateway answers; to see more, set PLIANT_API_KEY to the key of a tenant that may observe"
        return "waiting for the gateway" if self._process.deployments else "starting Ray"


class _Screen:
    """A live table below the events; on a pipe lines of what changed."""

    def __init__(self) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None
        self._shown: dict[str, str] = {}
        self._since: dict[tuple[str, str], tuple[float, float]] = {}

    def __enter__(self) -> _Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def report(self, event: str, at_s: float) -> None:
        console.print(f"{at_s:7.1f} s  {event}", markup=False)

    def show(self, now: list[Row], snapshot: Snapshot) -> None:
        if self._live:
            self._live.update(self._table(now, snapshot.at_s))
        elif not snapshot.stats:
            self._report_once("", snapshot.phase, snapshot.phase, snapshot.at_s)
        else:
            for row in now:
                if not row.ready:
                    self._report_once(row.name, _without_share(row), f"{row.name}: {row.state}", snapshot.at_s)

    def _report_once(self, about: str, state: str, line: str, at_s: float) -> None:
        if self._shown.get(about) != state:
            self._shown[about] = state
            self.report(line, at_s)

    def _table(self, now: list[Row], at_s: float) -> Group:
        table = Table("service", "kind", "state", "", box=None, pad_edge=False)
        for row in now:
            style = "green" if row.ready else "red" if row.state.startswith("failed") else "yellow"
            bar = ProgressBar(1.0, row.done, width=20) if row.done else Text("")
            left = self._left(row, at_s)
            table.add_row(row.name, row.kind, Text(row.state + left, style=style), bar)
        return Group(Text(""), table)

    def _left(self, row: Row, at_s: float) -> str:
        """About how long it will take, from how far it came since it was first seen."""
        if not row.done:
            return ""
        begun_s, done = self._since.setdefault((row.name, _without_share(row)), (at_s, row.done))
        if row.done - done < 0.05:
            return ""
        return f", {(at_s - begun_s) / (row.done - done) * (1 - row.done):.0f} s left"


def _without_share(row: Row) -> str:
    """What a service does, without how far it is."""
    return re.sub(r",? \d+%", "", row.state)


def _ended(process: _Process, log: Path, verbose: bool) -> int:
    if process.stopping:
        console.print("Stopped.")
    elif process.status:
        lines = [] if verbose else log.read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit status {process.status}"
        console.print(f"Ray Serve ended: {reason}; see {log}", style="red", markup=False)
    return process.status


def _examples(cluster: ClusterConfig) -> dict[str, str]:
    """By service, a line with which to try it."""
    key = " -H 'Authorization: Bearer KEY'" if cluster.serving.gateway.asks_for_keys else ""
    trusted = f" --cacert {cluster.http.ssl_certfile}" if cluster.http.ssl_certfile else ""
    examples = {name: service.example(name) for name, service in cluster.serving.services.items()}
    return {
        name: f"curl -s{trusted} {cluster.address}/{path}{key} -d '{json.dumps(body)}'"
        for name, (path, body) in examples.items()
    }
