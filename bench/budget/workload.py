"""Seven services on 64 GPUs for a day, whose loads are real traces shifted to disagree in time."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np

from pliant.policies.cluster.attainment import Floats
from pliant.policies.cluster.budget import Nodes, Shape
from pliant.policies.llm import value_curve as llm
from pliant.simulation import curves
from pliant.simulation.cluster.simulator import PERIOD_S, Cascaded, Served

DAY = 86_400
NODES = (Nodes(8, 8),)
_HOUR = 3600

_CHAT = llm.Speeds(prompt_token_s=0.00006, step_s=0.015, row_s=0.0003, slots=96)
_CODE = llm.Speeds(prompt_token_s=0.00015, step_s=0.025, row_s=0.0005, slots=64)
_ROW_S = np.array([0.0015, 0.0025, 0.0040, 0.0060])
_ACCURACY = np.array([0.80, 0.90, 0.94, 0.95])
_GAINS = _ACCURACY / _ACCURACY.max()
_IMAGE_SLO_S = 0.3


def twitter_days(data: Path) -> Floats:
    """Requests of three days by second, holes filled in."""
    with gzip.open(data / "twitter_trace/twitter_rps_days_1_3.txt.gz", "rt") as file:
        return _filled(np.loadtxt(file))


def twitter_bins(data: Path) -> Floats:
    """Requests of five days by two minutes, holes filled in."""
    table = np.loadtxt(data / "twitter_trace/twitter_2min_days_1_5.csv", delimiter=",", skiprows=1)
    return _filled(table[:, 2])


def _filled(counts: Floats) -> Floats:
    there = np.flatnonzero(counts > 0)
    filled: Floats = np.interp(np.arange(len(counts)), there, counts[there])
    return filled


def _azure(data: Path) -> tuple[Floats, float, float]:
    """Conversations by second over a day and the one before, and the mean tokens of prompts and answers.

    The shape of the day is that of Azure Functions, and within each hour that of the hour that was recorded.
    """
    with (data / "azure_llm_2023/AzureLLMInferenceTrace_conv.csv").open() as file:
        rows = list(csv.DictReader(file))
    times = np.array([np.datetime64(row["TIMESTAMP"][:26]) for row in rows])
    seconds = (times - times[0]) / np.timedelta64(1, "s")
    counts = np.bincount(seconds.astype(np.int64)).astype(np.float64)
    kernel = np.ones(30) / 30
    hour = np.convolve(counts, kernel, mode="same")
    table = np.loadtxt(data / "azure_functions/diffserve_maf_original_invocations.csv", delimiter=",", skiprows=1)
    shape = table[:48, 2]
    shape = (shape - shape.min()) / (shape.max() - shape.min())
    days = np.interp(np.arange(2 * DAY) / _HOUR, np.arange(48), 0.3 + 0.7 * shape)
    prompt, answer = (float(np.mean([int(row[key]) for row in rows])) for key in ("ContextTokens", "GeneratedTokens"))
    return days * np.resize(hour / hour.mean(), 2 * DAY), prompt, answer


def cluster(data: Path, scale: float) -> tuple[list[Served], list[Cascaded]]:
    """Services, and the cascade through two of them; `scale` multiplies all rates."""
    tweets, bins = twitter_days(data), twitter_bins(data)
    images = np.interp(np.arange(5 * DAY) / 120, np.arange(len(bins)), bins)
    talks, prompt, answer = _azure(data)

    def rates(trace: Floats, shift_h: float, mean: float) -> tuple[Floats, Floats]:
        rolled = np.roll(trace, int(shift_h * _HOUR))
        rolled = rolled * (scale * mean / rolled.mean())
        history = rolled[:-DAY].reshape(-1, PERIOD_S).mean(axis=1)
        return rolled[-DAY:], history

    chat, code = llm.Lengths(prompt, answer), llm.Lengths(2 * prompt, answer / 2)
    objectives = llm.Objectives(ttft_s=2.0, tpot_s=0.05)
    found = []
    for name, trace, shift_h, mean, gpus, start_s, each, patience_s, curve in (
        ("topics-small", tweets, 0, 900.0, 0.25, 20, 80.0, 0.2, curves.texts(1 / 80, 0.2 + 1 / 80, 96)),
        ("topics-large", tweets, 8, 300.0, 1.0, 30, 50.0, 0.4, curves.texts(1 / 50, 0.4 + 1 / 50, 64)),
        (
            "chat",
            talks,
            0,
            40.0,
            1.0,
            60,
            llm.carried(_CHAT, chat, objectives),
            1.5,
            curves.answers(_CHAT, chat, objectives, 64),
        ),
        (
            "code",
            talks,
            12,
            5.0,
            2.0,
            90,
            llm.carried(_CODE, code, objectives),
            1.5,
            curves.answers(_CODE, code, objectives, 32),
        ),
        ("digits", images, 4, 2000.0, 0.5, 20, 0.9 / _ROW_S[2], 0.3, curves.images(_ROW_S, _GAINS, 128, _IMAGE_SLO_S)),
        ("photos", images, 16, 1400.0, 1.0, 30, 0.9 / _ROW_S[2], 0.3, curves.images(_ROW_S, _GAINS, 64, _IMAGE_SLO_S)),
    ):
        today, history = rates(trace, shift_h, mean)
        elastic = curves.elastic(_ROW_S, _GAINS) if trace is images else None
        worth = 1 / float(today.sum())
        shape = Shape(gpus)
        most = len(curve(1.0, 0.0)) - 1
        found.append(
            Served(name, shape, 1, most, start_s, each, patience_s, today, history, worth, curve, elastic)
        )  # fmt: skip
    today, history = rates(tweets, 14, 500.0)
    choices = ((0.35, 0.930), (0.2, 0.926), (0.1, 0.921))
    cascade = Cascaded("cascade", "topics-small", "topics-large", 0.88, choices, today, history, 1 / float(today.sum()))
    return found, [cascade]
