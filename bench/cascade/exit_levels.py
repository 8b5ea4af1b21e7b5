"""A cascade of two models and their exits against one of two models, at the same promise (Tabi §7.5).

Its levels are an exit before the first layer of the smallest model, that model, an exit in the middle of the largest,
and that: which of these serve is the choice's. Both cascades are profiled, chosen and computed as a service does, on
the same runtime: packed texts in C. Two models may be any two of the task, and may prune.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Encoding, Tokenizer

from pliant.bench.cascade import outcome, sequential
from pliant.bench.cascade.levels import Prepared
from pliant.bench.cascade.readings import Readings
from pliant.bench.cascade.sequential import System
from pliant.bench.cascade.spread import over_texts
from pliant.bench.cascade.study import Scale
from pliant.bench.cascade.tasks import Texts
from pliant.bench.report import Figure, ratio
from pliant.cache import cache_folder, made_once
from pliant.cli import exit_training
from pliant.cli.exit_training import Splits
from pliant.config.cascade import level_at
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.pruning import prune, read_words
from pliant.deployments.cascade.readings import Level, Seen
from pliant.deployments.cascade.route import Route
from pliant.deployments.encoder.computing import Computation, compute
from pliant.deployments.encoder.messages import ImportanceRequest, Query
from pliant.deployments.serving.tokenizing import encoded, types_of
from pliant.kernels.encoder import exits as encoder_exits
from pliant.kernels.encoder import packed_runtime
from pliant.kernels.encoder.texts import Stop
from pliant.models.decoder_info import read_json
from pliant.models.sources import describe
from pliant.policies.cascade.calibration import Floats, Integers
from pliant.policies.cascade.candidates import Candidate
from pliant.policies.cascade.choice import choose
from pliant.texts import Text
from pliant.training import labelled_texts

LOSSES = (0.01, 0.04)
"""Of accuracy; the second is what the default cluster's cascade may lose."""
_SEED = 0
_ALWAYS = ImportanceRequest(1.0, np.inf)


class _Model:
    """One that is a service of its own in both cascades; a `Reader` of profiles asks it by `read`."""

    def __init__(self, folder: Path) -> None:
        info = describe(folder)
        self.labels = list(info.labels)
        self.most_characters = 1 << 30
        self.bytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        self._runtime = packed_runtime.load(folder, info.max_length)
        if (folder / "exits").is_dir():
            self._runtime.leave_early(encoder_exits.load(folder), unasked=False)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(info.max_length)

    def read(
        self, text: Text, importance: ImportanceRequest | None, stops: Sequence[Stop]
    ) -> tuple[Encoding, Computation]:
        encoding = encoded(self._tokenizer, text)
        ids = np.array(encoding.ids, "<i4").tobytes()
        query = Query(ids, len(encoding), None, 1.0, importance, types=types_of(encoding), stops=tuple(stops))
        return encoding, compute(self._runtime, [query])[0]


class _Reader:
    """Where profiles find the levels: here."""

    def __init__(self, models: Mapping[str, _Model]) -> None:
        self._models = models

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        started = time.perf_counter()
        stops = [Stop(after, 1.0, np.inf) for after in exits]
        encoding, found = self._models[service].read(text, _ALWAYS if importance else None, stops)
        seconds = time.perf_counter() - started - found.importance_s
        return Seen(
            found.logits,
            found.importance,
            encoding,
            seconds,
            found.importance_s,
            found.seconds,
            found.earlier,
            found.earlier_s,
        )


@dataclass(frozen=True, eq=False)
class _Chosen:
    """What serves of some levels under one promise, and how accurate that is on the test split."""

    candidate: Candidate
    right: Floats
    """[n]: of each text, the share of seeds under which it is answered rightly."""
    bytes: int
    """Of the models that serve."""
    system: System


def figures(prepared: Prepared, scale: Scale, progress: Callable[[str], object]) -> list[Figure]:
    """For each of LOSSES: mean latency, accuracy and memory of exits beside those of two models."""
    name, splits = prepared.name, prepared.splits
    small, *_, large = prepared.folders
    progress(f"{name}: training exits")
    middle = int(read_json(prepared.folders[large] / "config.json")["num_hidden_layers"]) // 2
    with_exits = {one: _Model(_with_exits(prepared, one, after)) for one, after in ((small, 0), (large, middle))}
    models = {one: _Model(folder) for one, folder in prepared.folders.items()}
    labels = splits.labels

    def tell(what: str, done: float) -> None:
        progress(f"{name}: {what}, {done:.0%}")

    def chosen(models: Mapping[str, _Model], levels: Sequence[Level], longest: int) -> list[_Chosen]:
        reader = _Reader(models)
        table = asyncio.run(profile(reader, levels, splits.choose[: scale.texts], _SEED, True, tell)).table
        candidates = [one for one in table.candidates if len(one.levels) <= longest and one.gate is None]
        test = Readings(reader, levels, splits.test[: scale.texts], tell)
        return [_chosen(choose(candidates, accuracy_loss=loss), models, labels, test, scale.seeds) for loss in LOSSES]

    two = chosen(models, [Level(one, tuple(model.labels), one != large) for one, model in models.items()], longest=2)
    names = [f"{small}@0", small, f"{large}@{middle}", large]
    levels = [Level(one, tuple(with_exits[level_at(one).service].labels), one == small) for one in names]
    exits = chosen(with_exits, levels, longest=3)
    found = []
    for loss, ours, theirs in zip(LOSSES, exits, two, strict=True):
        texts = [text.text for text in splits.test[: scale.timed]]
        systems = {"exits": ours.system, "two": theirs.system}
        timed = sequential.run(systems, texts, scale.passes, lambda: tell("exits beside two models", 0))
        suffix = name if loss == LOSSES[0] else f"loss_{loss:g}_{name}"
        found += _figures(ours, theirs, timed["exits"].means, timed["two"].means, suffix)
    return found


def _figures(
    ours: _Chosen, theirs: _Chosen, ours_s: Sequence[float], theirs_s: Sequence[float], suffix: str
) -> list[Figure]:
    def gained(_: int, rows: Integers) -> float:
        return float((ours.right - theirs.right)[rows].mean())

    memory = ours.bytes / theirs.bytes
    return [
        ratio(
            f"exit_cascade_vs_two_models_{suffix}",
            ours_s,
            theirs_s,
            "<= 0.8",
            f"{1e3 * np.mean(ours_s):.2f} against {1e3 * np.mean(theirs_s):.2f} ms; {_said(ours)} against "
            f"{_said(theirs)}",
        ),
        over_texts(f"exit_cascade_accuracy_minus_two_models_{suffix}", gained, len(ours.right)),
        Figure(
            f"exit_cascade_memory_vs_two_models_{suffix}",
            memory,
            memory,
            memory,
            "<= 0.6",
            f"{ours.bytes / 1e6:.1f} against {theirs.bytes / 1e6:.1f} MB of weights",
        ),
    ]


def _said(chosen: _Chosen) -> str:
    one = chosen.candidate
    cutoffs = f", c {', '.join(f'{cutoff:g}' for cutoff in one.cutoffs)}" if one.cutoffs else ""
    return f"{one}{cutoffs}, {chosen.right.mean():.2%} accurate"


def _with_exits(prepared: Prepared, model: str, after: int) -> Path:
    """The model with an exit behind so many layers, trained once."""
    folder, given = prepared.folders[model], prepared.splits
    info = describe(folder)
    train: Texts = given.train or labelled_texts.read(labelled_texts.ZOO_TRAINING, info.labels)

    def make(into: Path) -> None:
        texts = Splits(train, *labelled_texts.split(given.choose, _SEED))
        exit_training.train(folder, info, (after,), texts, 1.0, into, lambda _what, _done: None)

    return made_once(cache_folder() / "bench" / "cascade" / f"{folder.name}-exit-{after}", make)


def _chosen(
    candidate: Candidate, models: Mapping[str, _Model], labels: Sequence[str], test: Readings, seeds: int
) -> _Chosen:
    outcomes = outcome.outcomes(candidate, test, range(seeds))
    services = {level_at(level).service for level in candidate.levels}
    return _Chosen(
        candidate,
        np.mean([one.right for one in outcomes], axis=0),
        sum(models[service].bytes for service in services),
        _system(candidate, models, labels),
    )


def _system(candidate: Candidate, models: Mapping[str, _Model], labels: Sequence[str]) -> System:
    """Answers a text as a gateway and replicas do, without the way between them; it charges nothing."""
    services = cast("Mapping[str, Any]", models)
    route = Route(candidate, (0.0,) * len(candidate.levels), services, labels, _SEED)

    def answer(text: Text) -> float:
        logits: list[np.ndarray] = []
        words, rest = None, text
        for visit in route.visits:
            model = cast("_Model", visit.service)
            wanted = route.importance_request(text, visit)
            encoding, found = model.read(rest, wanted, route.stops(text, visit))
            logits += [row[visit.columns] for row in (*found.earlier, found.logits)]
            last = visit.levels[-1]
            if len(logits) <= last or not route.policy.decide(text, last, logits[-1]).reroute:
                break
            if found.importance is not None:
                words = read_words(text, encoding, found.importance)
            rest = prune(words, route.alphas[last]).text if words else text
        route.policy.vote(logits).argmax()
        return 0.0

    return answer
