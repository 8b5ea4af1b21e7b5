"""What is asked of a simulated replica with pages: single requests, conversations, and a trace with shared prefixes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pliant.bench.adapters.workload import Lengths, Population
from pliant.simulation.arrivals import Integers
from pliant.simulation.llm.one_pass import Turn

MOONCAKE = "mooncake/synthetic_trace.jsonl"
BLOCK = 512
"""Tokens that an id of the trace stands for."""
THINK_S = 30.0
"""From an answer's arrival as it would be alone to the next turn of its conversation, on average."""
READING_S = 0.05
"""What a conversation is taken to wait for each token of an answer before it thinks."""

_MANY = 2**40
"""Ids of tokens that occur once; each request has its own."""


def singles(rate: float, seconds: float, lengths: Lengths, seed: int) -> list[Turn]:
    """Poisson arrivals of requests that share nothing. The same seed draws the same requests at another pace."""
    rng = np.random.default_rng(seed)
    count = max(1, round(rate * seconds))
    at_s = np.cumsum(rng.exponential(1.0, count)) / rate
    pairs = rng.integers(len(lengths.prompts), size=count)
    return [
        Turn(float(at), _own(number, int(lengths.prompts[pair])), range(int(lengths.outputs[pair])))
        for number, (at, pair) in enumerate(zip(at_s, pairs, strict=True))
    ]


def conversations(
    rate: float, seconds: float, lengths: Lengths, turns: float, seed: int, adapters: Population | None = None
) -> tuple[list[Turn], Integers]:
    """`rate` turns a second, of conversations with `turns` turns on average; also which turn of its own each is.

    A turn says what was said and answered before, and something new: as long as a drawn prompt at first, a fifth of one
    later. Each conversation is with one adapter. The same seed draws the same conversations at another pace.
    """
    rng = np.random.default_rng(seed)
    count = max(1, round(rate * seconds / turns))
    starts = np.cumsum(rng.exponential(1.0, count)) * turns / rate
    chosen = rng.choice(len(adapters.ranks), size=count, p=adapters.shares) if adapters else np.full(count, -1)
    asked: list[tuple[Turn, int]] = []
    for number in range(count):
        said: list[int] = []
        at_s = float(starts[number])
        for turn in range(int(rng.geometric(1 / turns))):
            prompt, output = (int(part[rng.integers(len(part))]) for part in (lengths.prompts, lengths.outputs))
            new = _own((number * 64 + turn) * 2, prompt if not turn else max(1, prompt // 5))
            answer = _own((number * 64 + turn) * 2 + 1, output)
            said = [*said, *new]
            if len(said) + output > int(lengths.prompts.max()) * 2:
                break
            asked.append((Turn(at_s, said, answer, int(chosen[number])), turn))
            said = [*said, *answer]
            at_s += output * READING_S + float(rng.exponential(THINK_S))
    asked.sort(key=lambda pair: pair[0].at_s)
    return [turn for turn, _ in asked], np.array([number for _, number in asked])


def shared_prefixes(data: Path, scale: int, pace: float) -> list[Turn]:
    """Mooncake's trace, lengths divided by `scale`, `pace` times as fast; who shares what is as there."""
    path = data / MOONCAKE
    if not path.exists():
        raise SystemExit(f"{data}: holds no {MOONCAKE}")
    block = BLOCK // scale
    turns = []
    with path.open() as file:
        for line in file:
            row = json.loads(line)
            tokens = [id * block + at for id in row["hash_ids"] for at in range(block)]
            tokens = tokens[: max(1, row["input_length"] // scale)]
            answer = range(max(1, row["output_length"] // scale))
            turns.append(Turn(row["timestamp"] / 1000 / pace, tokens, answer))
    return sorted(turns, key=lambda turn: turn.at_s)


def apart(turns: Sequence[Turn]) -> list[Turn]:
    """The same, where no two share anything."""
    return [turn._replace(tenant=number) for number, turn in enumerate(turns)]


def _own(number: int, tokens: int) -> range:
    """Tokens that no other request says."""
    start = _MANY + number * 2**20
    return range(start, start + tokens)
