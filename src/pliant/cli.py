"""The `pliant` command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import httpx
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pliant import config, models, ray_settings, zoo
from pliant.errors import ConfigError, PliantError
from pliant.profile import Profile

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Elastic transformer serving on Ray Serve.")
_console = Console(soft_wrap=True, highlight=False)
_READY_WITHIN_S = 900
_TEXT = "The yield expression is used when defining a generator function"
_PROMPT = "The for statement is used to"

ClusterFile = Annotated[Path, typer.Argument(help="The cluster's configuration.")]
ConfigOption = Annotated[Path, typer.Option("--config", help="The cluster's configuration.")]


@app.command()
def check(path: ClusterFile = Path("cluster.yaml")) -> None:
    """Validate a cluster.yaml; say in one line each what is wrong with it."""
    cluster = _checked(path)
    services = ", ".join(f"{name} ({service.kind})" for name, service in cluster.serving.services.items())
    _console.print(f"{path}: fine; serves {services}")


@app.command()
def serve(path: ClusterFile = Path("cluster.yaml")) -> None:
    """Check, train what the zoo still lacks, `serve run`, and say when the first request may come."""
    cluster = _checked(path)
    for service in cluster.serving.services.values():
        _fetch(service.model)
    for llm in cluster.serving.llms.values():
        if llm.adapters and llm.adapters.folder:
            _fetch_adapters(llm.adapters.folder)
    _console.print("Starting the cluster; a first start also compiles each runtime, which takes about a minute.")
    process = _serve_run(path)
    if _ready(cluster.address, process):
        _console.print(_greeting(cluster))
    elif process.poll() is None:
        _console.print(f"[red]not ready after {_READY_WITHIN_S} s; the log above, or `serve status`, says why[/red]")
    raise typer.Exit(process.wait())


@app.command()
def profile(
    service: Annotated[str, typer.Argument(help="A service of the configuration.")],
    path: ConfigOption = Path("cluster.yaml"),
    out: Annotated[Path, typer.Option(help="Receives profile-SERVICE.json and .png.")] = Path(),
) -> None:
    """Measure latency over input lengths on this machine, and say which lengths to serve with."""
    from pliant.deployments.encoder.lengths import Lengths
    from pliant.profile_plot import plot

    found = _measured(_encoder(_checked(path), service)[1])
    lengths = Lengths(None, found).current
    table = Table("tokens", "dynamic, ms", "static, ms")
    for length in sorted({*lengths, *found.static_at}):
        times = [found.service_s(length, dynamic=dynamic) * 1e3 for dynamic in (True, False)]
        table.add_row(str(length), *(f"{time:.2f}" for time in times))
    _console.print(table)
    _console.print(found.summary())
    _console.print(f"lengths: auto means {list(lengths)} for texts of all lengths alike.")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"profile-{service}.json").write_text(found.model_dump_json(indent=1))
    plot(found, lengths, out / f"profile-{service}.png")
    _console.print(f"Written to {out / f'profile-{service}'}.json and .png.")


@app.command()
def simulate(
    path: ClusterFile = Path("cluster.yaml"),
    *,
    trace: Annotated[Path, typer.Option(help="CSV: seconds,tokens of requests, or second,requests of seconds.")],
    gpus: Annotated[str, typer.Option(help="Replicas: 8, or 2-8 to let autoscaling decide.")],
    service: Annotated[str | None, typer.Option(help="Which service, if there are several.")] = None,
    measured: Annotated[
        Path | None, typer.Option("--profile", help="What `pliant profile` wrote, on the machine to plan for.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Receives simulate-SERVICE.png.")] = Path(),
) -> None:
    """Send a trace through a simulated cluster: latency, SLO attainment, and what planner and autoscaling would do."""
    from pliant.bench.capacity import Cluster, plan_capacity
    from pliant.deployments.encoder.lengths import Lengths

    cluster = _checked(path)
    name, config_of = _encoder(cluster, service)
    found = _read_profile(measured) if measured else _measured(config_of)
    lengths = Lengths(config_of.lengths, found)
    if lengths.longest > found.longest:
        raise ConfigError([f"the profile ends at {found.longest} tokens; {name} serves up to {lengths.longest}"])
    least, most = _range(gpus)
    forecast = plan_capacity(
        Cluster(
            service_s={length: found.service_s(length, dynamic=lengths.dynamic) for length in lengths.current},
            slo_s=config_of.slo_ms / 1e3,
            least=least,
            most=most,
            period_s=config_of.period_s,
            quantile=config_of.demand_quantile,
            dynamic_s=[found.service_s(max(1, length), dynamic=True) for length in range(lengths.longest + 1)]
            if lengths.dynamic
            else (),
            truncate=config_of.truncate,
        ),
        trace,
    )
    _console.print(forecast.table())
    _console.print(forecast.plan_table())
    out.mkdir(parents=True, exist_ok=True)
    forecast.plot().savefig(out / f"simulate-{name}.png", dpi=120, bbox_inches="tight")
    _console.print(f"Written to {out / f'simulate-{name}.png'}.")


@app.command(name="zoo")
def zoo_models(train: Annotated[bool, typer.Option(help="Train what is missing.")] = False) -> None:
    """List the tiny models and adapters that the default cluster serves, and how good they are."""
    if train:
        for name in zoo.NAMES:
            _fetch(f"zoo/{name}")
        _fetch_adapters(f"zoo/{zoo.ADAPTERS}")
    table = Table("model or adapter", "on held-out texts", "parameters", "trained in")
    for entry in zoo.status():
        size = (f"{entry.parameters:,}", f"{entry.seconds:.0f} s") if entry.trained else ("", "")
        table.add_row(f"zoo/{entry.name}", _quality(entry), *size)
    _console.print(table)


def main() -> None:
    """Run the command; a PliantError is printed as its message alone."""
    try:
        app()
    except PliantError as error:
        _console.print(f"[red]{error}[/red]")
        sys.exit(1)


def _checked(path: Path) -> config.ClusterConfig:
    try:
        cluster = config.read(path)
        config.check_models(cluster.serving)
    except ConfigError as error:
        for problem in error.problems:
            _console.print(problem, style="red", markup=False)
        raise typer.Exit(1) from None
    return cluster


def _encoder(cluster: config.ClusterConfig, name: str | None) -> tuple[str, config.EncoderConfig]:
    """The encoder service `name`, or the first."""
    encoders = cluster.serving.encoders
    chosen = name or next(iter(encoders), None)
    if chosen not in encoders:
        raise ConfigError([f"no encoder service {name or 'at all'}; there are: {', '.join(encoders) or 'none'}"])
    return chosen, encoders[chosen]


def _measured(service: config.EncoderConfig) -> Profile:
    from pliant.deployments.encoder.runtimes import profile

    _fetch(service.model)
    with _progress() as update:
        return profile(service, update)


def _read_profile(path: Path) -> Profile:
    try:
        return Profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except ValueError:
        raise ConfigError([f"{path}: is no profile; `pliant profile SERVICE` writes one"]) from None


def _quality(entry: zoo.ZooEntry) -> str:
    if entry.accuracy is not None:
        return f"accuracy {entry.accuracy:.1%}"
    if entry.perplexity is None:
        return "not trained yet"
    base = f"{entry.base_perplexity:.0f} → " if entry.base_perplexity else ""
    return f"perplexity {base}{entry.perplexity:.1f}"


def _range(gpus: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", gpus)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise ConfigError([f"--gpus: got {gpus}; must be a number such as 8, or a range such as 2-8"])
    return int(match[1]), int(match[2] or match[1])


def _fetch(model: str) -> None:
    with _progress() as update:
        models.fetch(model, progress=update)


def _fetch_adapters(folder: str) -> None:
    with _progress() as update:
        models.fetch_adapters(folder, update)


@contextmanager
def _progress() -> Iterator[models.Progress]:
    """A bar that is shown once something says how far it is."""
    with Progress(console=_console, transient=True, disable=not _console.is_terminal) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda text, done: progress.update(task, description=text, completed=done)


def _serve_run(path: Path) -> subprocess.Popen[bytes]:
    """`serve run` in a session of its own, so that it gets one interrupt, on which it drains, and no other signal."""
    process: subprocess.Popen[bytes] | None = None

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        if process is not None:
            process.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    command = [sys.executable, "-m", "pliant.deployments.run", str(path)]
    process = subprocess.Popen(command, env={**ray_settings.ENVIRONMENT, **os.environ}, start_new_session=True)
    return process


def _ready(address: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _READY_WITHIN_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{address}/v2/health/ready", timeout=5).status_code == 200:
                return True
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    return False


def _greeting(cluster: config.ClusterConfig) -> str:
    key = " -H 'Authorization: Bearer KEY'" if cluster.serving.gateway.api_keys_env else ""
    examples = [
        *((f"models/{name}", {"inputs": _TEXT, "parameters": {"top_k": 2}}) for name in cluster.serving.encoders),
        *(("v1/completions", {"model": name, "prompt": _PROMPT, "max_tokens": 40}) for name in cluster.serving.llms),
    ]
    calls = "\n".join(f"curl -s {cluster.address}/{path}{key} -d '{json.dumps(body)}'" for path, body in examples)
    return (
        f"\n[bold]Ready at {cluster.address}[/bold] (API: {cluster.address}/docs, replicas: {cluster.address}/stats). "
        f"Try:\n\n{calls}\n"
    )
