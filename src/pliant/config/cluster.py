"""cluster.yaml, typed: what an operator may write, and one line for each thing that is wrong with it.

It names no kind of service: a Reader is given the configs of all kinds, and asks each service what only its kind knows.
`pliant check` and the application's builder use the same reader and `check_models`, so they accept the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from pliant.config.base import ServiceConfig, ServiceName, Strict
from pliant.config.problems import explain
from pliant.errors import ConfigError, ModelError

IMPORT_PATH = "pliant.deployments.app:build"
AUTOSCALING_POLICY = "pliant.deployments.autoscaling:follow_planner"

_RESERVED = ("gateway", "planner")
"""Names of deployments that are not services."""

Config = TypeVar("Config", bound=ServiceConfig)


class GatewayConfig(Strict):
    """The HTTP front. Stateless: replicas add throughput and survive each other."""

    replicas: Annotated[int, Field(ge=1)] = 1
    cpus: Annotated[float, Field(ge=0)] = 0.5
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 256
    """HTTP requests that one replica works on at a time; as many again may wait for it, more get 429."""
    max_body_mb: Annotated[float, Field(gt=0)] = 4
    max_texts: Annotated[int, Field(ge=1)] = 64
    """Texts or images in one request."""
    max_megapixels: Annotated[float, Field(gt=0, le=80)] = 25
    """Of one image, as it arrives; a larger one is refused before it is decoded."""
    api_keys_env: str | None = None
    """Environment variable that holds the accepted API keys, separated by commas; without it all may call."""


@dataclass(frozen=True)
class ServingConfig:
    """The application's `args`."""

    gateway: GatewayConfig
    services: Mapping[str, ServiceConfig]
    state: str | None = None
    """An absolute folder or an fsspec URL, where state lies that outlives nodes; None: in the user's cache folder."""

    def of(self, kind: type[Config]) -> dict[str, Config]:
        """The services whose config is a `kind`, by name."""
        return {name: service for name, service in self.services.items() if isinstance(service, kind)}


@dataclass(frozen=True)
class ClusterConfig:
    """What the rest of pliant reads from a cluster.yaml."""

    host: str
    port: int
    route_prefix: str
    serving: ServingConfig

    @property
    def address(self) -> str:
        """The base URL under which this machine reaches the service."""
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"


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


class _HttpOptions(Strict):
    """Serve's HTTP options; only the address is ours to know."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    root_path: Any = None
    request_timeout_s: Any = None
    keep_alive_timeout_s: Any = None
    ssl_keyfile: Any = None
    ssl_certfile: Any = None
    ssl_keyfile_password: Any = None
    ssl_ca_certs: Any = None


class _ClusterFile(Strict):
    """A Serve config file."""

    proxy_location: Any = None
    http_options: _HttpOptions = _HttpOptions()
    grpc_options: Any = None
    controller_options: Any = None
    logging_config: Any = None
    tracing_config: Any = None
    target_capacity: Any = None
    applications: Annotated[list[_ApplicationConfig], Field(min_length=1)]


def _reachable(state: str) -> str:
    """`state` if it is an absolute folder, or a URL for which there is a client."""
    if "://" not in state:
        if not Path(state).expanduser().is_absolute():
            raise ValueError("must be an absolute folder, which every node has, or a URL such as s3://bucket/folder")
        return state
    import fsspec

    protocol = state.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)  # type: ignore[no-untyped-call]
    except (ValueError, ImportError) as error:
        raise ValueError(f"{protocol}:// cannot be used: {error}") from None
    return state


_State = Annotated[str, AfterValidator(_reachable)]

CLUSTER_KEYS = tuple(_ClusterFile.model_fields)
HTTP_KEYS = tuple(_HttpOptions.model_fields)
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
            state=(_State | None, None),
        )

    def parse(self, args: Mapping[str, Any]) -> ServingConfig:
        """Validate the application's `args`. Raises ConfigError with a line for each problem."""
        try:
            valid: Any = self._args.model_validate(args)
        except ValidationError as error:
            raise ConfigError(list(explain(error, self._args))) from None
        services: dict[str, ServiceConfig] = valid.services
        if reserved := [name for name in _RESERVED if name in services]:
            raise ConfigError(
                [f"services.{name}: the {name} itself has this name; choose another" for name in reserved]
            )
        if wrong := list(_conflicts(services)):
            raise ConfigError(wrong)
        return ServingConfig(valid.gateway, _with_settings(services), valid.state)

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
        policy = (application.autoscaling_policy or {}).get("policy_function")
        if scaled and policy != AUTOSCALING_POLICY:
            raise ConfigError(
                [
                    f"{key}.autoscaling_policy: got policy_function {policy}; {', '.join(scaled)} scales between min "
                    f"and max replicas, for which it must be {AUTOSCALING_POLICY}"
                ]
            )
        return ClusterConfig(file.http_options.host, file.http_options.port, application.route_prefix, serving)


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


def _cluster_file(path: Path) -> _ClusterFile:
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8: {error}"]) from None
    try:
        return _ClusterFile.model_validate(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: is not YAML: {' '.join(str(error).split())}"]) from None
    except ValidationError as error:
        raise ConfigError(list(explain(error, _ClusterFile))) from None
