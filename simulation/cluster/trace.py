"""Recorded requests of several services, by second: `read` knows the forms in which traces are published."""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pliant.errors import PliantError
from pliant.policies.cluster.attainment import Floats

_LONGEST_S = 31 * 86_400
_MOST_LINES = 20_000_000
_MOST = 10_000_000
"""Requests of a second, or tokens of a request."""


class TraceError(PliantError):
    """A trace that cannot be read, in one line."""


class Load(NamedTuple):
    """What one service is asked."""

    counts: Floats
    """Requests, by second from 0 on."""
    prompt: float
    """Tokens on average; 0 where the trace has none."""
    answer: float


class _Row(NamedTuple):
    second: float
    requests: float = 1.0
    service: str = ""
    prompt: float = 0.0
    answer: float = 0.0


def _azure(row: Sequence[str]) -> _Row:
    return _Row(datetime.fromisoformat(row[0][:26]).timestamp(), 1.0, "", float(row[1]), float(row[2]))


_FORMS: Mapping[str, Callable[[Sequence[str]], _Row]] = {
    "second,service,requests": lambda row: _Row(float(row[0]), float(row[2]), row[1].strip()),
    "second,requests": lambda row: _Row(float(row[0]), float(row[1])),
    "timestamp,contexttokens,generatedtokens": _azure,
    "timestamp,model,request tokens,response tokens,total tokens,log type": lambda row: _Row(
        float(row[0]), 1.0, "", float(row[2]), float(row[3])
    ),
}
"""By header: counts of several services or of one, Azure's LLM traces, and BurstGPT."""
_ALLOWED = "'second,service,requests', 'second,requests', Azure's LLM traces, BurstGPT, or Mooncake's JSON lines"


def read(path: Path, service: str = "") -> dict[str, Load]:
    """By service, from the first request or second 0 on; `service` is that of a file that names none.

    Raises TraceError, with the number of the line.
    """
    counts: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    tokens: defaultdict[str, Floats] = defaultdict(lambda: np.zeros(3))
    first = None
    for line, row in _rows(path):
        first = row.second if first is None and row.second > _LONGEST_S else first or 0.0
        second, name = row.second - first, row.service or service
        if not name:
            raise TraceError(f"{path}: names no service; say which: --trace SERVICE={path}")
        if row.service and service:
            raise TraceError(f"{path}: names services itself; give it as --trace {path}")
        if not 0 <= second < _LONGEST_S:
            raise TraceError(f"{path}:{line}: {second:g} s after the start; must be from 0 to 31 days")
        numbers = (row.requests, row.prompt, row.answer)
        if not all(0 <= number <= _MOST and number % 1 == 0 for number in numbers):
            raise TraceError(f"{path}:{line}: requests and tokens must be whole numbers from 0 to {_MOST:,}")
        counts[name][int(second)] += row.requests
        tokens[name] += numbers
    if not any(any(each.values()) for each in counts.values()):
        raise TraceError(f"{path}: holds no request")
    loads = {}
    for name, each in counts.items():
        dense = np.zeros(max(each) + 1)
        dense[list(each)] = list(each.values())
        requests, prompts, answers = tokens[name].tolist()
        loads[name] = Load(dense, prompts / max(requests, 1), answers / max(requests, 1))
    return loads


def merged(loads: Sequence[Mapping[str, Load]]) -> dict[str, Load]:
    """Of several files, all as long as the longest. Raises TraceError for a service that is in two of them."""
    every: dict[str, Load] = {}
    for each in loads:
        if twice := every.keys() & each.keys():
            raise TraceError(f"{min(twice)} is in two traces; put its requests into one")
        every |= each
    seconds = max(len(load.counts) for load in every.values())
    return {
        name: load._replace(counts=np.pad(load.counts, (0, seconds - len(load.counts)))) for name, load in every.items()
    }


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """With the number of each line."""
    line = 1
    form: Callable[[Sequence[str]], _Row] = _mooncake
    try:
        with path.open(newline="") as file:
            begin = file.readline(_MOST)
            if begin.startswith("{"):
                file.seek(0)
                lines: Iterator[Sequence[str]] = ([text] for text in file)
                line = 0
            else:
                header = ",".join(column.strip().lower() for column in begin.lstrip("\ufeff").split(","))
                if header not in _FORMS:
                    raise TraceError(f"{path}: the first line is {header[:80]!r}; allowed: {_ALLOWED}")
                lines, form = csv.reader(file), _FORMS[header]
            for fields in islice(lines, _MOST_LINES + 1):
                line += 1
                if line > _MOST_LINES:
                    raise TraceError(f"{path}: has more than {_MOST_LINES:,} lines")
                if any(field.strip() for field in fields):
                    row = form(fields)
                    if not math.isfinite(row.second):
                        raise ValueError(f"time is {row.second}")
                    yield line, row
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, TypeError, csv.Error) as error:
        raise TraceError(f"{path}:{line}: cannot be read: {error}") from None


def _mooncake(fields: Sequence[str]) -> _Row:
    given = json.loads(fields[0])
    return _Row(given["timestamp"] / 1e3, 1.0, "", float(given["input_length"]), float(given["output_length"]))
