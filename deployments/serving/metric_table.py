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
    """Each metric of `table`, of replicas. Its labels are service, replica and `more`."""
    return labelled(table, rows, "service", "replica", *more)


def labelled(table: Table, rows: Rows, *labels: str) -> Iterator[Metric]:
    """Each metric of `table`, with the values of those rows that have one: a replica of another version may not."""
    for key, described in table.items():
        made = _family(described, *labels)
        for values_of_labels, values in rows:
            if key in values:
                made.add_metric(values_of_labels, values[key])
        yield made


def family(described: Described, *more: str) -> GaugeMetricFamily | CounterMetricFamily:
    """One without values yet. Its labels are service, replica and `more`."""
    return _family(described, "service", "replica", *more)


def _family(described: Described, *labels: str) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if described.counts else GaugeMetricFamily
    return kind(described.name, described.description, labels=labels)
