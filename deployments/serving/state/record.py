"""One piece of state, as generations in files of their own: NAME.000001, NAME.000002 ...; only the latest who claimed
it may change it.

Whoever wants to change a record claims it first, by a generation without content, which begins an epoch. It reads what
the generations before hold, and writes that and each change as the next one. A file is created only where there is none
of its name, and what was written counts only if it is the newest once it is there. So whoever was cut off, or is the
old one of two in a rolling upgrade, finds newer generations than its own, whatever clocks say: nothing that was
acknowledged is overwritten.

All of this blocks, and is called by one thread at a time.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from contextlib import suppress
from typing import NamedTuple

from pliant.deployments.serving.state.storage import Storage
from pliant.errors import PliantError

_FORMAT = 1
_KEPT = 3
"""Contents that are kept, the latest included: whatever is damaged, one before it may be whole."""
_ATTEMPTS = 100
"""To write a generation while others write some."""


class StateError(PliantError):
    """State cannot be read or written now, and why; or never by this version."""


class UncertainError(StateError):
    """A change seemed to fail, and may have come about."""


class SupersededError(StateError):
    """Somebody else has claimed the record since."""


class _DamagedError(Exception):
    """A file is not as it was written."""


class _Generation(NamedTuple):
    """A file, as it was written."""

    epoch: int
    """The generation by which the writer claimed the record."""
    writer: str
    claim: bool
    """It has no content: what earlier ones hold is still so."""
    content: bytes


class Found(NamedTuple):
    """What a record held when it was claimed."""

    content: bytes
    """Empty: nothing has been written yet, or nothing is left of it."""
    problems: tuple[StateError, ...]
    """Files that were damaged, and what is used instead."""


class Record:
    """The record `name`, a path, of `storage`. `claim` comes first."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.name = name
        self._storage = storage
        self._folder, _, self._base = name.rpartition("/")
        self._pattern = re.compile(rf"{re.escape(self._base)}\.(\d{{6,}})")
        self._writer = uuid.uuid4().hex
        self._epoch = 0
        self._next = 0
        self._contents: list[int] = []
        """Generations that have content, in order; some are removed by now."""
        self._looked: set[int] | None = None
        """The generations that there were when it was read without a claim."""

    def claim(self) -> Found:
        """Become the only one who may write, and read what there is. Raises StateError."""
        try:
            self.look()  # what this version does not understand is not claimed either
            for _ in range(_ATTEMPTS):
                self._epoch = max(self._generations(), default=0) + 1
                self._next = self._epoch + 1
                with suppress(FileExistsError, SupersededError):
                    self._create(self._epoch, claim=True, content=b"")
                    if max(self._generations(), default=0) == self._epoch:
                        found = self._read()
                        self.write(found.content)
                        return found
        except OSError as error:
            raise StateError(f"the state {self.name} cannot be read, or not be written: {_reason(error)}") from None
        raise StateError(f"the state {self.name} is claimed by others again and again; let one planner have it")

    def look(self) -> bytes:
        """What it holds, for one who cannot claim it; somebody else may be writing. Raises StateError."""
        try:
            self._looked = self._generations()
            for number in sorted(self._looked, reverse=True):
                with suppress(FileNotFoundError, _DamagedError):
                    if not (found := self._load(number)).claim:
                        return found.content
        except OSError as error:
            raise StateError(f"the state {self.name} cannot be read: {_reason(error)}") from None
        return b""

    def check(self, claimed: bool) -> None:
        """Raise SupersededError if somebody else has claimed it since, StateError if that cannot be found out.

        Where it could not be `claimed`: raise StateError if somebody may have written since it was looked at."""
        try:
            generations = self._generations()
            newest = max(generations, default=0)
            superseded = claimed and newest >= self._next and not self._may_be_mine(newest)
        except OSError as error:
            raise StateError(f"the state {self.name} cannot be read: {_reason(error)}") from None
        if superseded:
            raise self._superseded()
        if not claimed and generations != self._looked:
            raise StateError(f"the state {self.name} could not be claimed, and has changed since it was read")

    def write(self, content: bytes) -> None:
        """Have `content` be what the record holds, durably. Raises StateError: then it holds what it did. Of an
        UncertainError: or `content`, if more was done than the storage said, until the next write settles it.
        SupersededError is for good."""
        try:
            for _ in range(_ATTEMPTS):
                try:
                    self._create(self._next, claim=False, content=content)
                except FileExistsError:
                    if not self._may_be_mine(self._next):
                        raise self._superseded() from None
                else:
                    self._confirm(self._next)
                    return
                self._next += 1
        except OSError as error:
            failed = StateError if self._left_nothing(self._next) else UncertainError
            raise failed(f"the state {self.name} cannot be written: {_reason(error)}") from None
        raise StateError(f"the state {self.name} cannot be written: its storage is not as it was a moment ago")

    def _read(self) -> Found:
        """What generations before the claim hold; nobody else acknowledges any more."""
        whole: list[tuple[int, bytes]] = []
        damaged = []
        for number in sorted(self._generations(), reverse=True):
            try:
                found = self._load(number)
            except FileNotFoundError:
                continue
            except _DamagedError as error:
                if not whole:
                    damaged.append(self._put_aside(number, error))
                continue
            if not found.claim:
                whole.append((number, found.content))
            if len(whole) == _KEPT:
                break
        self._contents = sorted(number for number, _ in whole)
        used, content = whole[0] if whole else (0, b"")
        instead = f"generation {used} is used" if used else "nothing before it is left"
        return Found(content, tuple(StateError(f"{problem}; {instead}") for problem in damaged))

    def _confirm(self, number: int) -> None:
        """Make sure that `number`, which has been created, is the newest: one of that name may have been there and been
        removed by who claimed the record since. Otherwise it stays, as that one may have read it."""
        generations = self._generations()
        if max(generations, default=0) != number:
            raise self._superseded()
        self._next = number + 1
        self._contents = [*self._contents, number][-_KEPT:]
        for old in generations - {*self._contents}:
            with suppress(OSError):  # whoever writes next tries again
                self._storage.remove(self._path(old))

    def _create(self, number: int, *, claim: bool, content: bytes) -> None:
        header = {"format": _FORMAT, "epoch": self._epoch, "writer": self._writer, "claim": claim}
        body = json.dumps(header).encode() + b"\n" + content
        self._storage.create(self._path(number), _digest(body) + b"\n" + body)

    def _load(self, number: int) -> _Generation:
        """Raises OSError, _DamagedError, or StateError for a format of the future."""
        digest, _, body = self._storage.read(self._path(number)).partition(b"\n")
        if digest != _digest(body):
            raise _DamagedError("its checksum is wrong")
        header, _, content = body.partition(b"\n")
        try:
            found = json.loads(header)
            form = int(found["format"])
            generation = _Generation(found["epoch"], found["writer"], found["claim"], content)
        except (ValueError, KeyError, TypeError) as error:
            raise _DamagedError(repr(error)) from None
        if form > _FORMAT:
            raise StateError(
                f"the state {self.name} was written by a newer pliant (format {form}), so it is neither used nor "
                "written; run that version, or name another place in `state`"
            )
        return generation

    def _may_be_mine(self, number: int) -> bool:
        """Whether `number` is of a write of ours that seemed to fail. Half a file is nobody's: whoever writes it finds
        a newer one, and tries again."""
        try:
            return self._load(number).writer == self._writer
        except FileNotFoundError:
            return False
        except _DamagedError:
            return True

    def _left_nothing(self, number: int) -> bool:
        """Whether it is known that no attempt to write `number` came to anything that others read."""
        try:
            self._load(number)
        except (FileNotFoundError, _DamagedError):
            return True
        except (OSError, StateError):
            pass
        return False

    def _put_aside(self, number: int, error: _DamagedError) -> str:
        path = self._path(number)
        aside = f"{path}.broken"
        try:
            self._storage.rename(path, aside)
        except OSError as failed:
            return f"{path} is damaged ({error}), and cannot be put aside: {_reason(failed)}"
        return f"{path} is damaged ({error}); it is now {aside}"

    def _superseded(self) -> SupersededError:
        return SupersededError(
            f"another planner has taken over the state {self.name}; look whether this came about, and retry; if two "
            "clusters share the state, give each its own"
        )

    def _generations(self) -> set[int]:
        matches = map(self._pattern.fullmatch, self._storage.names(self._folder))
        return {int(match[1]) for match in matches if match}

    def _path(self, number: int) -> str:
        return f"{self.name}.{number:06}"


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _reason(error: OSError) -> str:
    return " ".join(str(part) for part in (error.filename, error.strerror or error) if part)
