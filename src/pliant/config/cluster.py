"""cluster.yaml, typed: what an operator may write, and one line for each thing that is wrong with it.

It names no kind of service: a Reader is given the configs of all kinds, and asks each service what only its kind knows.
`pliant check` and the application's builder use the same reader and `check_models`, so they accept the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from pliant.config.base import ElasticServiceConfig, ReplicaRange, ServiceConfig, ServiceName, Strict, folder_or_url
from pliant.config.budget import BudgetConfig
from pliant.config.http import HttpOptions
from pliant.config.problems import explain
from pliant.config.tenants import ANONYMOUS, UNNAMED, TenantConfig
from pliant.errors import ConfigError, ModelError
from pliant.models.remote import is_remote

IMPORT_PATH = "pliant.deployments.app:build"
AUTOSCALING_POLICY = "pliant.deployments.autoscaling:follow_planner"

PLANNER_CPUS = 0.1
"""What the planner reserves in Ray."""
GATEWAY, PLANNER = "gateway", "planner"
"""Names of deployments that are not services."""

Config = TypeVar("Config", bound=ServiceConfig)


def _awake(replicas: ReplicaRange) -> ReplicaRange:
    """`replicas`, if one is always there."""
    if not replicas.min:
        raise ValueError("a gateway does not sleep: min must be at least 1")
    return replicas


class GatewayConfig(Strict):
    """The HTTP front. Stateless: replicas add throughput and survive each other."""

    replicas: Annotated[ReplicaRange, AfterValidator(_awake)] = ReplicaRange(min=1, max=1)
    """A number, or {min: 1, max: 4}: as many as are busy for some of their time, by their own load."""
    cpus: Annotated[float, Field(ge=0)] = 0.5
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 256
    """HTTP requests to services that one replica works on at a time, and bodies that it receives; more get 429.

    Health probes, status pages and whoever loads adapters or tasks have places of their own."""
    max_per_service: Annotated[int, Field(ge=1)] | None = None
    """Of these, the most of one service; None: three quarters, where there are several."""
    max_body_mb: Annotated[float, Field(gt=0)] = 4
    max_texts: Annotated[int, Field(ge=1)] = 64
    """Texts or images in one request."""
    max_megapixels: Annotated[float, Field(gt=0, le=80)] = 25
    """Of one image, as it arrives; a larger one is refused before it is decoded."""
    api_keys_env: str | None = None
    """Environment variable that holds API keys as they are, separated by commas: all of the tenant `default`, which may
    do all unless `tenants` says otherwise."""
    keys_env: str | None = None
    """Environment variable that holds keys of `tenants`, as NAME:SHA256, separated by commas or white space."""
    keys_file: str | None = None
    """A file of the same, on each machine with a gateway; what changes in it counts within a second."""
    behind_proxy: bool = False
    """Something in front of the cluster has TLS, and keys or the like, and strangers reach nothing else."""

    @property
    def asks_for_keys(self) -> bool:
        return bool(self.api_keys_env or self.keys_env or self.keys_file)


@dataclass(frozen=True)
class ServingConfig:
    """The application's `args`."""

    gateway: GatewayConfig
    services: Mapping[str, ServiceConfig]
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    """Those that are said anything of."""
    state: str | None = None
    """An absolute folder or an fsspec URL, where state lies that outlives nodes; None: in the user's cache folder."""
    budget: BudgetConfig | None = None
    """None: each service that scales does so by its own load."""

    def of(self, kind: type[Config]) -> dict[str, Config]:
        """The services whose config is a `kind`, by name."""
        return {name: service for name, service in self.services.items() if isinstance(service, kind)}


@dataclass(frozen=True)
class ClusterConfig:
    """What the rest of pliant reads from a cluster.yaml."""

    http: HttpOptions
    route_prefix: str
    serving: ServingConfig

    @property
    def address(self) -> str:
        """The base URL under which this machine reaches the service."""
        return f"{self.http.url}{self.route_prefix.rstrip('/')}"


class _ApplicationConfig(Strict):
    """An application of a Serve config; what is not ours is passed on to Serve untouched."""

    name: str = "default"
    route_prefix: Annotated[str, Field(pattern="^/")] = "/"
    import_path: str
    runtime_env: Any = None
    deployments: Any = None
    autoscaling_policy: dict[str, Any] | None = None
    args: Annotated[dict[str, Any], Field(default_factory=dict)]
    logging_config: Any = None
    external_scaler_enabled: Any = None


class _ClusterFile(Strict):
    """A Serve config file."""

    proxy_location: Any = None
    http_options: HttpOptions = HttpOptions()
    grpc_options: Any = None
    controller_options: Any = None
    logging_config: Any = None
    tracing_config: Any = None
    target_capacity: Any = None
    applications: Annotated[list[_ApplicationConfig], Field(min_length=1)]


def _reachable(state: str) -> str:
    """`state` if it is an absolute folder, or a URL for which there is a client."""
    if not is_remote(state) and not Path(state).expanduser().is_absolute():
        raise ValueError("must be an absolute folder, which every node has, or a URL such as s3://bucket/folder")
    return folder_or_url(state)


_State = Annotated[str, AfterValidator(_reachable)]

CLUSTER_KEYS = tuple(_ClusterFile.model_fields)
HTTP_KEYS = tuple(HttpOptions.model_fields)
APPLICATION_KEYS = tuple(_ApplicationConfig.model_fields)


class Reader:
    """Reads configurations whose services are of the given kinds, of which there are at least two."""

    def __init__(self, kinds: Sequence[type[ServiceConfig]]) -> None:
        service: Any = Annotated[Union[tuple(kinds)], Field(discriminator="kind")]  # noqa: UP007
        services: Any = Annotated[dict[ServiceName, service], Field(min_length=1)]
        self._args: type[BaseModel] = create_model(
            "Args",
            __base__=Strict,
            gateway=(GatewayConfig, GatewayConfig()),
            services=(services, ...),
            tenants=(dict[ServiceName, TenantConfig], {}),
            state=(_State | None, None),
            budget=(BudgetConfig | None, None),
        )

    def parse(self, args: Mapping[str, Any]) -> ServingConfig:
        """Validate the application's `args`. Raises ConfigError with a line for each problem."""
        try:
            valid: Any = self._args.model_validate(args)
        except ValidationError as error:
            raise ConfigError(list(explain(error, self._args))) from None
        services: dict[str, ServiceConfig] = valid.services
        if reserved := [name for name in (GATEWAY, PLANNER) if name in services]:
            raise ConfigError(
                [f"services.{name}: the {name} itself has this name; choose another" for name in reserved]
            )
        tenants: dict[str, TenantConfig] = valid.tenants
        if wrong := [
            *_conflicts(services),
            *_unknown_services(tenants, services),
            *_keyless(tenants, valid.gateway),
            *_rigid(services, valid.budget),
        ]:
            raise ConfigError(wrong)
        return ServingConfig(valid.gateway, _with_settings(services), tenants, valid.state, valid.budget)

    def read(self, path: Path) -> ClusterConfig:
        """Read and validate a whole cluster.yaml. Raises ConfigError with a line for each problem."""
        file = _cluster_file(path)
        ours = [index for index, application in enumerate(file.applications) if application.import_path == IMPORT_PATH]
        if len(ours) != 1:
            given = ", ".join(application.import_path for application in file.applications)
            raise ConfigError([f"applications: got import_path {given}; exactly one must be {IMPORT_PATH}"])
        application, key = file.applications[ours[0]], f"applications.{ours[0]}"
        try:
            serving = self.parse(application.args)
        except ConfigError as error:
            raise ConfigError([f"{key}.args.{problem}" for problem in error.problems]) from None
        scaled = [name for name, service in serving.services.items() if _scales(service)]
        if not serving.gateway.replicas.fixed:
            scaled.append(GATEWAY)
        policy = (application.autoscaling_policy or {}).get("policy_function")
        if scaled and policy != AUTOSCALING_POLICY:
            raise ConfigError(
                [
                    f"{key}.autoscaling_policy: got policy_function {policy}; there are min and max replicas of "
                    f"{', '.join(scaled)}, for which it must be {AUTOSCALING_POLICY}"
                ]
            )
        gateway = serving.gateway
        if wrong := list(file.http_options.problems(gateway.asks_for_keys, gateway.behind_proxy)):
            raise ConfigError([f"http_options.{problem}" for problem in wrong])
        return ClusterConfig(file.http_options, application.route_prefix, serving)


def check_models(config: ServingConfig) -> None:
    """Check that every model exists and can do what is asked of it, without fetching or training one.

    Services that are made of others are looked at once nothing is wrong with the others. Raises ConfigError with a line
    for each problem.
    """
    whole = {name: service for name, service in config.services.items() if not service.parts()}
    composed = {name: service for name, service in config.services.items() if service.parts()}
    if problems := list(_misfits(whole, config)) or list(_misfits(composed, config)):
        raise ConfigError(problems)


def _misfits(services: Mapping[str, ServiceConfig], config: ServingConfig) -> Iterator[str]:
    for name, service in services.items():
        try:
            found = service.misfit(config.services)
        except ModelError as error:
            found = f"model: {error}"
        if found:
            yield f"services.{name}.{found}"


def _conflicts(services: Mapping[str, ServiceConfig]) -> Iterator[str]:
    for name, service in services.items():
        for problem in service.conflicts(services):
            yield f"services.{name}.{problem}"


def _unknown_services(tenants: Mapping[str, TenantConfig], services: Mapping[str, ServiceConfig]) -> Iterator[str]:
    for name, tenant in tenants.items():
        for service in tenant.services or ():
            if service not in services:
                yield f"tenants.{name}.services: got {service}; there are: {', '.join(services)}"


def _keyless(tenants: Mapping[str, TenantConfig], gateway: GatewayConfig) -> Iterator[str]:
    """What is wrong with tenants that nobody could be."""
    if not (gateway.keys_env or gateway.keys_file):
        for name in tenants.keys() - {ANONYMOUS, *((UNNAMED,) if gateway.api_keys_env else ())}:
            yield f"tenants.{name}: there are no keys of it; name a gateway.keys_file, or a gateway.keys_env"


def _rigid(services: Mapping[str, ServiceConfig], budget: BudgetConfig | None) -> Iterator[str]:
    """Which numbers of replicas cannot change, and are to."""
    for name, service in services.items():
        if isinstance(service, ElasticServiceConfig) and service.needs_budget and _scales(service) and not budget:
            yield (
                f"services.{name}.replicas: a service of kind {service.kind} scales only within a budget; add the line "
                "`budget: {}` beside services, or give one number"
            )
        elif (size := service.replica_range()) and not size.min and not budget:
            yield (
                f"services.{name}.replicas.min: a service sleeps only within a budget; add the line `budget: {{}}` "
                "beside services, or give at least 1"
            )


def _with_settings(services: Mapping[str, ServiceConfig]) -> dict[str, ServiceConfig]:
    """`services`, each with what those that it is a part of set there."""
    changed = dict(services)
    for service in services.values():
        for part, settings in service.settings_of_parts().items():
            changed[part] = changed[part].model_copy(update=settings)
    return changed


def _scales(service: ServiceConfig) -> bool:
    replicas = service.replica_range()
    return replicas is not None and not replicas.fixed


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which the first would be lost."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise yaml.YAMLError(f"{key.value} is there twice, in lines {lines[key.value]} and {line}")
                lines[key.value] = line
        return node


def _cluster_file(path: Path) -> _ClusterFile:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8: {error}"]) from None
    try:
        content = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: is not YAML: {' '.join(str(error).split())}"]) from None
    try:
        return _ClusterFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(list(explain(error, _ClusterFile))) from None
