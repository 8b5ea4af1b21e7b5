"""What `pliant profile` does for a cascade: runs its levels here, without a cluster, and says what would serve."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.table import Table

from pliant.cli.terminal import console, progress
from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import ServingConfig
from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.choice import Choice, choose_for
from pliant.deployments.cascade.levels import ClassifierReader, levels_of
from pliant.deployments.cascade.local import attention_agreements, local_classifiers
from pliant.deployments.cascade.plot import plot
from pliant.deployments.cascade.profile import profile
from pliant.deployments.cascade.table import CascadeTable, Profiled, folder_of, identity, keep, load
from pliant.errors import DataError
from pliant.models import sources
from pliant.policies.cascade.candidates import Candidate, front
from pliant.policies.cascade.choice import NoCandidateError
from pliant.training import labelled_texts


def profile_cascade(name: str, serving: ServingConfig, out: Path) -> None:
    """Profile the cascade `name` on this machine, unless that has been done; print and write what was found.

    Raises DataError when nothing keeps what the service promises, or nothing follows from its labelled texts.
    """
    config = serving.of(CascadeConfig)[name]
    with progress() as update:
        folder, profiled = asyncio.run(_profiled(name, config, serving, update))
    table = profiled.table
    try:
        choice: Choice | None = choose_for(config, profiled)
        unmet = choice.unmet if choice else None
    except NoCandidateError as error:
        choice, unmet = None, str(error)
    chosen = choice.candidate if choice else None
    _print(table, chosen)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"profile-{name}.json").write_text(table.model_dump_json(indent=1))
    plot(table, out / f"profile-{name}.png", chosen)
    console.print(f"Written to {out / f'profile-{name}'}.json and .png; all readings are in {folder}.")
    if choice and choice.conformal:
        console.print(choice.conformal, markup=False)
    if unmet and chosen is None:
        raise DataError(f"{name} would not serve: {unmet}")
    if unmet:
        console.print(f"{name} would serve the closest, {chosen}, and say so: {unmet}", style="red", markup=False)
    else:
        console.print(f"{name} would serve {_described(chosen)}." if chosen else "")
    if choice and choice.fallback:
        console.print(f"While {choice.candidate.levels[0]} cannot answer, {choice.fallback} would, alone.")


async def _profiled(
    name: str, config: CascadeConfig, serving: ServingConfig, update: sources.Progress
) -> tuple[Path, Profiled]:
    every = serving.of(EncoderConfig)
    encoders = {service: every[service] for service in config.parts()}
    folders = {name: sources.fetch(service.model, progress=update) for name, service in encoders.items()}
    classifiers, run_on = await local_classifiers(encoders, update)
    texts = labelled_texts.read(config.data, classifiers[config.parts()[0]].labels)
    folder = folder_of(f"{name}-alone", identity(config, encoders, folders, texts, run_on))
    found = load(folder)
    if found is None:
        levels = levels_of(config, encoders, classifiers)
        reader = ClassifierReader(classifiers)
        given = labelled_texts.sample(texts, config.seed)
        found = await profile(reader, levels, given, config.seed, config.prune, update)
        update("compares what levels attend to", 0.0)
        if config.ats[-1].exit is None:
            found = attention_agreements(found, config.levels[-1], encoders[config.levels[-1]])
        keep(folder, found)
    return folder, found


def _print(table: CascadeTable, chosen: Candidate | None) -> None:
    levels = Table("level", "accuracy", "temperature", "calibration error", "mean, ms", "p99, ms")
    for level in table.levels:
        levels.add_row(
            level.name,
            f"{level.accuracy:.1%}",
            f"{level.temperature:.2f}",
            f"{level.calibration_error_before:.3f} → {level.calibration_error_after:.3f}",
            f"{1e3 * level.mean_latency_s:.2f}",
            f"{1e3 * level.p99_latency_s:.2f}",
        )
    console.print(levels)
    for same in table.agreements:
        console.print(
            f"{same.pruner} and {same.reader} share {same.top_half:.0%} of the more important half of a text's words "
            f"(rank correlation {same.spearman:.2f}, {same.texts} texts)."
        )
    shown = list({f"{one.accuracy:.1%}": one for one in reversed(front(table.candidates))}.values())[::-1]
    if chosen and chosen not in shown:
        shown = sorted([*shown, chosen], key=lambda one: one.mean_latency_s)
    candidates = Table("", "cascade", "cut-off", "alpha", "accuracy", "mean, ms", "p99, ms", "early", "gap")
    for one in shown:
        candidates.add_row(
            "→" if one == chosen else "",
            str(one),
            ", ".join(f"{cutoff:g}" for cutoff in one.cutoffs),
            ", ".join(f"{alpha:g}" for alpha in one.alphas) if any(one.alphas) else "",
            f"{one.accuracy:.1%} ± {one.accuracy_error:.1%}",
            f"{1e3 * one.mean_latency_s:.2f}",
            f"{1e3 * one.p99_latency_s:.2f}",
            f"{one.before_last:.0%}",
            f"{one.early_accuracy_gap:+.1%}",
        )
    console.print(candidates)
    left_out = f", {table.left_out} are too long for a level" if table.left_out else ""
    console.print(
        f"Measured on {table.texts} labelled texts{left_out}; the best of {len(table.candidates)} candidates. Early: "
        "answered before the last level. Gap: what the most accurate level has over the first on those that the first "
        "answers."
    )


def _described(candidate: Candidate) -> str:
    return (
        f"{candidate}: {candidate.accuracy:.1%} accurate in {1e3 * candidate.mean_latency_s:.2f} ms, with "
        f"{candidate.before_last:.0%} answered early"
    )
