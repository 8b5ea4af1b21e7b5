"""cluster.yaml, typed: what an operator may write, and one line for each thing that is wrong with it.

`pliant check` and the application's builder share `parse` and `check_models`, so they accept the same files.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pliant.cache import cache_folder
from pliant.errors import ConfigError, DataError, ModelError
from pliant.models import sources
from pliant.training import labelled_texts

IMPORT_PATH = "pliant.deployments.app:build"
AUTOSCALING_POLICY = "pliant.deployments.autoscaling:follow_planner"

_BYTES = {"float32": 4, "bfloat16": 2}
_SHORTEST_SLOT = 128
"""Tokens that a slot must have where nobody says how many."""


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
    """Texts or images in one request."""
    max_megapixels: Annotated[float, Field(gt=0, le=80)] = 25
    """Of one image, as it arrives; a larger one is refused before it is decoded."""
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


class _Service(_Strict):
    """What every kind of service has."""

    model: str
    """A Hugging Face id, a local folder, or zoo/NAME."""
    cpus: Annotated[float, Field(ge=0)] = 1
    """CPUs that each replica reserves in Ray; it computes on that many threads, at least one."""
    gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs that each replica reserves in Ray; with any it computes on CUDA."""
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.gpus else "cpu"

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number."""
        return _BYTES[self.dtype]

    @property
    def threads(self) -> int:
        """CPU threads that one replica computes on."""
        return max(1, round(self.cpus))


class EncoderConfig(_Service):
    """A text classifier on runtimes compiled per input length (Arlo)."""

    kind: Literal["encoder"]
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
    period_s: Annotated[float, Field(ge=10, le=3600)] = 120
    """How often the planner allocates lengths to replicas anew; it does so at once when demand shifts."""
    demand_quantile: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Plan for this quantile of the demand, second by second, instead of its mean."""
    importance: bool = False
    """Tell which tokens of a text are important, for a cascade that prunes; on wherever one needs it."""

    def longest(self, model_takes: int) -> int:
        """The longest text that is served, in tokens, for a model that takes `model_takes`."""
        return self.lengths[-1] if self.lengths else model_takes


def _in_folder(adapters: object) -> object:
    return {"folder": adapters} if isinstance(adapters, str) else adapters


def _registry_file(given: str | None, folder: str, service: str) -> Path:
    return Path(given).expanduser() if given else cache_folder() / folder / f"{service}.json"


class AdaptersConfig(_Strict):
    """The LoRA adapters of a language model (Chameleon); a plain text in cluster.yaml means its `folder`."""

    folder: str | None = None
    """Holds the adapters that are there from the start, a PEFT folder each; or zoo/adapters."""
    roots: tuple[str, ...] = ()
    """Folders from which adapters may be loaded at run time; `folder` is one in any case."""
    cache: Literal["compound", "fair_share", "lru", "lfu", "none"] = "compound"
    """Which adapters that nobody uses leave the memory first; "none": all, and at once."""
    prefetch: Literal["queued", "predicted", "none"] = "queued"
    """Load adapters of requests that wait, and, "predicted", of requests that are likely to come."""
    pinned: tuple[str, ...] = ()
    """Adapters of `folder` that never leave the memory."""
    max_rank: Annotated[int, Field(ge=1, le=256)] = 256
    runtime: bool = True
    """Whether clients may load and unload adapters while the cluster runs; whoever may call, may."""
    registry: str | None = None
    """A file that keeps what was loaded at run time; by default in the user's cache folder, one for each service."""

    def registry_file(self, service: str) -> Path:
        """The file of these adapters, which are those of `service`; it need not exist."""
        return _registry_file(self.registry, "registries", service)

    @model_validator(mode="after")
    def _reachable(self) -> AdaptersConfig:
        if self.folder is None and not self.roots:
            raise ValueError("needs a folder of adapters, or roots from which they may be loaded")
        if self.pinned and self.folder is None:
            raise ValueError("pinned: only adapters of a folder can be pinned; give one")
        return self


class LlmConfig(_Service):
    """A language model of the Llama family, all of whose requests share one decode loop (Flover)."""

    kind: Literal["llm"]
    replicas: Annotated[int, Field(ge=1)] = 1
    slots: Annotated[int, Field(ge=1, le=1024)] = 32
    """Requests that one replica decodes at a time; each has a slot of `max_length` tokens for its keys and values."""
    max_length: Annotated[int, Field(ge=16)] | None = None
    """Tokens of a prompt and its answer together; by default what the model takes, or else what `memory_mb` holds."""
    memory_mb: Annotated[int, Field(ge=1)] | None = None
    """What keys, values and adapters may take together.

    By default keys and values have half of the machine's free memory, or nine tenths of the GPU's, and adapters what
    these leave idle.
    """
    adapters: Annotated[AdaptersConfig | None, BeforeValidator(_in_folder)] = None
    """LoRA adapters that share the model; each is a model of its own to clients."""
    scheduler: Literal["multi_queue", "fifo", "sjf"] = "multi_queue"
    """Which waiting request is next: of queues by size, the first, or the one with the shortest predicted answer."""
    queue: Annotated[int, Field(ge=0)] = 128
    """Requests that may wait for a slot in each replica; more are refused, with 429."""
    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] = 10_000
    """Objective for the time to the first token: a request that would miss it is refused early, with 429."""
    timeout_s: Annotated[float, Field(gt=0)] = 60
    """How long an answer may stand still while replicas fail or restart, before it ends with an error."""
    stall_ms: Annotated[float, Field(gt=0)] = 50
    """By how much the prompts of new requests may delay the next token of the others; 16 tokens always may."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Length of an answer whose request does not give one."""
    debug: bool = False
    """Check after every step that slots, lengths and requests agree; replaces the replica if they do not. Slow."""

    def least_slot(self, model_takes: int) -> int:
        """Tokens that a slot has at least, for a model that takes `model_takes`."""
        return self.max_length or min(_SHORTEST_SLOT, model_takes)

    @model_validator(mode="after")
    def _patient(self) -> LlmConfig:
        if self.slo_ms > self.timeout_s * 1e3:
            raise ValueError(f"slo_ms must be at most timeout_s ({self.timeout_s:g} s); lower it, or raise timeout_s")
        return self


class TasksConfig(_Strict):
    """The tasks of a vision service; a plain text in cluster.yaml means their `folder`."""

    folder: str | None = None
    """Holds the tasks that are there from the start, a folder each; or zoo/digits-tasks.

    Without it the model's own head is the task "model", and the one of requests that name none.
    """
    roots: tuple[str, ...] = ()
    """Folders from which tasks may be loaded at run time; `folder` is one in any case."""
    runtime: bool = True
    """Whether clients may load and unload tasks while the cluster runs; whoever may call, may."""
    registry: str | None = None
    """A file that keeps what was loaded at run time; by default in the user's cache folder, one for each service."""

    def registry_file(self, service: str) -> Path:
        """The file of these tasks, which are those of `service`; it need not exist."""
        return _registry_file(self.registry, "task-registries", service)


def _ascending(gammas: tuple[int, ...]) -> tuple[int, ...]:
    if len(gammas) > 1 and 0 not in gammas:
        raise ValueError("some tasks may lack prompts, or accuracies, for all of them; add 0, or keep one alone")
    return tuple(sorted(set(gammas)))


def _auto_gammas(gammas: object) -> object:
    if not isinstance(gammas, list | tuple) and gammas not in ("auto", None):
        raise ValueError("must be auto, or a list of token counts such as [-4, 0, 2, 8]")
    return None if gammas == "auto" else gammas


class VisionConfig(_Service):
    """A frozen vision transformer that many tasks share, and that trades tokens for time (OTAS)."""

    kind: Literal["vision"]
    tasks: Annotated[TasksConfig, BeforeValidator(_in_folder)] = TasksConfig()
    """What images are classified for: a head, and prompts for each number of them, per task; or the model's own."""
    replicas: Annotated[int, Field(ge=1)] = 1
    gammas: Annotated[
        Annotated[
            tuple[Annotated[int, Field(ge=-1000, le=512)], ...],
            Field(min_length=1, max_length=32),
            AfterValidator(_ascending),
        ]
        | None,
        BeforeValidator(_auto_gammas),
    ] = None
    """By how many tokens each layer may differ: prompts above 0, merged ones below. One alone is used always.

    "auto", kept as None: what the model's token count suggests, what the tasks have prompts for, and 0.
    """
    compile: bool = False
    """Compile the model for the CPU, in the background. Replicas answer uncompiled once they have their profile.

    A compile takes half a CPU minute for each gamma of a small model, and minutes and gigabytes for one like ViT-Base;
    it is kept for this machine. Batches of zoo/digits-vit are then 1.3 to 1.9 times as fast, and merging tokens pays,
    which saves such a small model little otherwise. ViT-Base gains a tenth, as its time goes into matrix products:
    merging pays for it in any case. GPUs have no need of this: they record CUDA graphs, in seconds.
    """
    policy: Literal["exact", "algorithm_2"] = "exact"
    """How each batch gets its gamma: so that no other choice earns more, or by the paper's dynamic program."""
    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    """Latency objective of requests that give none, instead of their task's own; later answers are worth nothing."""
    utility: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """What a right answer in time is worth if the request does not say so, instead of the task's own."""
    queue: Annotated[int, Field(ge=1, le=4096)] = 256
    """Images that may wait in each replica; more are refused, with 429."""
    timeout_s: Annotated[float, Field(gt=0)] = 30
    """How long an image may stay without an answer where a replica hangs, or its own slo_ms if that is longer; then it
    gets 503. One that reaches no replica gets 503 at its deadline."""


ServiceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class ConformalConfig(_Strict):
    """How rarely answers that a cascade gives early may differ from the most accurate level's, for certain."""

    epsilon: Annotated[float, Field(gt=0, lt=1)]
    """The most of them that may, as a share."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """The chance that the labelled texts misled us about it."""


class CascadeConfig(_Strict):
    """A text classifier that asks small models first, and larger ones where they are not sure (Tabi)."""

    kind: Literal["cascade"]
    levels: Annotated[tuple[ServiceName, ...], Field(min_length=2, max_length=5)]
    """Encoder services of the same file, in rising accuracy; others may use them, too.

    If one cuts texts that are too long (`truncate`), those after it must, too.
    """
    data: str
    """Labelled texts that no level has learned from: zoo/topics, or a file of JSON lines {"text": …, "label": …}."""
    accuracy_loss: Annotated[float, Field(ge=0, lt=1)] | None = None
    """How much less accurate than the best level it may be; either this or `accuracy_target`."""
    accuracy_target: Annotated[float, Field(gt=0, lt=1)] | None = None
    """How accurate it must be on the labelled texts."""
    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] = 1000
    """Latency objective, measured in the gateway, for all levels that read a text together."""
    degrade: bool = False
    """Answer less well rather than not at all: from the levels that have read a text when a later one is overloaded,
    down or late; from the fastest other level alone when the first one is; and with the closest there is to an accuracy
    that cannot be had. Such answers say so."""
    prune: bool = True
    """Leave out words that the first level hardly attended to, before a later level reads a text."""
    conformal: ConformalConfig | None = None
    seed: int = 0
    """Of the choice which texts go on to the next level; the same text always takes the same way."""

    @model_validator(mode="after")
    def _consistent(self) -> CascadeConfig:
        if (self.accuracy_loss is None) == (self.accuracy_target is None):
            raise ValueError("needs either accuracy_loss, such as 0.01, or accuracy_target, such as 0.9")
        if len(set(self.levels)) != len(self.levels):
            raise ValueError("levels: each may be there once")
        return self


Service = Annotated[EncoderConfig | LlmConfig | VisionConfig | CascadeConfig, Field(discriminator="kind")]
KINDS = ("encoder", "llm", "vision", "cascade")


class ServingConfig(_Strict):
    """The application's `args`."""

    gateway: GatewayConfig = GatewayConfig()
    services: Annotated[dict[ServiceName, Service], Field(min_length=1)]

    @property
    def encoders(self) -> dict[str, EncoderConfig]:
        return {name: service for name, service in self.services.items() if isinstance(service, EncoderConfig)}

    @property
    def llms(self) -> dict[str, LlmConfig]:
        return {name: service for name, service in self.services.items() if isinstance(service, LlmConfig)}

    @property
    def visions(self) -> dict[str, VisionConfig]:
        return {name: service for name, service in self.services.items() if isinstance(service, VisionConfig)}

    @property
    def cascades(self) -> dict[str, CascadeConfig]:
        return {name: service for name, service in self.services.items() if isinstance(service, CascadeConfig)}


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
    if wrong := [*_shared_registries(config), *_wrong_levels(config)]:
        raise ConfigError(wrong)
    return _with_importance(config)


def _wrong_levels(config: ServingConfig) -> Iterator[str]:
    """What is wrong with the services that cascades name as their levels."""
    there = ", ".join(config.encoders) or "none"
    for name, cascade in config.cascades.items():
        for index, level in enumerate(cascade.levels):
            if level not in config.encoders:
                kind = config.services[level].kind if level in config.services else "no service"
                yield f"services.{name}.levels.{index}: got {level}, {kind}; must be an encoder service: {there}"
        cutting = ""
        for index, level in enumerate(cascade.levels):
            if cutting and level in config.encoders and not config.encoders[level].truncate:
                yield (
                    f"services.{name}.levels.{index}: {level} refuses texts that are too long, and {cutting}, which "
                    "reads them before, cuts them; set truncate: true for both, or for neither"
                )
            if level in config.encoders and config.encoders[level].truncate:
                cutting = level


def _with_importance(config: ServingConfig) -> ServingConfig:
    """`config` where the levels that may have to say which words are important do: all but the last of a cascade."""
    telling = {level for cascade in config.cascades.values() if cascade.prune for level in cascade.levels[:-1]}
    services = {
        name: service.model_copy(update={"importance": True}) if name in telling else service
        for name, service in config.services.items()
    }
    return config.model_copy(update={"services": services})


def _shared_registries(config: ServingConfig) -> Iterator[str]:
    """What is wrong with files in which two services would undo each other's changes."""
    owners: dict[str, tuple[str, str]] = {}
    registries: list[tuple[str, str, AdaptersConfig | TasksConfig]] = [
        *((name, "adapters", service.adapters) for name, service in config.llms.items() if service.adapters),
        *((name, "tasks", service.tasks) for name, service in config.visions.items()),
    ]
    for name, what, registry in registries:
        owner, theirs = owners.setdefault(os.path.realpath(registry.registry_file(name)), (name, what))
        if owner != name:
            yield (
                f"services.{name}.{what}.registry: got {registry.registry}; {owner} keeps its {theirs} in that file, "
                "so it must be another one"
            )


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
    scaled = [name for name, service in serving.encoders.items() if not service.replicas.fixed]
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
        if isinstance(service, CascadeConfig):
            continue
        try:
            found = _misfit(service)
        except ModelError as error:
            found = f"model: {error}"
        if found:
            problems.append(f"services.{name}.{found}")
    if not problems:
        problems = [
            f"services.{name}.{found}"
            for name, cascade in config.cascades.items()
            if (found := _misfit_cascade(cascade, config.encoders))
        ]
    if problems:
        raise ConfigError(problems)


def _misfit_cascade(cascade: CascadeConfig, encoders: Mapping[str, EncoderConfig]) -> str | None:
    """What keeps the levels from working together, or the labelled texts from telling about them."""
    infos = {level: sources.check(encoders[level].model) for level in cascade.levels}
    first, labels = cascade.levels[0], set(infos[cascade.levels[0]].labels)
    shortest: float = math.inf
    for index, (level, info) in enumerate(infos.items()):
        if info.multi_label or len(info.labels) < 2:
            return f"levels.{index}: {level} does not choose one of several labels; a cascade needs models that do"
        if len(set(info.labels)) != len(info.labels):
            return f"levels.{index}: {level} has labels of the same name, {list(info.labels)}; give each its own"
        if differing := labels.symmetric_difference(info.labels):
            return (
                f"levels.{index}: {level} and {first} need the same labels, in any order; only one of them has "
                f"{', '.join(sorted(differing)[:5])}"
            )
        longest = encoders[level].longest(info.max_length)
        if index and longest < shortest:
            return (
                f"levels.{index}: {level} takes at most {longest} tokens, and {first}, which reads texts before, "
                f"{shortest}; give both the same longest length"
            )
        shortest = min(shortest, longest)
    try:
        labelled_texts.read(cascade.data, labels)
    except DataError as error:
        return f"data: {error}"
    return None


def _misfit(service: EncoderConfig | LlmConfig | VisionConfig) -> str | None:
    """What the model cannot do of what `service` asks, beginning with the key."""
    if isinstance(service, EncoderConfig):
        return _misfit_encoder(service)
    return _misfit_llm(service) if isinstance(service, LlmConfig) else _misfit_vision(service)


def _misfit_vision(service: VisionConfig) -> str | None:
    labels = sources.check_vision(service.model).labels
    if not service.tasks.folder and not service.tasks.roots:
        if not labels:
            return "tasks: missing; the model has no head of its own, so give a folder of tasks, or roots to load from"
        if service.gammas and min(service.gammas) > 0:
            return f"gammas: got {service.gammas[0]}; the model's own head, the only task, has no prompts; choose 0"
    if service.tasks.folder:
        try:
            sources.check_tasks(service.tasks.folder)
        except ModelError as error:
            return f"tasks.folder: {error}"
    return None


def _misfit_encoder(service: EncoderConfig) -> str | None:
    takes = sources.check(service.model).max_length
    longest = service.longest(takes)
    return f"lengths: got {longest}; {service.model} takes at most {takes} tokens" if longest > takes else None


def _misfit_llm(service: LlmConfig) -> str | None:
    shape = sources.check_decoder(service.model)
    if service.adapters and service.adapters.folder:
        try:
            sources.check_adapters(service.adapters.folder)
        except ModelError as error:
            return f"adapters.folder: {error}"
    if service.max_length and service.max_length > shape.max_length:
        return f"max_length: got {service.max_length}; {service.model} takes at most {shape.max_length} tokens"
    token = shape.kv_bytes(1, service.dtype_bytes)
    length = service.least_slot(shape.max_length)
    needed_mb = math.ceil(service.slots * length * token / 2**20)
    if service.memory_mb and needed_mb > service.memory_mb:
        fitting = int(service.memory_mb * 2**20 / (length * token))
        return (
            f"memory_mb: got {service.memory_mb}; {service.slots} slots x {length} tokens x {token / 1024:g} KiB = "
            f"{needed_mb} MB of keys and values; allow that much, or at most {fitting} slots, or a smaller max_length"
        )
    return None


def _explain(error: ValidationError, root: type[BaseModel]) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(str(part) for part in _written(problem["loc"]))
        if problem["type"] == "extra_forbidden":
            allowed = sorted(_fields(root, problem["loc"][:-1]))
            close = difflib.get_close_matches(str(problem["loc"][-1]), allowed, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            yield f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
        elif problem["type"] == "union_tag_not_found":
            yield f"{key}.kind: missing; it must be one of {', '.join(KINDS)}"
        elif problem["type"] == "union_tag_invalid":
            yield f"{key}.kind: got {problem['ctx']['tag']!r}; it must be one of {', '.join(KINDS)}"
        elif problem["type"] == "missing":
            yield f"{key}: missing; it must be given"
        else:
            given = repr(problem["input"])
            given = given if len(given) <= 60 else given[:57] + "..."
            message = problem["msg"].removeprefix("Value error, ")
            yield f"{key or 'the file'}: got {given}; {message[0].lower()}{message[1:]}"


def _written(loc: tuple[int | str, ...]) -> Iterator[int | str]:
    """`loc` without what pydantic adds to the keys of the file: the kind of a service, and marks of bad keys."""
    for index, part in enumerate(loc):
        if part != "[key]" and not (index == 2 and loc[0] == "services" and part in KINDS):
            yield part


def _fields(root: type[BaseModel], loc: tuple[int | str, ...]) -> set[str]:
    """The keys that are allowed at `loc` below `root`."""
    schema = root.model_json_schema()
    node = schema
    for part in loc:
        node = _resolve(schema, node)
        node = node["properties"][part] if part in node.get("properties", {}) else _members(node, part)
    return set(_resolve(schema, node).get("properties", {}))


def _members(node: dict[str, Any], part: int | str) -> dict[str, Any]:
    """The schema of the member `part` of a mapping, a list, or a choice of kinds."""
    if "discriminator" in node:
        return {"$ref": node["discriminator"]["mapping"][part]}
    if "patternProperties" in node:
        return next(iter(node["patternProperties"].values()))
    return node.get("additionalProperties") or node.get("items") or {}


def _resolve(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    return schema["$defs"][node["$ref"].rsplit("/", 1)[-1]] if "$ref" in node else node
