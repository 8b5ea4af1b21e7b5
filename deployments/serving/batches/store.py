"""Clients' files, and batches of requests in them: they outlive gateways, the planner and nodes, in `state`.

All that is stored is created once and never changed, so gateways need nobody between them. A batch is a folder:

- `batch`: what was asked for;
- `lease.N`: which gateway works on it, and until when; the highest N counts, and only one gateway can create it;
- `part.FIRST.COMPLETED.FAILED`: the answers to the lines from FIRST on; of several with one FIRST, the first by name;
- `cancelled`: nothing more is to be done;
- `finished`: how it ended.

All of this blocks, but for `in_thread`, and raises OSError.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.state.storage import Storage

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=BaseModel)
Status = Literal["in_progress", "cancelling", "completed", "failed", "expired", "cancelled"]
"""Failed: its file was deleted."""

GOOD = 200
"""The status of a request that has an answer."""
PART_LINES = 16
"""Requests whose answers are stored together: so many may be computed again after a gateway died."""
_MOST_FILES = 256
"""Of one tenant, those that batches wrote not counted."""
_MOST_BATCHES = 128
"""Of one tenant; of those that ended, the oldest make way."""
_THREADS = 4
_LEASE_S = 30.0
_WINDOW_S = 24 * 3600
_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}")
_OUTPUT = "batch_output"
_FILES, _BATCHES = "batches/files", "batches/jobs"


class _Stored(BaseModel):
    """Fields that another version has beside these are ignored."""

    model_config = ConfigDict(frozen=True)


class File(_Stored):
    """What a client sent, or a batch wrote."""

    id: str
    owner: str
    """The tenant."""
    filename: str
    purpose: str
    bytes: int
    created_at: int


class Batch(_Stored):
    """What is to be answered: each line of a file, by `endpoint`."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    total: int
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None


class Finished(_Stored):
    """How a batch ended."""

    status: Status
    at: int
    completed: int
    failed: int
    output_file_id: str | None = None
    error_file_id: str | None = None


class _Lease(_Stored):
    gateway: str
    until: float


class Progress(NamedTuple):
    """How far a batch is."""

    batch: Batch
    status: Status
    completed: int
    failed: int
    finished: Finished | None = None


class Part(NamedTuple):
    """Answers that are stored: those to the lines from `first` on."""

    first: int
    completed: int
    failed: int
    name: str


class BatchStore:
    """All of `storage`. Clock times are in seconds since 1970, as several machines share them."""

    def __init__(self, storage: Storage, now: Callable[[], float] = time.time) -> None:
        self._storage = storage
        self._threads = ThreadPoolExecutor(_THREADS, "batches")
        self.now = now

    async def in_thread(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `method` answers, which uses the storage. The store has a few threads of its own, so that a storage that
        does not answer holds up nothing else."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(method, *args, **kwargs))

    # Files

    def add_file(self, owner: str, filename: str, purpose: str, content: bytes) -> File:
        """Raises RequestError if `owner` has too many."""
        sent = [file for file in self.files(owner) if file.purpose != _OUTPUT]
        if purpose != _OUTPUT and len(sent) >= _MOST_FILES:
            reason = f"tenant {owner} has {_MOST_FILES} files, which is the most; delete some"
            raise RequestError(Outcome.REJECTED, reason)
        file = File(
            id=f"file-{self._new_id()}",
            owner=owner,
            filename=filename,
            purpose=purpose,
            bytes=len(content),
            created_at=int(self.now()),
        )
        self._storage.create(f"{_FILES}/{file.id}.content", content)
        try:
            self._storage.create(f"{_FILES}/{file.id}", file.model_dump_json().encode())
        except OSError:
            self._storage.remove(f"{_FILES}/{file.id}.content")
            raise
        return file

    def files(self, owner: str) -> list[File]:
        """The newest first."""
        names = [name for name in self._storage.names(_FILES) if _ID.fullmatch(name)]
        found = [file for name in names if (file := self._read_file(name)) and file.owner == owner]
        return sorted(found, key=lambda file: file.id, reverse=True)

    def file(self, owner: str, id: str) -> File:
        """Raises RequestError."""
        file = self._read_file(id) if _ID.fullmatch(id) else None
        if file is None or file.owner != owner:
            raise RequestError(Outcome.REJECTED, f"there is no file {id[:100]!r}", fault=Fault.NOT_FOUND)
        return file

    def content(self, owner: str, id: str) -> bytes:
        """Raises RequestError."""
        return self._storage.read(f"{_FILES}/{self.file(owner, id).id}.content")

    def delete_file(self, owner: str, id: str) -> None:
        """Raises RequestError."""
        file = self.file(owner, id)
        self._storage.remove(f"{_FILES}/{file.id}")
        self._storage.remove(f"{_FILES}/{file.id}.content")

    def _read_file(self, id: str) -> File | None:
        return self._read(File, f"{_FILES}/{id}")

    def _read(self, form: type[S], path: str) -> S | None:
        """None if it is not there, or only the half of it, as after a power cut where there are no hard links."""
        try:
            return form.model_validate_json(self._storage.read(path))
        except (FileNotFoundError, ValidationError):
            return None

    # Batches

    def add_batch(
        self, owner: str, endpoint: str, input_file_id: str, total: int, metadata: dict[str, str] | None
    ) -> Progress:
        """Raises RequestError if `owner` has too many that have not ended."""
        there = self.batches(owner)
        for old in there[_MOST_BATCHES - 1 :]:
            if not old.finished:
                reason = f"tenant {owner} has {_MOST_BATCHES} batches, which is the most; cancel some"
                raise RequestError(Outcome.SHED, reason, _LEASE_S)
            self._remove(old)
        now = int(self.now())
        batch = Batch(
            id=f"batch_{self._new_id()}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file_id,
            total=total,
            created_at=now,
            expires_at=now + _WINDOW_S,
            metadata=metadata,
        )
        self._create(batch, "batch", batch)
        return self.progress(batch)

    def batches(self, owner: str) -> list[Progress]:
        """The newest first."""
        return [self.progress(batch) for batch in self._all(newest_first=True) if batch.owner == owner]

    def batch(self, owner: str, id: str) -> Progress:
        """Raises RequestError."""
        batch = self._read_batch(id) if _ID.fullmatch(id) else None
        if batch is None or batch.owner != owner:
            raise RequestError(Outcome.REJECTED, f"there is no batch {id[:100]!r}", fault=Fault.NOT_FOUND)
        return self.progress(batch)

    def progress(self, batch: Batch) -> Progress:
        """How far `batch` is."""
        names = self._names(batch)
        if "finished" in names and (end := self._read(Finished, f"{_BATCHES}/{batch.id}/finished")):
            return Progress(batch, end.status, end.completed, end.failed, end)
        parts = _parts(names)
        status: Status = "cancelling" if "cancelled" in names else "in_progress"
        completed, failed = sum(part.completed for part in parts), sum(part.failed for part in parts)
        return Progress(batch, status, completed, failed)

    def unfinished(self) -> list[Progress]:
        """Of all tenants, the oldest first."""
        found = map(self.progress, self._all(newest_first=False))
        return [progress for progress in found if not progress.finished]

    def cancel(self, batch: Batch) -> None:
        """Do nothing more for `batch`."""
        with suppress(FileExistsError):
            self._storage.create(f"{_BATCHES}/{batch.id}/cancelled", b"")

    def is_cancelled(self, batch: Batch) -> bool:
        """Whether nothing more is to be done for it."""
        return "cancelled" in self._names(batch)

    def _all(self, newest_first: bool) -> Iterator[Batch]:
        ids = filter(_ID.fullmatch, self._storage.names(_BATCHES))
        for id in sorted(ids, reverse=newest_first):
            if batch := self._read_batch(id):
                yield batch

    def _read_batch(self, id: str) -> Batch | None:
        return self._read(Batch, f"{_BATCHES}/{id}/batch")

    def _remove(self, old: Progress) -> None:
        """Forget a batch that has ended, and what it wrote."""
        batch = old.batch
        for file in self.files(batch.owner):  # more than two if a gateway died over them
            if file.purpose == _OUTPUT and file.filename.startswith(f"{batch.id}_"):
                with suppress(RequestError, FileNotFoundError):
                    self.delete_file(batch.owner, file.id)
        for name in sorted(self._names(batch), key=lambda name: name == "batch"):
            self._storage.remove(f"{_BATCHES}/{batch.id}/{name}")

    # Work

    def lease(self, batch: Batch, gateway: str) -> bool:
        """Have `batch` for `gateway` for the next half a minute; False if another gateway has it."""
        names = self._names(batch)
        numbers = sorted(int(name.partition(".")[2]) for name in names if name.startswith("lease."))
        if numbers:
            latest = self._read(_Lease, self._lease(batch, numbers[-1]))
            if latest and latest.gateway != gateway and latest.until > self.now():
                return False
        number = numbers[-1] + 1 if numbers else 0
        try:
            self._create(batch, f"lease.{number:08}", _Lease(gateway=gateway, until=self.now() + _LEASE_S))
        except FileExistsError:
            return False
        for old in numbers:
            with suppress(OSError):
                self._storage.remove(self._lease(batch, old))
        return True

    def parts(self, batch: Batch) -> list[Part]:
        """What of it is answered."""
        return _parts(self._names(batch))

    def add_part(self, batch: Batch, first: int, answers: list[str], failed: int) -> None:
        """Store the `answers`, as lines of JSON, to the requests from the line `first` on."""
        name = f"part.{first:08}.{len(answers) - failed}.{failed}"
        with suppress(FileExistsError):  # the same, by who had the batch before
            self._storage.create(f"{_BATCHES}/{batch.id}/{name}", "\n".join(answers).encode())

    def finish(self, batch: Batch, status: Status) -> None:
        """Write what was answered into files, and have the batch end so. Raises OSError if some of it is damaged, which
        is then to be answered again."""
        if self.progress(batch).finished:
            return
        if "finished" in self._names(batch):  # the half of it
            self._storage.remove(f"{_BATCHES}/{batch.id}/finished")
        good: list[bytes] = []
        bad: list[bytes] = []
        parts = self.parts(batch)
        for part in parts:
            for line, is_good in self._answers(batch, part):
                (good if is_good else bad).append(line)
        files = [
            self.add_file(batch.owner, f"{batch.id}_{kind}.jsonl", _OUTPUT, b"\n".join(lines) + b"\n").id
            if lines
            else None
            for kind, lines in (("output", good), ("error", bad))
        ]
        end = Finished(
            status=status,
            at=int(self.now()),
            completed=len(good),
            failed=len(bad),
            output_file_id=files[0],
            error_file_id=files[1],
        )
        with suppress(FileExistsError):
            self._create(batch, "finished", end)
        for part in parts:
            self._storage.remove(f"{_BATCHES}/{batch.id}/{part.name}")

    def _answers(self, batch: Batch, part: Part) -> list[tuple[bytes, bool]]:
        """The lines of `part`, and whether there is an answer in them. One that is damaged is removed."""
        path = f"{_BATCHES}/{batch.id}/{part.name}"
        lines = self._storage.read(path).split(b"\n")
        try:
            responses = [json.loads(line)["response"] for line in lines]
        except ValueError:
            responses = []
        if len(responses) != part.completed + part.failed:
            self._storage.remove(path)
            raise OSError(f"{part.name} of {batch.id} is damaged")
        return [(line, bool(each) and each["status_code"] == GOOD) for line, each in zip(lines, responses, strict=True)]

    def _names(self, batch: Batch) -> list[str]:
        return self._storage.names(f"{_BATCHES}/{batch.id}")

    def _create(self, batch: Batch, name: str, content: _Stored) -> None:
        self._storage.create(f"{_BATCHES}/{batch.id}/{name}", content.model_dump_json().encode())

    def _lease(self, batch: Batch, number: int) -> str:
        return f"{_BATCHES}/{batch.id}/lease.{number:08}"

    def _new_id(self) -> str:
        """Later ones sort behind earlier ones."""
        return f"{round(self.now() * 1e3):012x}{secrets.token_hex(6)}"


def lines_of(content: bytes) -> list[bytes]:
    """Of a file of requests, those that have something in them."""
    return [line for line in content.splitlines() if line.strip()]


def _parts(names: list[str]) -> list[Part]:
    found: dict[int, Part] = {}
    for name in sorted(names):
        if name.startswith("part."):
            first, completed, failed = map(int, name.split(".")[1:])
            found.setdefault(first, Part(first, completed, failed, name))
    return list(found.values())
