"""How what replicas report becomes metrics: declared in tables, shown alike on Ray's pages and on the gateway's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Described(NamedTuple):
    """A metric. `name` is without the _total that Prometheus appends to what `counts` up."""

    counts: bool
    name: str
    description: str


Table = Mapping[str, Described]
"""By the key in the report."""
