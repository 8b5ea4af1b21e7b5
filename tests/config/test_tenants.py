"""Tenants in cluster.yaml: what may be said of one, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from pliant.config.tenants import SloBounds
from pliant.deployments.kinds import parse
from pliant.errors import ConfigError

SERVICES = {"topics": {"kind": "encoder", "model": "zoo/topics-small", "lengths": [32, 64], "replicas": 2}}
KEYS = {"keys_env": "KEYS"}


def test_a_tenant_may_infer_and_no_more_unless_it_is_said() -> None:
    [tenant] = parse({"services": SERVICES, "gateway": KEYS, "tenants": {"a": {}}}).tenants.values()
    assert tenant.rights == ("infer",)
    assert (tenant.services, tenant.weight, tenant.requests_per_minute) == (None, 1, None)
    assert parse({"services": SERVICES}).tenants == {}


@pytest.mark.parametrize(
    ("tenants", "gateway", "line"),
    [
        ({"a": {"rights": ["all"]}}, KEYS, "tenants.a.rights.0: got 'all'"),
        ({"a": {"weight": 0}}, KEYS, "tenants.a.weight: got 0"),
        ({"a": {"requests_per_minute": -1}}, KEYS, "tenants.a.requests_per_minute: got -1"),
        ({"a": {"slo_ms": {"min": 9, "max": 3}}}, KEYS, "max must be at least min, 9"),
        ({"a": {"services": ["topic"]}}, KEYS, "tenants.a.services: got topic; there are: topics"),
        ({"a": {"wait": 1}}, KEYS, "tenants.a.wait: unknown key"),
        ({"a": {}}, {}, "tenants.a: there are no keys of it"),
        ({"default": {}}, {}, "tenants.default: there are no keys of it"),
    ],
)
def test_mistakes(tenants: dict[str, Any], gateway: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse({"services": SERVICES, "gateway": gateway, "tenants": tenants})
    assert line in str(told.value)


def test_those_who_need_no_named_keys() -> None:
    gateway = {"api_keys_env": "KEYS"}
    assert parse({"services": SERVICES, "gateway": gateway, "tenants": {"default": {}, "anonymous": {}}}).tenants


@pytest.mark.parametrize(("wanted", "given"), [(1, 10), (50, 50), (10_000, 100)])
def test_clamps(wanted: float, given: float) -> None:
    assert SloBounds(min=10, max=100).clamp(wanted) == given
    assert SloBounds().clamp(wanted) == wanted
    assert SloBounds(min=10).clamp(wanted) == max(wanted, 10)
    assert SloBounds(max=100).clamp(wanted) == min(wanted, 100)
