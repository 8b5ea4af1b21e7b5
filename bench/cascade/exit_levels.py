"""Cascades of exits against one of two models, at the same promise (Tabi §7.5).

There are two of them. The levels of one are an exit before the first layer of the smallest model, that model, an exit
in the middle of the largest, and that; those of the other are exits of the largest model, whose layers learned with
them, and that. Which of these serve is the choice's, for a loss that counts from the most accurate model as it was. All
cascades are profiled, chosen and computed as a service does, on the same runtime: packed texts in C. Two models may be
any two of the task, and may prune.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Encoding, Tokenizer

from pliant.bench.cascade import outcome, resplits, sequential, tasks
from pliant.bench.cascade.levels import Prepared
from pliant.bench.cascade.outcome import Outcome
from pliant.bench.cascade.readings import Readings
from pliant.bench.cascade.sequential import System, Timed
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
from pliant.deployments.cascade.table import CascadeTable
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
from pliant.training.early_layers import Recipe

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
        self.models = models

    async def read(self, service: str, text: Text, importance: bool, exits: Sequence[int] = ()) -> Seen:
        started = time.perf_counter()
        stops = [Stop(after, 1.0, np.inf) for after in exits]
        encoding, found = self.models[service].read(text, _ALWAYS if importance else None, stops)
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
    outcomes: Sequence[Outcome]
    """For each seed."""
    bytes: int
    """Of the models that serve."""
    system: System

    @cached_property
    def right(self) -> Floats:
        """[n]: of each text, the share of seeds under which it is answered rightly."""
        shares: Floats = np.mean([one.right for one in self.outcomes], axis=0)
        return shares


@dataclass(frozen=True, eq=False)
class _Read:
    """What levels make of texts, and cascades of them."""

    reader: _Reader
    levels: Sequence[Level]
    table: CascadeTable
    """Of the choose split."""
    test: Readings
    labels: Sequence[str]
    seeds: int

    @property
    def accuracy(self) -> float:
        """Of the most accurate level."""
        return self.table.levels[self.table.best].accuracy

    def chosen(self, loss: float, longest: int) -> _Chosen:
        """What serves under a loss of accuracy, of at most so many levels and without gates."""
        candidate, models = _choose(self.table, loss, longest), self.reader.models
        return _Chosen(
            candidate,
            outcome.outcomes(candidate, self.test, range(self.seeds)),
            sum(models[service].bytes for service in {level_at(level).service for level in candidate.levels}),
            _system(candidate, models, self.labels),
        )


def figures(prepared: Prepared, scale: Scale, progress: Callable[[str], object]) -> list[Figure]:
    """For each of LOSSES: either cascade of exits beside one of two models, and beside single models."""
    name, splits = prepared.name, prepared.splits
    small, *_, large = prepared.folders
    progress(f"{name}: training exits")
    models = {one: _Model(folder) for one, folder in prepared.folders.items()}
    learned_folder, upto = learned(prepared)
    middle = upto[-1]
    with_exits = {one: _Model(_with_exits(prepared, one, (after,))) for one, after in ((small, 0), (large, middle))}

    def tell(what: str, done: float) -> None:
        progress(f"{name}: {what}, {done:.0%}")

    choose_on, test_on = splits.choose[: scale.texts], splits.test[: scale.texts]

    def read(models: Mapping[str, _Model], levels: Sequence[str], tells: Sequence[str]) -> _Read:
        known = [Level(one, tuple(models[level_at(one).service].labels), one in tells) for one in levels]
        reader = _Reader(models)
        table = asyncio.run(profile(reader, known, choose_on, _SEED, True, tell)).table
        return _Read(reader, known, table, Readings(reader, known, test_on, tell), splits.labels, scale.seeds)

    plain = read(models, [*models], [one for one in models if one != large])
    mixed = read(with_exits, [f"{small}@0", small, f"{large}@{middle}", large], [small])
    one_encoder = read({large: _Model(learned_folder)}, [*(f"{large}@{after}" for after in upto), large], [])
    gained = one_encoder.accuracy - plain.accuracy
    dealt = resplits.resplits(
        one_encoder.reader,
        one_encoder.levels,
        tasks.Splits([], choose_on, test_on),
        scale.resplits,
        LOSSES[:1],
        {level.name: level.handed_s for level in one_encoder.table.levels},
        lambda table, loss: _choose(table, loss, len(table.levels)),
        tell,
    )
    found = [resplits.figure(f"one_encoder_cascade_resplits_that_keep_the_promise_{name}", dealt, ">= 0.95")]
    for loss in LOSSES:
        systems = {
            "exit": mixed.chosen(loss, 3),
            "one_encoder": one_encoder.chosen(max(0.0, loss + gained), len(upto) + 1),
            "two": plain.chosen(loss, 2),
            "single": plain.chosen(loss, 1),
            "large": plain.chosen(0.0, 1),
        }
        timed = sequential.run(
            {which: one.system for which, one in systems.items()},
            [text.text for text in splits.test[: scale.timed]],
            scale.passes,
            lambda: tell("exits beside two models", 0),
        )
        suffix = name if loss == LOSSES[0] else f"loss_{loss:g}_{name}"
        for which in ("exit", "one_encoder"):
            found += _figures(which, systems, timed, loss, suffix)
    return found


def learned(prepared: Prepared) -> tuple[Path, Sequence[int]]:
    """The largest model as its layers are when they have learned with exits up to its middle, and where these are."""
    large = [*prepared.folders][-1]
    layers = int(read_json(prepared.folders[large] / "config.json")["num_hidden_layers"])
    after = range(layers // 2 + 1)
    return _with_exits(prepared, large, after, prepared.with_exits), after


def _choose(table: CascadeTable, loss: float, longest: int) -> Candidate:
    candidates = [one for one in table.candidates if len(one.levels) <= longest and one.gate is None]
    return choose(candidates, accuracy_loss=loss)


def _figures(
    which: str, systems: Mapping[str, _Chosen], timed: Mapping[str, Timed], loss: float, suffix: str
) -> list[Figure]:
    name = f"{which}_cascade"
    ours, two, single, large = (systems[one] for one in (which, "two", "single", "large"))
    ours_s, two_s, single_s = (timed[one].means for one in (which, "two", "single"))
    memory = ours.bytes / two.bytes

    def gained(_: int, rows: Integers) -> float:
        return float((ours.right - two.right)[rows].mean())

    def spared(_: int, rows: Integers) -> float:
        return float((ours.right - large.right)[rows].mean()) + loss

    def gap(seed: int, rows: Integers) -> float:
        one = ours.outcomes[seed]
        return outcome.early_gap(one.early[rows], (large.right - one.right)[rows])

    return [
        ratio(
            f"{name}_vs_two_models_{suffix}",
            ours_s,
            two_s,
            "<= 0.8",
            f"{1e3 * np.mean(ours_s):.2f} against {1e3 * np.mean(two_s):.2f} ms; {_said(ours)} against {_said(two)}",
        ),
        over_texts(f"{name}_accuracy_minus_two_models_{suffix}", gained, len(ours.right)),
        Figure(
            f"{name}_memory_vs_two_models_{suffix}",
            memory,
            memory,
            memory,
            "<= 0.6",
            f"{ours.bytes / 1e6:.1f} against {two.bytes / 1e6:.1f} MB of weights",
        ),
        ratio(f"{name}_vs_best_single_{suffix}", ours_s, single_s, "<= 0.6", _said(single)),
        ratio(f"{name}_p99_vs_large_{suffix}", timed[which].p99s, timed["large"].p99s, "<= 1.05", _said(large)),
        over_texts(f"{name}_accuracy_minus_target_{suffix}", spared, len(ours.right), target=">= 0"),
        over_texts(f"{name}_early_accuracy_gap_{suffix}", gap, len(ours.right), len(ours.outcomes), "<= 0.01"),
    ]


def _said(chosen: _Chosen) -> str:
    one = chosen.candidate
    cutoffs = f", c {', '.join(f'{cutoff:g}' for cutoff in one.cutoffs)}" if one.cutoffs else ""
    return f"{one}{cutoffs}, {chosen.right.mean():.2%} accurate"


def _with_exits(prepared: Prepared, model: str, after: Sequence[int], layers_learn: Recipe | None = None) -> Path:
    """The model with exits behind so many layers, trained once."""
    folder, given = prepared.folders[model], prepared.splits
    info = describe(folder)
    train: Texts = given.train or labelled_texts.read(labelled_texts.ZOO_TRAINING, info.labels)

    def make(into: Path) -> None:
        texts = Splits(train, *labelled_texts.split(given.choose, _SEED))
        exit_training.train(folder, info, after, texts, 1.0, into, lambda _what, _done: None, layers_learn)

    which = "-".join(map(str, after))
    learned = f"-learned-{_digest(layers_learn)}" if layers_learn else ""
    return made_once(cache_folder() / "bench" / "cascade" / f"{folder.name}-exit-{which}{learned}", make)


def _digest(recipe: Recipe) -> str:
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:8]


def _system(candidate: Candidate, models: Mapping[str, _Model], labels: Sequence[str]) -> System:
    """Answers a text as a gateway and replicas do, without the way between them; it charges nothing."""
    services = cast("Mapping[str, Any]", models)
    route = Route(candidate, (0.0,) * len(candidate.levels), services, labels, _SEED)

    def answer(text: Text) -> float:
        said: list[np.ndarray] = []
        words, rest = None, text
        for visit in route.visits:
            model = cast("_Model", visit.service)
            wanted = route.importance_request(text, visit)
            encoding, found = model.read(rest, wanted, route.stops(text, visit))
            logits = np.stack([*found.earlier, found.logits])[:, visit.columns]
            said += [*route.policy.calibrated(logits, visit.levels.start)]
            last = visit.levels[-1]
            if len(said) <= last or not route.policy.goes_on(text, last, said[-1]):
                break
            if found.importance is not None:
                words = read_words(text, encoding, found.importance)
            rest = prune(words, route.alphas[last]).text if words else text
        route.policy.vote(said).argmax()
        return 0.0

    return answer
