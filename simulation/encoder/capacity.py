"""Capacity planning for operators, what `pliant simulate` runs: a trace through the cluster before it is paid for.

The dispatcher, admission control, planner and autoscaling are those of the live system; only time is simulated.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Plot
from rich.progress import track
from rich.table import Table

from pliant.errors import PliantError
from pliant.formats.pass_times import PassTimes
from pliant.policies.cluster.autoscaling import TargetTracking
from pliant.policies.encoder.dispatch import Dispatcher
from pliant.policies.encoder.planning import Plan, Planner, Residency, even_plan
from pliant.simulation.arrivals import LONGEST, Floats, Recorded, Stream, tweet_lengths
from pliant.simulation.encoder.batched import BatchedSimulation, packed_simulation
from pliant.simulation.encoder.control import Planned, Scaled
from pliant.simulation.encoder.fleet import Fleet, static_fleet
from pliant.simulation.encoder.outcome import Outcome, plot_allocation
from pliant.simulation.encoder.simulator import Controller, Service, Simulation

_EACH_REQUEST = "seconds,tokens"
_EACH_SECOND = "second,requests"
_LONGEST_TRACE_S = 31 * 86_400
_MOST = 10_000_000
"""Tokens of a request, or requests of a second."""
_MOST_PLANS = 20


class TraceError(PliantError):
    """A trace that cannot be read, in one line."""


@dataclass(frozen=True)
class Cluster:
    """The service as cluster.yaml and the latency profile describe it, and the replicas that it may have."""

    service_s: Mapping[int, float]
    """Static runtimes: max_length in tokens, rising -> seconds that a request takes."""
    slo_s: float
    least: int
    """Replicas at the start; autoscaling goes from here to `most`, and is off when both are the same."""
    most: int
    period_s: float = 120.0
    quantile: float | None = None
    dynamic_s: Sequence[float] = ()
    """Seconds by length from 0, for a dynamic runtime in place of the static ones; the only key of `service_s` is its
    max_length."""
    passes: PassTimes | None = None
    """What passes take, for a packed runtime in place of the static ones; `service_s` has the lengths to be at home
    at."""
    truncate: bool = False
    """Cut texts that are too long; else they are refused, and take no part."""

    @property
    def longest(self) -> int:
        return max(self.service_s)


@dataclass(frozen=True)
class Trace:
    """Requests to simulate."""

    stream: Recorded | Stream
    too_long: int
    """Requests that were left out, because they are longer than any runtime."""
    made_up_lengths: bool


@dataclass(frozen=True)
class Forecast:
    """What would happen."""

    cluster: Cluster
    trace: Trace
    outcome: Outcome
    plans: list[tuple[float, Plan]]
    """When the planner decided what, in seconds from the start of the trace."""

    def table(self) -> Table:
        """The figures, for people."""
        outcome, slo_ms = self.outcome, self.cluster.slo_s * 1e3
        table = Table("", "", title="Forecast", show_header=False)
        quantiles = (outcome.latencies.quantile(share) * 1e3 for share in (0.5, 0.98))
        table.add_row("requests", f"{outcome.requests:,} in {outcome.seconds / 60:.1f} minutes")
        if self.trace.too_long:
            table.add_row("", f"{self.trace.too_long:,} more are over {self.cluster.longest} tokens and are refused")
        if self.trace.made_up_lengths:
            table.add_row("lengths", "not in the trace; made up, as tweets have them")
        table.add_row("latency P50, P98", ", ".join(f"{milliseconds:,.1f} ms" for milliseconds in quantiles))
        table.add_row("answered within the SLO", f"{outcome.attainment:.2%} (SLO {slo_ms:,.0f} ms)")
        table.add_row("shed", f"{outcome.shed:,} ({outcome.shed / max(1, outcome.requests):.2%})")
        table.add_row("utilisation", f"{outcome.utilisation:.0%}")
        running = outcome.running
        table.add_row("GPUs", f"{outcome.gpus:.2f} on average, {min(running)} to {max(running)}")
        return table

    def plan_table(self) -> Table:
        """When the planner would decide what: the plans that change something, at most the last 20."""
        table = Table("minute", "because of", *map(str, self.cluster.service_s), title="Replicas by max_length")
        previous: dict[int, int] = {}
        rows = []
        for now, plan in self.plans:
            if plan.counts != previous:
                rows.append((f"{now / 60:.1f}", plan.reason, *map(str, plan.counts.values())))
            previous = plan.counts
        for row in rows[-_MOST_PLANS:]:
            table.add_row(*row)
        return table

    def plot(self) -> Plot:
        """Requests, misses, and replicas by length, over time."""
        plot, (load, missed, replicas) = plt.subplots(3, 1, figsize=(9, 8), sharex=True)
        minutes = np.arange(self.outcome.seconds) / 60
        load.plot(minutes, self.outcome.arrived, linewidth=0.8)
        load.set(ylabel="requests/s", ylim=(0, None))
        missed.plot(minutes, self.outcome.missed, linewidth=0.8, color="tab:red")
        missed.set(ylabel="late or shed, per second", ylim=(0, None))
        plot_allocation(replicas, self.outcome)
        return plot


def plan_capacity(cluster: Cluster, path: Path) -> Forecast:
    """Run the trace at `path` through `cluster`. Raises TraceError when the trace cannot be read.

    A trace is CSV, with the header `seconds,tokens` and a row for each request, or `second,requests` and a row for each
    second; then arrivals within a second are random, and so are lengths.
    """
    trace = read_trace(path, cluster.longest, truncate=cluster.truncate)
    lengths = tuple(cluster.service_s)
    residency = Residency(dict.fromkeys(lengths, 0.0), 0.0) if cluster.passes else None
    planner = Planner(cluster.longest, cluster.slo_s, cluster.period_s, cluster.quantile, residency)
    planned = Planned(planner, lengths)
    controllers: list[Controller] = [planned]
    if cluster.least < cluster.most:
        controllers.append(Scaled(TargetTracking(cluster.least, cluster.most), cluster.longest))
    service = Service(cluster.slo_s, admission=True)
    homes = even_plan(lengths, cluster.least)
    simulation: Simulation | BatchedSimulation
    if cluster.passes:
        simulation = packed_simulation(cluster.passes, homes, cluster.longest, service, controllers)
    else:
        simulation = Simulation(_fleet(cluster, homes, trace), service, controllers)
    outcome = simulation.run(track(trace.stream, "simulate", total=len(trace.stream), transient=True))
    return Forecast(cluster, trace, outcome, planned.plans)


def _fleet(cluster: Cluster, held: Sequence[int], trace: Trace) -> Fleet:
    if not cluster.dynamic_s:
        return static_fleet(cluster.slo_s, held, cluster.service_s)
    stream = trace.stream
    tokens = stream.tokens if isinstance(stream, Recorded) else stream.lengths
    expected_s = float(np.asarray(cluster.dynamic_s)[tokens].mean())
    return Fleet(Dispatcher(cluster.slo_s), held, lambda _: cluster.dynamic_s, expected_s)


def read_trace(path: Path, longest: int, *, truncate: bool) -> Trace:
    """Read a trace for runtimes of up to `longest` tokens. Raises TraceError, saying what is allowed."""
    try:
        with path.open() as file:
            header = ",".join(column.strip().lower() for column in file.readline().split(","))
            if header not in (_EACH_REQUEST, _EACH_SECOND):
                raise TraceError(
                    f"{path}: the first line is {header!r}; allowed: {_EACH_REQUEST!r}, a row for each request, "
                    f"or {_EACH_SECOND!r}, a row for each second"
                )
            with warnings.catch_warnings(action="ignore"):
                rows = np.loadtxt(file, delimiter=",", ndmin=2)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: is not UTF-8: {error}") from None
    except ValueError as error:
        raise TraceError(f"{path}: below the header, {error}") from None
    times, numbers = _columns(path, header, rows)
    if header == _EACH_SECOND:
        rates = np.zeros(int(times[-1]) + 1)
        np.add.at(rates, times.astype(np.int64), numbers)
        lengths = np.ceil(tweet_lengths() * (longest / LONGEST)).astype(np.int64)
        return Trace(Stream(rates, lengths, np.ones(len(rates)), bursty=False, seed=0), 0, made_up_lengths=True)
    tokens = numbers.astype(np.int64)
    fits = tokens <= longest
    if truncate:
        return Trace(Recorded(times, np.minimum(tokens, longest)), 0, made_up_lengths=False)
    if not fits.any():
        raise TraceError(f"{path}: every request is longer than {longest} tokens, the longest that is served")
    return Trace(Recorded(times[fits], tokens[fits]), int((~fits).sum()), made_up_lengths=False)


def _columns(path: Path, header: str, rows: Floats) -> tuple[Floats, Floats]:
    """Both columns, in order of time from second 0 on."""
    if not len(rows) or rows.shape[1] != 2:
        raise TraceError(f"{path}: needs rows of two numbers below the header {header!r}")
    least = 1 if header == _EACH_REQUEST else 0
    name = header.split(",")[1]
    wrong = ~np.isfinite(rows).all(axis=1) | (rows[:, 1] < least) | (rows[:, 1] > _MOST) | (rows[:, 1] % 1 != 0)
    if wrong.any():
        row = int(np.argmax(wrong))
        given = ",".join(f"{value:g}" for value in rows[row])
        raise TraceError(f"{path}: row {row + 1} is {given}; {name} must be a whole number from {least} to {_MOST:,}")
    if header == _EACH_SECOND and not rows[:, 1].any():
        raise TraceError(f"{path}: holds no request")
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    times = rows[:, 0] - np.floor(rows[0, 0])
    if times[-1] >= _LONGEST_TRACE_S:
        days = times[-1] / 86_400
        raise TraceError(f"{path}: spans {days:,.0f} days; allowed are 31: is the first column in seconds?")
    return times, rows[:, 1]
