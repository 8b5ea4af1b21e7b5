"""Cascades whose profile is given, as its latencies are not for a test to say; and one that is profiled each time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from support.waiting import PATIENT_MS, PROCESS_HANGS_AFTER_S

from pliant.cache import cache_folder
from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import ServingConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.table import CascadeTable, LevelTable, Profiled, folder_of, identity, keep
from pliant.deployments.encoder.runtimes import device
from pliant.deployments.kinds import parse
from pliant.models import sources
from pliant.policies.cascade.candidates import Candidate
from pliant.training import labelled_texts
from pliant.zoo import corpus

LEVELS = FIRST, SECOND = "topics-small", "e2e-large"
LARGE = {
    "kind": "encoder",
    "model": "zoo/topics-large",
    "lengths": [512],
    "replicas": 1,
    "cpus": 0.05,
    "timeout_s": PROCESS_HANGS_AFTER_S,
}
"""The second level, which is killed."""
CASCADE = {"kind": "cascade", "levels": [*LEVELS], "accuracy_loss": 0.9, "slo_ms": PATIENT_MS, "check": 0}
"""Whatever is chosen for levels that are not compiled yet is good enough."""
LATENCY_S = 0.0123
"""As it is given."""
LENIENT, STRICT, MADE = "e2e-lenient", "e2e-strict", "e2e-made"
"""Names of services; nothing else in the cache has such. The last is the default cluster's cascade, on fewer texts."""


@contextmanager
def added(args: dict[str, Any], folder: Path) -> Iterator[None]:
    """While the profiles are there for the application's `args`, which get the cascades; their texts go to `folder`."""
    _clear()
    services, data = args["services"], folder / "texts.jsonl"
    shortest = sorted(corpus.held_out(), key=lambda text: len(text.text))[: labelled_texts.FEWEST]
    data.write_text("\n".join(json.dumps({"text": text.text, "label": text.label}) for text in shortest))
    given = {**CASCADE, "data": str(data)}
    cascades = {
        LENIENT: {**given, "degrade": True},
        STRICT: given,
        MADE: {**services.pop("topics-c"), "data": str(data), "check": 0},
    }
    services |= {SECOND: LARGE, **cascades}
    serving = parse(args)
    for name in (LENIENT, STRICT):
        for backend in ("c", "aoti", "eager"):
            _keep(serving, name, backend)
    yield
    _clear()


def _clear() -> None:
    for folder in (cache_folder() / "cascades").glob("e2e-*"):
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()


def _keep(serving: ServingConfig, name: str, backend: str) -> None:
    cascade, encoders = serving.of(CascadeConfig)[name], serving.of(EncoderConfig)
    folders = {level: sources.fetch(encoders[level].model) for level in LEVELS}
    texts = labelled_texts.read(cascade.data, corpus.LABELS)
    level = LevelTable(
        name=FIRST,
        temperature=1.0,
        accuracy=0.8,
        calibration_error_before=0.1,
        calibration_error_after=0.1,
        mean_latency_s=0.01,
        p99_latency_s=0.01,
    )
    table = CascadeTable(
        labels=corpus.LABELS,
        seed=cascade.seed,
        texts=100,
        left_out=0,
        levels=(level, level.model_copy(update={"name": SECOND})),
        agreements=(),
        candidates=(_half_go_on(),),
    )
    backends = {level: [f"{backend} on {device(encoders[level])}"] for level in LEVELS}
    folder = folder_of(name, identity(cascade, encoders, folders, texts, backends))
    nothing = np.zeros((2, 1))
    keep(
        folder,
        Profiled(table, np.ones((2, 1, 1)), nothing, np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64), {}),
    )


def _half_go_on() -> Candidate:
    """About half of the texts."""
    return Candidate(
        levels=LEVELS,
        cutoffs=(0.8,),
        alphas=(0.7,),
        temperatures=(1.0, 1.0),
        weights=((1.0,), (0.4, 0.6)),
        slope=10.0,
        accuracy=0.8,
        accuracy_error=0.0,
        loss=0.0,
        loss_error=0.0,
        mean_latency_s=LATENCY_S,
        p75_latency_s=0.01,
        p99_latency_s=0.01,
        shares=(0.5, 0.5),
        early_accuracy_gap=0.0,
    )
