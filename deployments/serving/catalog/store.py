"""What clients loaded and unloaded at run time, adapters or tasks, of one service: it outlives planners and nodes.

All of this blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pliant.cache import cache_folder
from pliant.deployments.serving.state.record import Record, StateError
from pliant.deployments.serving.state.storage import Storage
from pliant.errors import PliantError


class StoredEntry(BaseModel):
    """One adapter or task that a client loaded. Fields that another version has beside these are ignored."""

    model_config = ConfigDict(frozen=True)

    folder: str
    created: int
    owner: str = ""
    """The tenant that loaded it."""


K = TypeVar("K", bound=StoredEntry)


class Stored(BaseModel, Generic[K]):
    """What is stored of a service. Fields that another version has beside these are ignored."""

    model_config = ConfigDict(frozen=True)

    loaded: dict[str, K] = {}
    """By name."""
    unloaded: dict[str, str] = {}
    """Those of the configured folder that are not to come back, and the revision that this was said of."""


class Store(Generic[K]):
    """`open` comes first; the methods that change it run in one thread at a time."""

    def __init__(self, storage: Storage, registry: str, service: str, nothing: Stored[K]) -> None:
        """What is stored in the folder `registry` of `storage` for `service`; `nothing` is so at first."""
        self._record = Record(storage, f"{registry}/{service}")
        self._earlier = cache_folder() / registry / f"{service}.json"
        """Where versions before `state` kept it."""
        self._kept = nothing
        self._barred: StateError | None = StateError(f"the state {self._record.name} has not been read")
        """Why nothing can be changed."""
        self._read = False
        """Whether what is stored is known, whether it can be changed or not."""
        self._lost: list[PliantError] = []
        """What was damaged when it was claimed."""

    @property
    def claimed(self) -> bool:
        """Whether what clients do can be stored."""
        return self._barred is None

    @property
    def loaded(self) -> Mapping[str, K]:
        """What clients loaded, by name, whether it can be served or not."""
        return self._kept.loaded

    def is_out(self, name: str, revision: str) -> bool:
        """Whether a client unloaded what the configured folder has as `name`, and its files are still the same."""
        return self._kept.unloaded.get(name) == revision

    def open(self) -> list[PliantError]:
        """Claim what is stored, and read it, unless that is done; what is wrong with it. Without a claim, as on a full
        disk, it is read, and cannot be changed."""
        if self._barred is None:
            return self._lost
        try:
            found = self._record.claim()
        except StateError as error:
            self._barred, self._read = error, False
            with suppress(StateError, ValidationError):
                if content := self._record.look():
                    self._kept = type(self._kept).model_validate_json(content)
                self._read = True
            return [error]
        self._lost += found.problems
        try:
            if found.content:
                self._kept = type(self._kept).model_validate_json(found.content)
                self._barred = None
            else:
                self._barred = None
                self._lost += self._take_over()
            self._read = True
            return self._lost
        except ValidationError as error:
            self._barred = StateError(
                f"the state {self._record.name} is not of this version's form ({_reason(error)}), so it is neither "
                "used nor written; run the version that wrote it, or name another place in `state`"
            )
        except (OSError, StateError) as error:
            self._barred = StateError(f"{self._earlier} cannot be taken over: {error}")
        return [*self._lost, self._barred]

    def check(self) -> None:
        """Raise StateError unless what is known is what is stored; SupersededError: it was, and may have changed."""
        if not self._read:
            assert self._barred
            raise self._barred
        self._record.check(self.claimed)

    def settle(self) -> None:
        """Have what is known be what is stored, after a change of which it is uncertain whether it came about. Raises
        StateError."""
        self._write(self._kept)

    def believe(self, name: str, entry: K) -> None:
        """`entry` is how the entry `name` reads now; it is written with the next change."""
        self._kept.loaded[name] = entry

    def keep(self, name: str, entry: K, instead_of: str | None = None) -> None:
        """Store that a client loaded `entry` as `name`; `instead_of`: see `forget`. Raises StateError, and then nothing
        is changed; of an UncertainError: until `settle` has seen to it."""
        kept = self._without(name, instead_of)
        self._write(kept.model_copy(update={"loaded": {**kept.loaded, name: entry}}))

    def forget(self, name: str, revision: str | None) -> None:
        """Store that a client unloaded all that is called so. What the configured folder has of that name would come
        back, if it were not for its `revision`. Raises StateError as `keep` does."""
        self._write(self._without(name, revision))

    def _without(self, name: str, revision: str | None) -> Stored[K]:
        changes: dict[str, object] = {
            "loaded": {other: each for other, each in self._kept.loaded.items() if other != name}
        }
        if revision is not None:
            changes["unloaded"] = {**self._kept.unloaded, name: revision}
        return self._kept.model_copy(update=changes)

    def _write(self, kept: Stored[K]) -> None:
        if self._barred:
            raise self._barred
        self._record.write(kept.model_dump_json().encode())
        self._kept = kept

    def _take_over(self) -> list[PliantError]:
        """Store what earlier versions kept in a file, which is then called something else. Raises OSError, StateError.

        One that is not understood is put aside; what is wrong with it."""
        try:
            kept = type(self._kept).model_validate_json(self._earlier.read_bytes())
        except FileNotFoundError:
            return []
        except ValidationError as error:
            aside = _called(self._earlier, "broken")
            return [StateError(f"{self._earlier.name} is no registry ({_reason(error)}); it is now {aside.name}")]
        self._write(kept)
        _called(self._earlier, "taken-over")
        return []


def _called(file: Path, suffix: str) -> Path:
    """`file`, renamed for people to look at."""
    return file.replace(file.with_name(f"{file.name}.{suffix}"))


def _reason(error: ValidationError) -> str:
    return " ".join(str(error.errors(include_url=False)[0]["msg"]).split())
