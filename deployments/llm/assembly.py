"""A language model's engine as cluster.yaml describes it: executor, scheduler, cache and loader put together."""

from __future__ import annotations

import logging

from tokenizers import Tokenizer

from pliant.config.llm import AdaptersConfig, LlmConfig
from pliant.deployments.llm.adapter_loader import AdapterLoader, AdapterLoadError, PeftFolders
from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.host_tier import HostTier
from pliant.deployments.llm.waiting_room import AnswerScheduler
from pliant.errors import ModelError
from pliant.formats.adapter_info import AdapterError, AdapterRef, read_adapter
from pliant.kernels import gpu_memory
from pliant.kernels.decoder import parallel_executor
from pliant.kernels.decoder.executor import DTYPES, Executor
from pliant.models import sources
from pliant.models.decoder_shape import DecoderShape
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.arrival_histogram import ArrivalHistogram
from pliant.policies.llm.multi_queue import MultiQueue
from pliant.policies.llm.queue_classes import QueueClasses
from pliant.policies.llm.queue_order import Fifo, Queues, ShortestFirst
from pliant.policies.llm.request_scheduler import Scheduler

logger = logging.getLogger("pliant")


def assemble(config: LlmConfig) -> Engine:
    """The engine, rehearsed, with the pinned adapters in memory.

    Raises what `parallel_executor.load` does, and ModelError.
    """
    folder = sources.fetch(config.model)
    gpu_memory.take_share(config.gpus)
    most_rank = config.adapters.max_rank if config.adapters else 0
    budget = config.memory_mb and config.memory_mb * 2**20
    loaded = parallel_executor.load(
        folder,
        config.tensor_parallel,
        config.timeout_s / 2,
        config.slots,
        config.max_length,
        config.dtype,
        config.device,
        config.threads,
        budget_bytes=budget,
        arena_bytes=budget if config.adapters else None,
        most_rank=most_rank,
        quantize=config.quantize,
    )
    loader = None
    if config.adapters:
        if config.device == "cuda" and config.adapters.host_mb:
            gpu_memory.pin_exactly()
        folders = PeftFolders(loaded, DTYPES[config.dtype].itemsize, most_rank, config.tensor_parallel)
        loader = AdapterLoader(folders, host=HostTier(config.adapters.host_mb * 2**20))
    engine = Engine(
        loaded,
        Tokenizer.from_file(str(folder / "tokenizer.json")),
        sources.describe_decoder(folder).eos,
        config.queue,
        config.stall_ms / 1e3,
        debug=config.debug,
        scheduler=scheduler(config, loaded),
        share_prefixes=config.share_prefixes,
        tpot_s=config.tpot_ms and config.tpot_ms / 1e3,
        order="fifo" if config.scheduler == "fifo" else "shortest",
        loader=loader,
    )
    engine.rehearse()
    if config.adapters:
        _pin(engine, config.adapters, loaded.shape)
    return engine


def scheduler(config: LlmConfig, loaded: Executor) -> AnswerScheduler:
    """Who waits in what order, and which adapters stay (Chameleon §4)."""
    eviction, prefetch = (config.adapters.cache, config.adapters.prefetch) if config.adapters else ("none", "none")
    return Scheduler(
        _queues(config),
        AdapterCache(eviction),
        loaded.arena_bytes,
        prefetch=prefetch != "none",
        histogram=ArrivalHistogram() if prefetch == "predicted" else None,
        slots=loaded.slots,
    )


def _queues(config: LlmConfig) -> Queues[Answer, AdapterRef]:
    if config.scheduler == "fifo":
        return Fifo()
    if config.scheduler == "sjf":
        return ShortestFirst()
    return MultiQueue(QueueClasses(config.slo_ms / 1e3))


def _pin(engine: Engine, adapters: AdaptersConfig, shape: DecoderShape) -> None:
    """Load the pinned adapters. What cannot be had is reported, and does not keep the rest from being served."""
    if not (adapters.folder and adapters.pinned):
        return
    try:
        folder = sources.fetch_adapters(adapters.folder)
    except (ModelError, OSError) as error:
        logger.error("no adapters can be pinned: %s", error)
        return
    for name in dict.fromkeys(adapters.pinned):
        try:
            engine.pin(read_adapter(folder / name, shape, adapters.max_rank).ref(name))
        except (AdapterError, AdapterLoadError) as error:
            logger.error("adapter %s cannot be pinned: %s", name, error)
