"""Who asks for how much."""

from __future__ import annotations

from pliant.dashboards.boards.promql import OVER, REQUESTS
from pliant.dashboards.grafana import Dashboard, Panel, Query, Row

_TENANT_REQUESTS = "ray_pliant_tenant_requests_total"


def _by_tenant(metric: str, *more: str, where: str = "") -> str:
    return f"sum by ({', '.join(('tenant', *more))}) (rate({metric}{where}{OVER}))"


TENANTS = Dashboard(
    "tenants",
    "pliant: tenants",
    REQUESTS,
    (
        Row(
            "Tenants",
            (
                Panel(
                    "Requests",
                    (Query(_by_tenant(_TENANT_REQUESTS), "{{tenant}}"),),
                    "Over HTTP.",
                    "reqps",
                    width=12,
                ),
                Panel(
                    "Tokens",
                    (Query(_by_tenant("ray_pliant_tenant_tokens_total"), "{{tenant}}"),),
                    "Of texts, prompts and answers, a second.",
                    width=12,
                ),
                Panel(
                    "Refused",
                    (
                        Query(
                            _by_tenant(_TENANT_REQUESTS, "status", where='{status=~"4..|5.."}'),
                            "{{tenant}} {{status}}",
                        ),
                    ),
                    "429: a limit of the tenant's, or too little room for all.",
                    "reqps",
                    width=24,
                ),
            ),
        ),
    ),
)
