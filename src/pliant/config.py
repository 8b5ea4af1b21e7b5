"""cluster.yaml, typed: what an operator may write, and one line for each thing that is wrong with it.

`pliant check` and the application's builder share `parse` and `check_models`, so they accept the same files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pliant import models
from pliant.errors import ConfigError, ModelError

IMPORT_PATH = "pliant.deployments.app:build"
AUTOSCALING_POLICY = "pliant.deployments.autoscaling:follow_planner"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class GatewayConfig(_Strict):
    """The HTTP front. Stateless: replicas add throughput and survive each other."""

    replicas: Annotated[int, Field(ge=1)] = 1
    cpus: Annotated[float, Field(ge=0)] = 0.5
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 256
    """HTTP requests that one replica works on at a time; as many again may wait for it, more get 429."""
    max_body_mb: Annotated[float, Field(gt=0)] = 4
    max_texts: Annotated[int, Field(ge=1)] = 64
    """Texts in one request."""
    api_keys_env: str | None = None
    """Environment variable that holds the accepted API keys, separated by commas; without it all may call."""


def _rising(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if list(lengths) != sorted(set(lengths)):
        raise ValueError("lengths must rise, each once")
    return lengths


def _auto(lengths: object) -> object:
    if not isinstance(lengths, list | tuple) and lengths not in ("auto", None):
        raise ValueError("must be auto, or a list of lengths such as [64, 128, 512]")
    return None if lengths == "auto" else lengths


class ReplicaRange(_Strict):
    """How many replicas a service has; a plain number in cluster.yaml means min = max."""

    min: Annotated[int, Field(ge=1)]
    max: Annotated[int, Field(ge=1)]

    @model_validator(mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        if isinstance(value, dict | ReplicaRange):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("must be a number of at least 1, or {min: 1, max: 4}")
        return {"min": value, "max": value}

    @model_validator(mode="after")
    def _ordered(self) -> ReplicaRange:
        if self.max < self.min:
            raise ValueError(f"max must be at least min, {self.min}")
        return self

    @property
    def fixed(self) -> bool:
        return self.min == self.max


class EncoderConfig(_Strict):
    """A text classifier on runtimes compiled per input length (Arlo)."""

    kind: Literal["encoder"]
    model: str
    """A Hugging Face id, a local folder, or zoo/NAME."""
    lengths: Annotated[
        Annotated[tuple[Annotated[int, Field(ge=4)], ...], Field(min_length=1), AfterValidator(_rising)] | None,
        BeforeValidator(_auto),
    ] = None
    """Input lengths in tokens for which a runtime is compiled; the last is the longest text that is served.

    "auto", kept as None: chosen from the device's latency profile and the lengths that arrive, up to what the model
    takes.
    """
    replicas: ReplicaRange
    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] = 500
    """Latency objective, measured in the gateway: a request that would miss it is refused at once, with 429."""
    timeout_s: Annotated[float, Field(gt=0)] = 30
    """How long a request may be kept alive while replicas fail or restart, before it gets 503."""
    truncate: bool = False
    """Cut texts that are too long, with a warning in the answer, instead of refusing them."""
    cpus: Annotated[float, Field(ge=0)] = 1
    """CPUs that each replica reserves in Ray; it computes on that many threads, at least one."""
    gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs that each replica reserves in Ray; with any it computes on CUDA."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    period_s: Annotated[float, Field(ge=10, le=3600)] = 120
    """How often the planner allocates lengths to replicas anew; it does so at once when demand shifts."""
    demand_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Plan for this quantile of the demand, second by second, instead of its mean."""

    def longest(self, model_takes: int) -> int:
        """The longest text that is served, in tokens, for a model that takes `model_takes`."""
        return self.lengths[-1] if self.lengths else model_takes

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"

    @property
    def threads(self) -> int:
        """CPU threads that one replica computes on."""
        return max(1, round(self.cpus))


ServiceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ServingConfig(_Strict):
    """The application's `args`."""

    gateway: GatewayConfig = GatewayConfig()
    services: Annotated[dict[ServiceName, EncoderConfig], Field(min_length=1)]


class _ApplicationConfig(_Strict):
    """An application of a Serve config; what is not ours is passed on to Serve untouched."""

    name: str = "default"
    route_prefix: Annotated[str, Field(pattern="^/")] = "/"
    import_path: str
    runtime_env: Any = None
    deployments: Any = None
    autoscaling_policy: dict[str, Any] | None = None
    args: dict[str, Any] = {}
    logging_config: Any = None
    external_scaler_enabled: Any = None


class _HttpOptions(_Strict):
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


class _ClusterFile(_Strict):
    """A Serve config file."""

    proxy_location: Any = None
    http_options: _HttpOptions = _HttpOptions()
    grpc_options: Any = None
    controller_options: Any = None
    logging_config: Any = None
    tracing_config: Any = None
    target_capacity: Any = None
    applications: Annotated[list[_ApplicationConfig], Field(min_length=1)]


CLUSTER_KEYS = tuple(_ClusterFile.model_fields)
HTTP_KEYS = tuple(_HttpOptions.model_fields)
APPLICATION_KEYS = tuple(_ApplicationConfig.model_fields)


class ClusterConfig(BaseModel):
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


def parse(args: Mapping[str, Any]) -> ServingConfig:
    """Validate the application's `args`. Raises ConfigError with a line for each problem."""
    try:
        config = ServingConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError(list(_explain(error, ServingConfig))) from None
    reserved = [name for name in ("gateway", "planner") if name in config.services]
    if reserved:
        raise ConfigError([f"services.{name}: the {name} itself has this name; choose another" for name in reserved])
    return config


def read(path: Path) -> ClusterConfig:
    """Read and validate a whole cluster.yaml. Raises ConfigError with a line for each problem."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: is not UTF-8: {error}"]) from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: is not YAML: {' '.join(str(error).split())}"]) from None
    try:
        file = _ClusterFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(list(_explain(error, _ClusterFile))) from None
    ours = [index for index, application in enumerate(file.applications) if application.import_path == IMPORT_PATH]
    if len(ours) != 1:
        given = ", ".join(application.import_path for application in file.applications)
        raise ConfigError([f"applications: got import_path {given}; exactly one must be {IMPORT_PATH}"])
    application = file.applications[ours[0]]
    try:
        serving = parse(application.args)
    except ConfigError as error:
        prefix = f"applications.{ours[0]}.args."
        raise ConfigError([prefix + problem for problem in error.problems]) from None
    scaled = [name for name, service in serving.services.items() if not service.replicas.fixed]
    policy = (application.autoscaling_policy or {}).get("policy_function")
    if scaled and policy != AUTOSCALING_POLICY:
        raise ConfigError(
            [
                f"applications.{ours[0]}.autoscaling_policy: got policy_function {policy}; {', '.join(scaled)} scales "
                f"between min and max replicas, for which it must be {AUTOSCALING_POLICY}"
            ]
        )
    return ClusterConfig(
        host=file.http_options.host,
        port=file.http_options.port,
        route_prefix=application.route_prefix,
        serving=serving,
    )


def check_models(config: ServingConfig) -> None:
    """Check that every model exists and can take the lengths asked of it, without fetching or training one.

    Raises ConfigError with a line for each problem.
    """
    problems = []
    for name, service in config.services.items():
        try:
            info = models.check(service.model)
        except ModelError as error:
            problems.append(f"services.{name}.model: {error}")
            continue
        if info and (longest := service.longest(info.max_length)) > info.max_length:
            allowed = f"{service.model} takes at most {info.max_length} tokens"
            problems.append(f"services.{name}.lengths: got {longest}; {allowed}")
    if problems:
        raise ConfigError(problems)


def _explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        if problem["type"] == "extra_forbidden":
            allowed = sorted(_fields(root, problem["loc"][:-1]))
            close = difflib.get_close_matches(str(problem["loc"][-1]), allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            yield f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
        elif problem["type"] == "missing":
            yield f"{key}: missing; it must be given"
        else:
            given = repr(problem["input"])
            given = given if len(given) <= 60 else given[:57] + "..."
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{key or 'the file'}: got {given}; {message[0].lower()}{message[1:]}"


def _fields(root: type[BaseModel], loc: tuple[int | str, ...]) -> set[str]:
    """The keys that are allowed at `loc` below `root`."""
    schema = root.model_json_schema()
    node = schema
    for part in loc:
        node = _resolve(schema, node)
        node = node["properties"][part] if part in node.get("properties", {}) else _members(node)
    return set(_resolve(schema, node).get("properties", {}))


def _members(node: dict[str, Any]) -> dict[str, Any]:
    if "patternProperties" in node:
        return next(iter(node["patternProperties"].values()))
    return node.get("additionalProperties") or node.get("items") or {}


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node
