"""What services of all kinds have in cluster.yaml, and what the rest of pliant asks of one without knowing its kind.

A kind's config is a subclass of ServiceConfig, or of ModelServiceConfig if its replicas run a model. Its fields are its
keys in cluster.yaml; it overrides those methods of ServiceConfig whose default is not right for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

ServiceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Milliseconds = Annotated[float, Field(gt=0, le=3_600_000)]
Seconds = Annotated[float, Field(gt=0)]
ReplicaCount = Annotated[int, Field(ge=1)]

_BYTES = {"float32": 4, "bfloat16": 2}


def folder_or_url(given: str) -> str:
    """`given`, if it is a folder, or an fsspec URL for which there is a client. Raises ValueError."""
    protocol, url, _ = given.partition("://")
    if url:
        import fsspec

        try:
            fsspec.get_filesystem_class(protocol)  # type: ignore[no-untyped-call]
        except (ValueError, ImportError) as error:
            raise ValueError(f"{protocol}:// cannot be used: {error}") from None
    return given


class Strict(BaseModel):
    """Frozen; knows all of its keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, serialize_by_alias=True
    )


class ReplicaRange(Strict):
    """How many replicas a service has; a plain number in cluster.yaml means min = max. With a min of 0 it sleeps."""

    min: Annotated[int, Field(ge=0)]
    max: ReplicaCount

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


class CatalogConfig(Strict):
    """What clients may add to a service while it runs; a plain text in cluster.yaml means its `folder`."""

    registries: ClassVar[str]
    """Where in `state` lies what was loaded at run time."""

    folder: str | None = None
    """Holds those that are there from the start, a folder each."""
    roots: tuple[str, ...] = ()
    """Folders from which others may be loaded at run time; `folder` is one in any case."""
    runtime: bool = True
    """Whether clients may load and unload them while the cluster runs; whoever may call, may."""

    @model_validator(mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return {"folder": value} if isinstance(value, str) else value


class Example(NamedTuple):
    """A request that a user may try."""

    path: str
    """Below the address of the cluster."""
    body: Mapping[str, Any]


class ServiceConfig(Strict):
    """A service of any kind."""

    kind: str
    """What cluster.yaml calls the kind; each kind declares it as a Literal."""

    @abstractmethod
    def example(self, name: str) -> Example:
        """A request with which to try this service, whose name is `name`."""

    def replica_range(self) -> ReplicaRange | None:
        """How many replicas it has; None if it has none of its own."""
        return None

    def resources(self) -> dict[str, float]:
        """What each replica reserves in Ray."""
        return {}

    def of_a_replica(self) -> dict[str, Any]:
        """What each replica goes by, as JSON: it is replaced where that changes, but not for having more beside it."""
        return self.model_dump(mode="json", exclude={"replicas"})

    def memory_bytes(self) -> int:
        """What each replica is known to take of its machine's memory, beyond what every process does.

        Raises ModelError when there is no such model.
        """
        return 0

    def parts(self) -> tuple[str, ...]:
        """Names of the services that it is made of."""
        return ()

    def settings_of_parts(self) -> Mapping[str, Mapping[str, Any]]:
        """By part, the keys that are set there because this service needs it, and their values."""
        return {}

    def catalogs(self) -> Mapping[str, CatalogConfig]:
        """By key in cluster.yaml, what clients may add to it while it runs."""
        return {}

    def fetched(self) -> tuple[str, ...]:
        """What is downloaded or trained before it can answer: models and folders, as cluster.yaml names them."""
        return ()

    def labels(self, services: Mapping[str, ServiceConfig]) -> tuple[str, ...]:
        """Those of which it chooses one for each text; none if it does not do that. `services` are all.

        Raises ModelError when there is no such model.
        """
        return ()

    def conflicts(self, services: Mapping[str, ServiceConfig]) -> Iterator[str]:
        """What is wrong with it beside the other `services`, a line each, which begins with the key below its own."""
        yield from ()

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        """What its model cannot do of what it asks, in a line that begins with the key; None if nothing.

        Looks at the model's description, and downloads or trains nothing. `services` are all; nothing is wrong with its
        parts among them. Raises ModelError when there is no such model.
        """
        return None


class ModelServiceConfig(ServiceConfig):
    """A service whose replicas run a model."""

    model: str
    """A Hugging Face id, a local folder, or zoo/NAME."""
    replicas: ReplicaRange | ReplicaCount = 1
    cpus: Annotated[float, Field(ge=0)] = 1
    """CPUs that each replica reserves in Ray; it computes on that many threads, at least one."""
    gpus: Annotated[float, Field(ge=0, le=1)] = 0
    """The share of a GPU that each replica reserves in Ray, and takes of its memory; with any it computes on CUDA."""
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

    def resources(self) -> dict[str, float]:
        return {"num_cpus": self.cpus, "num_gpus": self.gpus}

    def replica_range(self) -> ReplicaRange:
        return ReplicaRange.model_validate(self.replicas)

    def fetched(self) -> tuple[str, ...]:
        return (self.model, *(catalog.folder for catalog in self.catalogs().values() if catalog.folder))


class ElasticServiceConfig(ModelServiceConfig):
    """A service whose number of replicas may change."""

    needs_budget: ClassVar[bool]
    """Whether it changes only where services share a budget, not by the service's own load."""

    replicas: ReplicaRange
    weight: Annotated[float, Field(gt=0, le=1_000_000)] = 1
    """What it counts beside other services that all of its requests meet their objectives, where they share a
    budget."""
    class_: Annotated[Literal["interactive", "batch"], Field(alias="class")] = "interactive"
    """Whether it gets replicas beside others, or only of what they leave, where they share a budget."""
