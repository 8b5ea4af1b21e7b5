"""What a language model earns by its number of replicas: tokens per second of answers that keep TTFT and TPOT.

A replica computes prompts and decode steps in turn. With L live answers a step takes `step_s + row_s * L`, and a share
of the time goes to prompts, so a token takes step / (1 - share). That grows with the rate, and TPOT bounds it: with it
the rate that a replica carries. What comes beyond waits for a slot, as long as TTFT allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pliant.policies.cluster.attainment import Floats, in_time, mixed

_HALVINGS = 50


@dataclass(frozen=True)
class Speeds:
    """Of one replica, as measured."""

    prompt_token_s: float
    """Seconds for a token of a prompt."""
    step_s: float
    """Of a decode step without rows."""
    row_s: float
    """More, for each live answer."""
    slots: int
    """Answers that may be live, by memory or configuration."""
    adapter_load_s: float = 0.0


@dataclass(frozen=True)
class Lengths:
    """Of requests, on average."""

    prompt: float
    answer: float
    variation: float = 1.0
    """The squared coefficient of variation of what a request takes."""
    adapter_misses: float = 0.0
    """The share of requests whose adapter must be loaded first."""


@dataclass(frozen=True)
class Objectives:
    ttft_s: float
    tpot_s: float


def prompt_s(speeds: Speeds, lengths: Lengths) -> float:
    """Seconds until the first token, on an idle replica."""
    return lengths.prompt * speeds.prompt_token_s + lengths.adapter_misses * speeds.adapter_load_s + speeds.step_s


def live(speeds: Speeds, lengths: Lengths, rate: float) -> float:
    """Answers that are live on a replica that gets `rate` requests per second; infinite where it cannot keep up."""
    left = 1 - rate * lengths.prompt * speeds.prompt_token_s
    spare = left - rate * lengths.answer * speeds.row_s
    return rate * lengths.answer * speeds.step_s / spare if left > 0 and spare > 0 else np.inf


def carried(speeds: Speeds, lengths: Lengths, objectives: Objectives) -> float:
    """Requests per second that a replica carries with TPOT kept and live answers within its slots."""
    low, high = 0.0, 1 / max(lengths.prompt * speeds.prompt_token_s + lengths.answer * speeds.row_s, 1e-12)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        answers = live(speeds, lengths, middle)
        within = answers <= speeds.slots and answers <= middle * lengths.answer * objectives.tpot_s
        low, high = (middle, high) if within else (low, middle)
    return low


def value_curve(
    speeds: Speeds, lengths: Lengths, objectives: Objectives, rate: float, most: int, spread: float = 0.0
) -> Floats:
    """Tokens of answers per second that keep both objectives, with 0 to `most` replicas, `rate` requests per second.

    `spread` is the standard deviation of rates over their forecast.
    """
    each = carried(speeds, lengths, objectives)
    patience_s = objectives.ttft_s - prompt_s(speeds, lengths)
    curve = np.zeros(most + 1)
    if rate <= 0 or each <= 0 or patience_s < 0:
        return curve
    slots = max(1, min(speeds.slots, int(live(speeds, lengths, each) + 1e-6)))
    for replicas in range(1, most + 1):
        curve[replicas] = np.mean(
            [
                one * in_time(one, replicas * slots, slots / each, patience_s, (1 + lengths.variation) / 2)
                for one in mixed(rate, spread).tolist()
            ]
        )
        if curve[replicas] >= (1 - 1e-9) * rate:
            curve[replicas:] = curve[replicas]
            break
    rising: Floats = lengths.answer * np.maximum.accumulate(curve)
    return rising
