"""What dashboards ask of Prometheus, in its language.

Names with `ray_` are counted by gateways and replicas and read from Ray's pages, the others from a gateway's /metrics.
"""

from __future__ import annotations

SERVICE = 'service=~"$service"'
OVER = "[$__rate_interval]"
ANSWERED = 'outcome=~"ok|degraded"'
REQUESTS = "ray_pliant_requests_total"


def rate(metric: str, *by: str, where: str = "") -> str:
    """How fast a counter grows, summed up by labels."""
    chosen = ", ".join(filter(None, (SERVICE, where)))
    return f"sum by ({', '.join(by or ('service',))}) (rate({metric}{{{chosen}}}{OVER}))"


def total(metric: str, *by: str) -> str:
    return f"sum by ({', '.join(by or ('service',))}) ({metric}{{{SERVICE}}})"


def quantile(q: float, metric: str, *by: str) -> str:
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', 'le', *(by or ('service',)))})"


def share(part: str, whole: str) -> str:
    """0 where the part was never counted."""
    return f"({part} or 0 * {whole}) / {whole}"
