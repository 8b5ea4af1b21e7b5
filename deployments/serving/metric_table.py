"""How what replicas report becomes metrics: declared in tables, shown alike on Ray's pages and on the gateway's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class Described(NamedTuple):
    """A metric. `name` is without the _total that Prometheus appends to what `counts` up."""

    counts: bool
    name: str
    description: str


Table = Mapping[str, Described]
"""By the key in the report."""

Rows = list[tuple[tuple[str, ...], Mapping[str, Any]]]
"""Labels, and what is reported under them."""


def replicas_of(views: Mapping[str, Any]) -> Rows:
    """The report of each replica of each service, labelled with both names."""
    return [
        ((service, replica), report) for service, view in views.items() for replica, report in view["replicas"].items()
    ]


def families(table: Table, rows: Rows, *more: str) -> Iterator[Metric]:
    """Each metric of `table`, of those that report it: a replica of another version may not. Its labels are service,
    replica and `more`."""
    for key, described in table.items():
        made = family(described, *more)
        for labels, values in rows:
            if key in values:
                made.add_metric(labels, values[key])
        yield made


def family(described: Described, *more: str) -> GaugeMetricFamily | CounterMetricFamily:
    """One without values yet. Its labels are service, replica and `more`."""
    kind = CounterMetricFamily if described.counts else GaugeMetricFamily
    return kind(described.name, described.description, labels=("service", "replica", *more))
