"""The `pliant` command."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from pliant import ray_settings, traces, zoo
from pliant.cli import exits as exits_cli
from pliant.cli import vision as vision_cli
from pliant.cli.serve import serve_cluster
from pliant.cli.terminal import console, progress
from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import ClusterConfig, check_models
from pliant.config.encoder import EncoderConfig
from pliant.config.vision import VisionConfig
from pliant.dashboards import files
from pliant.deployments.kinds import read
from pliant.errors import ConfigError, PliantError
from pliant.formats.profile import Profile
from pliant.models import sources

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Elastic transformer serving on Ray Serve.")
ClusterFile = Annotated[Path, typer.Argument(help="The cluster's configuration.")]
ConfigOption = Annotated[Path, typer.Option("--config", help="The cluster's configuration.")]


@app.command()
def check(path: ClusterFile = Path("cluster.yaml")) -> None:
    """Validate a cluster.yaml; say in one line each what is wrong with it."""
    cluster = _checked(path, by_serve=True)
    services = ", ".join(f"{name} ({service.kind})" for name, service in cluster.serving.services.items())
    console.print(f"{path}: fine; serves {services}")
    if problem := traces.problem():
        console.print(problem, markup=False)


@app.command()
def serve(
    path: ClusterFile = Path("cluster.yaml"),
    *,
    verbose: Annotated[bool, typer.Option(help="Show the log of Ray and the replicas here.")] = False,
) -> None:
    """Check, `serve run`, and show how far each service is; models are trained or downloaded as services need them."""
    raise typer.Exit(serve_cluster(path, _checked(path), verbose))


@app.command()
def profile(
    service: Annotated[str, typer.Argument(help="A service of the configuration.")],
    path: ConfigOption = Path("cluster.yaml"),
    out: Annotated[Path, typer.Option(help="Receives profile-SERVICE.json and .png.")] = Path(),
) -> None:
    """Measure a text classifier's latency over input lengths on this machine, and say which lengths to serve with; or
    latency, memory and accuracy of a vision service by gamma, and which gammas are of no use; or the accuracy and
    latency of a cascade's levels and of what they make together, and which of it would serve.
    """
    cluster = _checked(path)
    config = cluster.serving.services.get(service)
    if isinstance(config, VisionConfig):
        vision_cli.profile_vision(service, config, out)
        return
    if isinstance(config, CascadeConfig):
        from pliant.cli import cascade as cascade_cli

        cascade_cli.profile_cascade(service, cluster.serving, out)
        return
    if not isinstance(config, EncoderConfig):
        profiled = (EncoderConfig, CascadeConfig, VisionConfig)
        able = [name for name, each in cluster.serving.services.items() if isinstance(each, profiled)]
        raise ConfigError([f"{service}: cannot be profiled; these services can: {', '.join(able) or 'none'}"])
    from pliant.cli.profile_plot import plot
    from pliant.deployments.encoder.lengths import Lengths, measured_kind

    found = _measured(config)
    kind, reason = measured_kind(config, found) or ("static", "")
    lengths = Lengths(None, found, resident=kind != "static", longest=found.longest).current
    kinds = found.kinds
    table = Table("tokens", *(f"{found.name(kind)}, ms" for kind in kinds))
    for length in sorted({*lengths, *found.static_at}):
        times = [found.service_s(length, kind) * 1e3 for kind in kinds]
        table.add_row(str(length), *(f"{time:.2f}" for time in times))
    console.print(table)
    console.print(found.summary())
    console.print(reason)
    console.print(f"lengths: auto means {list(lengths)} for texts of all lengths alike.")
    out.mkdir(parents=True, exist_ok=True)
    (out / f"profile-{service}.json").write_text(found.model_dump_json(indent=1))
    plot(found, lengths, out / f"profile-{service}.png")
    console.print(f"Written to {out / f'profile-{service}'}.json and .png.")


@app.command()
def simulate(
    path: ClusterFile = Path("cluster.yaml"),
    *,
    trace: Annotated[list[str], typer.Option(help="FILE, or SERVICE=FILE; several without --gpus.")],
    gpus: Annotated[
        str | None, typer.Option(help="Replicas of one text classifier: 8, or 2-8 to let autoscaling decide.")
    ] = None,
    speeds: Annotated[Path | None, typer.Option(help="Without --gpus: how fast replicas of each service are.")] = None,
    nodes: Annotated[str | None, typer.Option(help="8x8gpu96cpu; by default budget.nodes of the file.")] = None,
    compare: Annotated[str, typer.Option(help="Policies, with commas between.")] = "joint",
    outage: Annotated[
        list[str] | None,
        typer.Option(help="2x8gpu96cpu@3600+600-120: such nodes go at 3600 s for 600 s, notice 120 s."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs; without --gpus.")] = False,
    service: Annotated[str | None, typer.Option(help="Which service, if there are several.")] = None,
    measured: Annotated[
        Path | None, typer.Option("--profile", help="What `pliant profile` wrote, on the machine to plan for.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Receives simulate-SERVICE.png, or simulate.png.")] = Path(),
) -> None:
    """Send a trace through a simulated cluster: latency, SLO attainment, and what planner and autoscaling would do; or,
    without --gpus, traces of several services through one budget, under several policies.
    """
    if gpus is None:
        from pliant.cli import simulate as simulate_cli

        serving = _checked(path, models=False).serving
        simulate_cli.compare(serving, trace, speeds, nodes, compare, outage or (), out, as_json)
        return
    if len(trace) != 1:
        raise ConfigError(["--trace: one file with --gpus; leave --gpus out to simulate several services"])
    from pliant.deployments.encoder.lengths import Lengths, measured_kind
    from pliant.simulation.encoder.capacity import Cluster, plan_capacity

    cluster = _checked(path)
    name, config_of = _encoder(cluster, service)
    found = _read_profile(measured) if measured else _measured(config_of)
    kind, _ = measured_kind(config_of, found) or ("static", "")
    lengths = Lengths(config_of.lengths, found, resident=kind != "static", longest=found.longest)
    if lengths.longest > found.longest:
        raise ConfigError([f"the profile ends at {found.longest} tokens; {name} serves up to {lengths.longest}"])
    least, most = _range(gpus)
    held = (lengths.longest,) if kind == "dynamic" else lengths.current
    forecast = plan_capacity(
        Cluster(
            service_s={length: found.service_s(length, kind) for length in held},
            slo_s=config_of.slo_ms / 1e3,
            least=least,
            most=most,
            period_s=config_of.period_s,
            quantile=config_of.demand_quantile,
            dynamic_s=[found.service_s(max(1, length), kind) for length in range(lengths.longest + 1)]
            if kind == "dynamic"
            else (),
            passes=found.passes if kind == "packed" else None,
            truncate=config_of.truncate,
        ),
        Path(trace[0]),
    )
    console.print(forecast.table())
    console.print(forecast.plan_table())
    out.mkdir(parents=True, exist_ok=True)
    forecast.plot().savefig(out / f"simulate-{name}.png", dpi=120, bbox_inches="tight")
    console.print(f"Written to {out / f'simulate-{name}.png'}.")


@app.command(name="zoo")
def zoo_models(train: Annotated[bool, typer.Option(help="Train what is missing.")] = False) -> None:
    """List the tiny models, adapters and tasks that the default cluster serves, and how good they are."""
    if train:
        with progress() as update:
            for name in (*zoo.NAMES, zoo.ADAPTERS, zoo.TASKS):
                zoo.ensure(name, update, niceness=0)
    table = Table("model, adapter or task", "quality", "parameters", "trained in")
    for entry in zoo.status():
        size = (f"{entry.parameters:,}", f"{entry.seconds:.0f} s") if entry.trained else ("", "")
        table.add_row(f"zoo/{entry.name}", _quality(entry), *size)
    console.print(table)
    console.print(
        "Measured on held-out data; tasks, and what prompts give them, on the profiling images in their folders."
    )


@app.command()
def kubernetes(
    path: ClusterFile = Path("cluster.yaml"),
    *,
    image: Annotated[str, typer.Option(help="Made from our Dockerfile, where the cluster can get it.")],
    name: Annotated[str, typer.Option(help="Of the service, and the address within Kubernetes.")] = "pliant",
    worker_cpus: Annotated[int, typer.Option(min=1, help="Of each worker.")] = 8,
    worker_gpus: Annotated[int, typer.Option(min=0, help="Of each worker.")] = 0,
    worker_memory_gb: Annotated[int, typer.Option(min=1, help="Of each worker.")] = 32,
    out: Annotated[Path, typer.Option(help="Receives the manifests.")] = Path("kubernetes"),
) -> None:
    """Write manifests for Kubernetes with KubeRay: what cluster.yaml serves, on as few workers as hold it."""
    from pliant import kubernetes

    shape = kubernetes.Shape(worker_cpus, worker_gpus, worker_memory_gb)
    given = kubernetes.Deployment(kubernetes.check_name(name), image, shape)
    cluster = _checked(path, models=False, by_serve=True)
    for file, content in kubernetes.manifests(path.read_text(), cluster, given).items():
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text(content)
    console.print(f"Written to {out}.")


@app.command()
def top(
    service: Annotated[str | None, typer.Argument(help="One of them, more closely.")] = None,
    *,
    url: Annotated[str, typer.Option(help="Where the cluster answers.")] = "http://127.0.0.1:8000",
) -> None:
    """Watch a running cluster in the terminal: services, their answers, replicas and events."""
    from pliant.cli.top import watch

    with contextlib.suppress(KeyboardInterrupt):
        watch(url.rstrip("/"), service)


@app.command()
def plan(url: Annotated[str, typer.Option(help="Where the cluster answers.")] = "http://127.0.0.1:8000") -> None:
    """Say how a running cluster shares its budget out now, why, and what one more replica of a service would earn."""
    from pliant.cli.plan import show

    show(url.rstrip("/"))


@app.command()
def doctor(
    path: ClusterFile = Path("cluster.yaml"),
    *,
    url: Annotated[str | None, typer.Option(help="Where a cluster answers, unless where the file says.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check this machine, the nodes of a running Ray and a running cluster, and say what to do about what is wrong."""
    from pliant.cli.doctor import diagnose

    raise typer.Exit(diagnose(path, url and url.rstrip("/"), as_json))


@app.command()
def drain(
    within_s: Annotated[float, typer.Option(min=1, help="When the machine goes away, in seconds.")] = 90,
) -> None:
    """Give away what this machine serves, because it is about to go: replicas start elsewhere, and those here end their
    work."""
    from pliant.deployments.drain import drain as drain_node

    if left := drain_node(within_s):
        raise PliantError(f"{left} replicas are still here after {within_s:g} s")
    console.print("No replica is left on this machine.")


@app.command()
def dashboards(folder: Annotated[Path, typer.Argument(help="Receives the files.")] = Path("dashboards")) -> None:
    """Write dashboards for Grafana, rules for Prometheus, and how both find the cluster."""
    files.write(folder)
    console.print(f"Written to {folder}.")


app.command()(exits_cli.train_exits)
app.command()(vision_cli.train_prompts)
app.command()(vision_cli.register_task)


def main() -> None:
    """Run the command; a PliantError is printed as its message alone. What it computes itself takes the time it would
    in a replica."""
    os.environ.setdefault("GOMP_SPINCOUNT", ray_settings.ENVIRONMENT["GOMP_SPINCOUNT"])
    try:
        app()
    except PliantError as error:
        console.print(str(error), style="red", markup=False)
        sys.exit(1)


def _checked(path: Path, *, models: bool = True, by_serve: bool = False) -> ClusterConfig:
    """What is in the file; whether its `models` are there is asked, too, as long as they are to be used here. What Ray
    Serve asks of the file, which takes a second to import, is left to Serve, unless it is to be known before it starts.
    """
    try:
        cluster = read(path)
        if models:
            check_models(cluster.serving)
        if by_serve:
            from pliant.deployments import serve_file

            serve_file.check(path)
    except ConfigError as error:
        for problem in error.problems:
            console.print(problem, style="red", markup=False)
        raise typer.Exit(1) from None
    return cluster


def _encoder(cluster: ClusterConfig, name: str | None) -> tuple[str, EncoderConfig]:
    """The encoder service `name`, or the first."""
    encoders = cluster.serving.of(EncoderConfig)
    chosen = name or next(iter(encoders), None)
    if chosen not in encoders:
        raise ConfigError([f"no encoder service {name or 'at all'}; there are: {', '.join(encoders) or 'none'}"])
    return chosen, encoders[chosen]


def _measured(service: EncoderConfig) -> Profile:
    from pliant.deployments.encoder.runtimes import profile

    with progress() as update:
        sources.fetch(service.model, progress=update)
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
        prompted = f" → {entry.prompted_accuracy:.1%} with prompts" if entry.prompted_accuracy else ""
        return f"accuracy {entry.accuracy:.1%}{prompted}"
    if entry.perplexity is None:
        return "not measured" if entry.trained else "not trained yet"
    base = f"{entry.base_perplexity:.0f} → " if entry.base_perplexity else ""
    return f"perplexity {base}{entry.perplexity:.1f}"


def _range(gpus: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)(?:-([1-9]\d*))?", gpus)
    if not match or (match[2] and int(match[2]) < int(match[1])):
        raise ConfigError([f"--gpus: got {gpus}; must be a number such as 8, or a range such as 2-8"])
    return int(match[1]), int(match[2] or match[1])
