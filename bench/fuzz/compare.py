"""python -m bench fuzz: a hundred thousand requests that a stranger may send, to every route of a gateway."""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st
from rich.progress import track

from pliant.bench.fuzz.bodies import Request, binary_requests, image_requests, json_requests, page_requests
from pliant.bench.fuzz.campaign import Campaign, Findings, memory_mb
from pliant.bench.fuzz.folders import folder_requests
from pliant.bench.fuzz.house import House
from pliant.bench.report import Figure, Options, Report

_BLOCK = 500
_BLOCKS, _QUICK_BLOCKS = 200, 10
_WARM = 0.1
"""Of all blocks, after which memory is compared."""


def run(options: Options) -> Report:
    """Every block has seeds of its own, so that a run can be repeated."""
    blocks = _QUICK_BLOCKS if options.quick else _BLOCKS
    found, grown_mb = campaign(blocks, _BLOCK)
    statuses = sum((Counter(each.statuses) for each in found), Counter[int]())
    largest = max(found, key=lambda each: each.peak_mb)
    slowest = max(found, key=lambda each: each.blocked_s)
    config = {
        "blocks": blocks,
        "requests_of_a_block": _BLOCK,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "server_errors": [told for each in found for told in each.server_errors],
        "undocumented": [told for each in found for told in each.undocumented],
        "leaks": [told for each in found for told in each.leaks],
        "slowest": slowest.slowest,
        "largest": largest.largest,
    }
    return Report(
        [
            _sum("requests", [each.requests for each in found], ">= 100,000"),
            _sum("server_errors", [len(each.server_errors) for each in found], "0"),
            _sum("undocumented_answers", [len(each.undocumented) for each in found], "0"),
            _sum("leaked_paths", [len(each.leaks) for each in found], "0"),
            _most("loop_blocked_s_max", [each.blocked_s for each in found], "<= 0.25", slowest.slowest[:60]),
            Figure("memory_growth_mb", grown_mb, grown_mb, grown_mb, "<= 50"),
            _most("memory_peak_mb", [each.peak_mb for each in found], "<= 64", largest.largest[:60]),
        ],
        config,
        {},
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Refusals are not logged: there are thousands of them."""
    logger = logging.getLogger("pliant")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def campaign(blocks: int, count: int) -> tuple[list[Findings], float]:
    """What `blocks` of `count` requests found, and by how many MB memory grew since the first of them."""
    with _quiet(), tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        house = House(Path(folder))
        sending = Campaign(runner.run(house.gateway()), Path(folder), runner)
        requests = _requests(house)
        gc.collect()
        gc.freeze()  # what the bench holds, torch among it, no gateway has to look through
        found, warm_mb = [], 0.0
        for number in track(range(blocks), "fuzz", transient=True):
            found.append(sending.block(requests, count, number))
            if number == int(_WARM * blocks):
                warm_mb = memory_mb()
        return found, memory_mb() - warm_mb


def _requests(house: House) -> st.SearchStrategy[Request]:
    others = binary_requests(), image_requests(), page_requests(), folder_requests(house)
    return st.one_of(*[json_requests()] * len(others), *others)


def _sum(name: str, values: list[int], target: str) -> Figure:
    return Figure(name, sum(values), min(values), max(values), target)


def _most(name: str, values: list[float], target: str, beside: str) -> Figure:
    return Figure(name, max(values), min(values), max(values), target, beside)
