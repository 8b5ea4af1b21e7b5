"""Reads the files of adapters and tasks, which strangers may have written: bounded, and without torch or pickle.

Files are opened once, links are not followed, and nothing is mapped: whoever changes a file meanwhile gets an error.

Whatever is in a file, it is either understood or refused with a ValueError that says what is wrong with it.
"""

import json
import math
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""What tensors may be stored as, and how many bytes each number then takes."""
MOST_BYTES = 2**21
"""Of JSON; ten times what the largest model's adapter needs."""
_SAMPLED = 2**16
"""Bytes of numbers at the file's beginning and at its end, by which it is recognised: training changes them all."""
_SHOWN = 80
"""Characters of foreign text in a message."""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file."""

    dtype: str
    """One of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    start: int
    """Where its bytes begin and end, counted from the first tensor's."""
    stop: int


class StoredTensors(NamedTuple):
    """What a safetensors file says before its numbers."""

    tensors: dict[str, StoredTensor]
    """By name."""
    begin: int
    """Where the first begins in the file."""
    identity: bytes
    """Differs for other numbers, as far as the first and the last of them show; copies of a file have the same."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


class TensorFile:
    """An open safetensors file, of which each tensor is read on its own."""

    def __init__(self, descriptor: int, stored: StoredTensors) -> None:
        self.tensors = stored.tensors
        self._begin = stored.begin
        self._descriptor = descriptor

    def read(self, name: str) -> bytearray:
        """The numbers of a tensor as they are stored, little end first.

        They are copied, never mapped: a file that is cut off meanwhile would end the process. Raises ValueError then,
        and if there is no such tensor.
        """
        if name not in self.tensors:
            raise ValueError(f"has no {shown(name)}")
        tensor = self.tensors[name]
        raw = bytearray(tensor.stop - tensor.start)
        begin, read = self._begin + tensor.start, 0
        while read < len(raw):
            count = os.preadv(self._descriptor, [memoryview(raw)[read:]], begin + read)
            if not count:
                raise ValueError(f"was cut off at byte {begin + read:,} while it was read")
            read += count
        return raw


def read_object(file: Path) -> tuple[dict[str, Any], bytes]:
    """The JSON object in `file`, and the bytes that it was read from. Raises ValueError."""
    with _opened(file) as (opened, size):
        if size > MOST_BYTES:
            raise ValueError(f"has {size:,} bytes; at most {MOST_BYTES:,} are read")
        raw = opened.read(MOST_BYTES)
    return _object(raw), raw


def read_tensors(file: Path, dtypes: Mapping[str, int] = DTYPE_BYTES, most_dimensions: int = 2) -> StoredTensors:
    """Which tensors a safetensors file holds. The file's size must fit the numbers, of which a sample is read.

    Raises ValueError for what the safetensors library would not read either, and for tensors whose numbers are stored
    as none of `dtypes`, which gives the bytes of each, or that have more than `most_dimensions`.
    """
    with _opened(file) as (opened, size):
        return _header(opened, size, dtypes, most_dimensions)


@contextmanager
def opened_tensors(
    file: Path, dtypes: Mapping[str, int] = DTYPE_BYTES, most_dimensions: int = 2
) -> Iterator[TensorFile]:
    """A safetensors file whose numbers are to be read. Arguments and errors are those of `read_tensors`."""
    with _opened(file) as (opened, size):
        yield TensorFile(opened.fileno(), _header(opened, size, dtypes, most_dimensions))


def shown(text: object) -> str:
    """Foreign text as it may stand in a message of one line."""
    given = repr(text[:_SHOWN]) if isinstance(text, str) else reprlib.repr(text)
    escaped = given.encode("ascii", "backslashreplace").decode()
    return escaped if len(escaped) <= _SHOWN else f"{escaped[: _SHOWN - 3]}..."


def _header(opened: BinaryIO, size: int, dtypes: Mapping[str, int], most_dimensions: int) -> StoredTensors:
    length = int.from_bytes(opened.read(8), "little")
    if size < 8 + length:
        raise ValueError(f"is cut off: {size:,} bytes, of which the header alone should take {8 + length:,}")
    if length > MOST_BYTES:
        raise ValueError(f"has a header of {length:,} bytes; at most {MOST_BYTES:,} are read")
    raw = opened.read(length)
    first = opened.read(_SAMPLED)
    opened.seek(max(8 + length, size - _SAMPLED))
    sample = first + opened.read(_SAMPLED)
    entries = _object(raw)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("has a __metadata__ that is not all text")
    found = {name: _tensor(name, entry, dtypes, most_dimensions) for name, entry in entries.items()}
    end = 0
    for name, tensor in sorted(found.items(), key=lambda item: item[1][2:]):
        if tensor.start != end:
            raise ValueError(f"has {shown(name)} at byte {tensor.start:,} of its data instead of {end:,}")
        end = tensor.stop
    if size != 8 + length + end:
        raise ValueError(f"has {size - 8 - length:,} bytes of data, but its header describes {end:,}; is it cut off?")
    return StoredTensors(found, 8 + length, b"%d " % size + raw + sample)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A plain file and its size. A link may lead anywhere and a pipe may never answer, so neither is opened."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a link; put what it leads to there" if file.is_symlink() else f"cannot be opened: {error.strerror}"
        raise ValueError(reason) from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ValueError("is no plain file")
    with open(descriptor, "rb") as opened:
        yield opened, found.st_size


def _object(raw: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise ValueError(f"holds {constant}, which is no number")

    try:
        found = json.loads(raw.decode(), parse_constant=refuse)
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("holds no JSON object")
    return found


def _tensor(name: str, entry: Any, dtypes: Mapping[str, int], most: int) -> StoredTensor:
    """What the header says of a tensor."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"does not say dtype, shape and data_offsets of {shown(name)}") from None
    if len(shape) > most or not all(type(number) is int and 0 <= number < 2**48 for number in (*shape, start, stop)):
        raise ValueError(f"says of {shown(name)} what is no size of {'a matrix' if most == 2 else 'a tensor'}")
    if dtype not in tuple(dtypes):
        raise ValueError(f"stores {shown(name)} as {shown(dtype)}; choose one of {', '.join(dtypes)}")
    if stop - start != math.prod(shape) * dtypes[dtype]:
        size = " x ".join(map(str, shape))
        raise ValueError(f"keeps {stop - start} bytes for {shown(name)}, which is {size} in {dtype}")
    return StoredTensor(dtype, shape, start, stop)
