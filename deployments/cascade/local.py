"""A cascade's levels in this process, for a profile without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from pliant.config.encoder import EncoderConfig
from pliant.deployments.cascade.levels import Unrecorded, run_on
from pliant.deployments.cascade.pruning import Read, read_words, whole
from pliant.deployments.cascade.pruning_agreement import agreement
from pliant.deployments.cascade.table import Profiled, PruningAgreement
from pliant.deployments.encoder.chooser import EncoderChooser
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.engine import Engine
from pliant.deployments.encoder.messages import Answer, Query
from pliant.deployments.encoder.runtimes import ModelRuntimes
from pliant.deployments.encoder.upgrades import CompiledLater
from pliant.deployments.serving.call import Caller
from pliant.deployments.serving.courier import Courier
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.table import ReplicaTable
from pliant.deployments.serving.tokenizing import encoded
from pliant.errors import CannotCompileError, ModelError
from pliant.models import sources
from pliant.models.encoder_tokenizer import encoder_tokenizer

_COMPARED = 100


async def local_classifiers(
    encoders: Mapping[str, EncoderConfig], progress: sources.Progress
) -> tuple[dict[str, Classifier], dict[str, list[str]]]:
    """Classifiers of the services, by name, that compute here, and on what (`run_on`). Raises ModelError."""
    classifiers, found = {}, {}
    for number, (name, config) in enumerate(encoders.items()):
        progress(f"loading the runtimes of {name}", number / len(encoders))
        folder = await asyncio.to_thread(sources.fetch, config.model)
        runtimes = await asyncio.to_thread(ModelRuntimes, config)
        engines = await _engines(runtimes)
        chooser = EncoderChooser(config.slo_ms / 1e3)
        table = ReplicaTable(chooser)
        table.sync({replica: engine.report() for replica, engine in engines.items()})
        caller = Caller(table, Unrecorded(), Courier(table.gateway, _Local(engines)))
        info = sources.describe(folder)
        classifiers[name] = Classifier(name, config, folder, info, chooser, table, caller, Unrecorded())
        found[name] = run_on(engine.report() for engine in engines.values())
    return classifiers, found


async def _engines(runtimes: CompiledLater) -> dict[str, Engine]:
    """One for each length, or one that takes all, compiled where that can be done."""
    engines = {}
    await asyncio.to_thread(runtimes.settle_lengths)
    for length in runtimes.lengths[-1:] if runtimes.resident else runtimes.lengths:
        with suppress(CannotCompileError):
            await asyncio.to_thread(runtimes.compile, length, lambda: 0.0)
        engines[str(length)] = Engine(runtimes)
        await engines[str(length)].hold(length)
    return engines


class _Local:
    """A `courier.Transport` to engines of this process, by name."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines

    async def one(self, parcel: Parcel[Query]) -> Answer | Refusal:
        return await self._engines[parcel.replica].infer(parcel.queries[0])

    async def several(self, parcel: Parcel[Query]) -> AsyncGenerator[Sequence[tuple[int, Answer | Refusal]], None]:
        for index, query in enumerate(parcel.queries):
            yield [(index, await self._engines[parcel.replica].infer(query))]


def attention_agreements(profiled: Profiled, level: str, config: EncoderConfig) -> Profiled:
    """`profiled`, where it also says how far the first level and `level`, which does not tell itself, agree on words.

    The model is run here, as it comes, on some of the texts. What has no attention weights to compare is left out.
    """
    measured = next(iter(profiled.importance.items()), None)
    if measured is None or level in profiled.importance:
        return profiled
    pruner, words = measured
    try:
        same = agreement(zip(words[:_COMPARED], _read_eagerly(words[:_COMPARED], config), strict=True))
    except (ModelError, ValueError):
        return profiled
    found = PruningAgreement(pruner=pruner, reader=level, **same._asdict())
    table = profiled.table.model_copy(update={"agreements": (*profiled.table.agreements, found)})
    return replace(profiled, table=table)


def _read_eagerly(given: Sequence[Read], config: EncoderConfig) -> list[Read]:
    import torch

    from pliant.kernels.encoder.eager_classifier import EagerClassifier

    folder = sources.fetch(config.model)
    info = sources.describe(folder)
    model = EagerClassifier(folder, device=config.device, dtype=config.dtype, importance=True)
    tokenizer = encoder_tokenizer(folder, info, config.longest(info.max_length))
    read = []
    for one in given:
        encoding = encoded(tokenizer, whole(one))
        ids, types = (torch.tensor(row, device=config.device) for row in (encoding.ids, encoding.type_ids))
        output = model.unpadded(ids, types if info.pairs else None).cpu().numpy()
        read.append(read_words(whole(one), encoding, output[-len(encoding) :]))
    return read
