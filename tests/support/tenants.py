"""Tenants of a gateway in a test."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.config.tenants import TenantConfig
from pliant.deployments.serving.keys import Tenants, hashed


def keyed(keys: Collection[str]) -> Tenants:
    """All keys are of one tenant, which may do all; without a key nobody may do anything, unless there are none."""
    gateway = GatewayConfig(api_keys_env="KEYS" if keys else None)
    return Tenants(ServingConfig(gateway, {}), environment={"KEYS": ",".join(keys)})


def tenants(gateway: dict[str, Any] | None = None, /, **configs: dict[str, Any]) -> Tenants:
    """Those of `configs`; the key of each is its name, but for `anonymous`. Time stands still."""
    entries = [f"{name}:{hashed(name)}" for name in configs if name != "anonymous"]
    config = ServingConfig(
        GatewayConfig(keys_env="KEYS" if entries else None, **(gateway or {})),
        {},
        {name: TenantConfig.model_validate(each) for name, each in configs.items()},
    )
    return Tenants(config, environment={"KEYS": "\n".join(entries)}, now=lambda: 0.0)
