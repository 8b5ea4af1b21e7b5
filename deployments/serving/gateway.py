"""The Serve ingress: binds the HTTP application to Ray's handles, metrics and environment."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from pliant.config.cluster import CascadeConfig, EncoderConfig, LlmConfig, ServingConfig, VisionConfig
from pliant.config.cluster import Service as ServiceConfig
from pliant.deployments.cascade.endpoint import CascadeClassifier
from pliant.deployments.cascade.follower import CascadeFollower
from pliant.deployments.cascade.messages import CascadeEntry
from pliant.deployments.cascade.recorder import CascadeRecorder
from pliant.deployments.encoder.endpoint import Classifier
from pliant.deployments.encoder.engine import Answer
from pliant.deployments.encoder.routing_table import shared
from pliant.deployments.http.application import application
from pliant.deployments.llm import router as llm_router
from pliant.deployments.llm import routing_table as llm_routing_table
from pliant.deployments.llm.endpoint import LanguageModel
from pliant.deployments.serving.calls import answer
from pliant.deployments.serving.catalog.adapter_follower import AdapterFollower
from pliant.deployments.serving.catalog.task_follower import TaskFollower
from pliant.deployments.serving.follower import Follower, Tally
from pliant.deployments.serving.messages import (
    AdapterNews,
    BoardNews,
    Guidance,
    News,
    Registered,
    RegisteredTask,
    Rejected,
    TaskNews,
)
from pliant.deployments.serving.metrics import EncoderMetrics, LlmMetrics, RequestRecorder, VisionMetrics
from pliant.deployments.serving.outcome import Outcome
from pliant.deployments.serving.router import caller, obey
from pliant.deployments.serving.services import Endpoint, Replicas, Service, Services
from pliant.deployments.serving.status import exposition
from pliant.deployments.vision import router as vision_router
from pliant.deployments.vision import routing_table as vision_routing_table
from pliant.deployments.vision.endpoint import VisionClassifier
from pliant.errors import ConfigError, PliantError
from pliant.models import sources
from pliant.models.vision_info import read_vision

logger = logging.getLogger("pliant")

Handle = DeploymentHandle[Any]

_AGAIN_S = 10.0
"""After a model could not be had."""


@serve.ingress()
class Gateway:
    """Stateless: validates, tokenizes, dispatches. `handles` are the services' deployments, by name."""

    async def __init__(self, config: ServingConfig, handles: Mapping[str, Handle], planner: Handle) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        for handle in handles.values():
            obey(handle)
        self._tables = {name: shared(name, service.slo_ms / 1e3) for name, service in config.encoders.items()}
        self._tallies = {name: Tally() for name in config.encoders}
        self._name = uuid.uuid4().hex[:8]
        self._outcomes: dict[str, Counter[str]] = {name: Counter() for name in config.services}
        calls = _Planner(planner)
        self._follower = Follower(calls.exchange, self._tables, self._tallies)
        self._services = Services(list(self._described()))
        self._adapters = None
        if any(service.adapters for service in config.llms.values()):
            self._adapters = AdapterFollower(calls)
        self._tasks = TaskFollower(calls) if config.visions else None
        self._chosen = CascadeFollower(calls)
        followers = [self._follower, self._adapters, self._tasks, self._chosen if config.cascades else None]
        self._following = [asyncio.create_task(each.run()) for each in followers if each]
        self._fetching = ThreadPoolExecutor(len(config.services), thread_name_prefix="fetching")
        self._opening = [
            asyncio.create_task(self._open(service, handles.get(service.name))) for service in self._services
        ]

    def _described(self) -> Iterator[Service]:
        """The services, before any of them can answer."""
        config, described = self._config, dict[str, Service]()
        for name, service in config.services.items():
            if not isinstance(service, CascadeConfig):
                described[name] = Service(name, service.kind, self._replicas(name, service))
        for name, cascade in config.cascades.items():
            described[name] = Service(name, cascade.kind, levels=[described[level] for level in cascade.levels])
        return (described[name] for name in config.services)

    def _replicas(self, name: str, config: EncoderConfig | LlmConfig | VisionConfig) -> Replicas:
        if isinstance(config, EncoderConfig):
            least, running = config.replicas.min, self._tables[name].replicas
        else:
            tables = llm_routing_table if isinstance(config, LlmConfig) else vision_routing_table
            least, running = config.replicas, tables.shared(name).replicas
        return Replicas(
            wanted=lambda: int(self._follower.of(name).plan.get("wanted_replicas", least)),
            running=lambda: len(running()),
            starting=lambda: self._follower.of(name).starting.values(),
        )

    async def _open(self, service: Service, handle: Handle | None) -> None:
        """Give `service` its endpoint once its model is on this machine, however often that has to be tried."""
        config = self._config.services[service.name]
        while True:
            try:
                service.open(await self._endpoint(service, config, handle))
            except PliantError as error:
                reason = str(error)
                logger.warning("%s: %s", service.name, error)
            except Exception as error:  # a broken file of one service must not keep the others from being served
                reason = f"{type(error).__name__}: {error}"
                logger.exception("%s: cannot be opened", service.name)
            else:
                return
            service.opening(f"{reason}; trying again", 0.0)
            await asyncio.sleep(_AGAIN_S)

    async def _endpoint(self, service: Service, config: ServiceConfig, handle: Handle | None) -> Endpoint:
        if isinstance(config, CascadeConfig):
            return await self._cascade(service.name, config)
        assert handle
        fetch = sources.fetch_vision if isinstance(config, VisionConfig) else sources.fetch
        fetched = partial(fetch, config.model, progress=service.opening)
        folder = await asyncio.get_running_loop().run_in_executor(self._fetching, fetched)
        if isinstance(config, EncoderConfig):
            return self._classifier(service.name, config, folder, handle)
        if isinstance(config, LlmConfig):
            return self._language_model(service.name, config, folder, handle)
        return self._vision(service.name, config, folder, handle)

    def _classifier(self, name: str, config: EncoderConfig, folder: Path, handle: Handle) -> Classifier:
        recorder = _EncoderRecorder(name, self._tallies[name], self._outcomes[name])
        call = caller(handle.infer.remote)
        return Classifier(name, config, folder, sources.describe(folder), self._tables[name], call, recorder)

    def _language_model(self, name: str, config: LlmConfig, folder: Path, handle: Handle) -> LanguageModel:
        table, call = llm_routing_table.shared(name), llm_router.caller(handle)
        recorder = _LlmRecorder(name, self._outcomes[name])
        return LanguageModel(name, config, folder, sources.describe_decoder(folder), table, call, recorder)

    def _vision(self, name: str, config: VisionConfig, folder: Path, handle: Handle) -> VisionClassifier:
        assert self._tasks
        table = vision_routing_table.shared(name)
        call, recorder = vision_router.caller(handle), _VisionRecorder(name, self._outcomes[name])
        most = self._config.gateway.max_megapixels
        return VisionClassifier(name, config, read_vision(folder), most, self._tasks, table, call, recorder)

    async def _cascade(self, name: str, config: CascadeConfig) -> CascadeClassifier:
        """Of levels that are there."""
        levels = {level.name: level for level in self._services if level.name in config.levels}
        for level in levels.values():
            await level.opened()
        recorder = CascadeRecorder(name, self._outcomes[name])
        endpoints = {name: level.endpoint for name, level in levels.items()}
        return CascadeClassifier(name, config, endpoints, partial(self._chosen.known_as, name), recorder)

    async def check_health(self) -> None:
        """Serve replaces a gateway that does not listen to the planner any more."""
        for task in self._following:
            if task.done():
                raise RuntimeError(f"the planner is not followed any more: {task}")

    def __serve_build_asgi_app__(self) -> FastAPI:
        return application(
            self._config.gateway,
            self._services,
            self._stats,
            lambda: exposition(self._stats()),
            _api_keys(self._config.gateway.api_keys_env),
            self._adapters,
            self._tasks,
        )

    def _stats(self) -> dict[str, Any]:
        config = self._config
        return {
            "gateway": self._name,
            "states": self._services.facts(),
            "requests": self._outcomes,
            "services": {
                name: {"plan": self._follower.of(name).plan, "replicas": table.replicas()}
                for name, table in self._tables.items()
            },
            "language_models": {name: {"replicas": llm_routing_table.shared(name).replicas()} for name in config.llms},
            "adapters": self._adapters.facts() if self._adapters else {},
            "vision": {
                name: {
                    "replicas": vision_routing_table.shared(name).replicas(),
                    "tasks": [entry.task.name for entry in self._tasks.of(name)] if self._tasks else [],
                }
                for name in config.visions
            },
            "tasks": self._tasks.facts() if self._tasks else {},
            "cascades": {name: cascade.facts() for name, cascade in self._services.endpoints("cascade").items()},
        }


class _Planner:
    """Calls to the planner, that end when whoever waits for them leaves."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def exchange(self, seen: str, news: Mapping[str, News]) -> tuple[str, Mapping[str, Guidance]]:
        told: tuple[str, Mapping[str, Guidance]] = await answer(self._handle.exchange.remote(seen, news))
        return told

    async def adapter_news(self, gateway: str, seen: tuple[str, int], wait: bool) -> AdapterNews:
        news: AdapterNews = await answer(self._handle.adapter_news.remote(gateway, seen, wait))
        return news

    async def load_adapter(self, name: str, path: str, service: str | None, in_place: bool) -> Registered | Rejected:
        done: Registered | Rejected = await answer(self._handle.load_adapter.remote(name, path, service, in_place))
        return done

    async def unload_adapter(self, name: str) -> Registered | Rejected:
        done: Registered | Rejected = await answer(self._handle.unload_adapter.remote(name))
        return done

    async def task_news(self, follower: str, seen: tuple[str, int], wait: bool) -> TaskNews:
        news: TaskNews = await answer(self._handle.task_news.remote(follower, seen, wait))
        return news

    async def load_task(self, service: str, name: str, path: str, replace: bool) -> RegisteredTask | Rejected:
        done: RegisteredTask | Rejected = await answer(self._handle.load_task.remote(service, name, path, replace))
        return done

    async def unload_task(self, service: str, name: str) -> RegisteredTask | Rejected:
        done: RegisteredTask | Rejected = await answer(self._handle.unload_task.remote(service, name))
        return done

    async def cascade_news(self, follower: str, seen: tuple[str, int], wait: bool) -> BoardNews[CascadeEntry]:
        news: BoardNews[CascadeEntry] = await answer(self._handle.cascade_news.remote(follower, seen, wait))
        return news


def _api_keys(variable: str | None) -> list[str]:
    if variable is None:
        return []
    keys = [key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()]
    if not keys:
        raise ConfigError([f"gateway.api_keys_env: got {variable}; the gateway's environment has no keys in it"])
    return keys


class _EncoderRecorder(RequestRecorder):
    def __init__(self, service: str, tally: Tally, outcomes: Counter[str]) -> None:
        super().__init__(service, "encoder", outcomes)
        self._metrics = EncoderMetrics(service)
        self._tally = tally

    def arrived(self, tokens: int) -> None:
        self._tally.arrived(tokens)

    def answered(self, seconds: float, slo_s: float, tokens: int, answer: Answer) -> None:
        self._tally.answered(seconds / slo_s)
        tags = {"runtime": str(answer.max_length)}
        self._metrics.latency.observe(seconds, tags=tags)
        self._metrics.tokens.inc(tokens, tags=tags)
        if answer.computed > tokens:
            self._metrics.padding.inc(answer.computed - tokens, tags=tags)
        if seconds > slo_s:
            self._metrics.slo_violations.inc()

    def shed(self) -> None:
        self._tally.shed()

    def ended(self, outcome: Outcome) -> None:
        super().ended(outcome)
        if outcome in (Outcome.SHED, Outcome.TOO_LATE):
            self._metrics.shed.inc()
        if outcome in (Outcome.UNAVAILABLE, Outcome.FAILED, Outcome.CANCELLED):
            self._tally.lost()


class _LlmRecorder(RequestRecorder):
    def __init__(self, service: str, outcomes: Counter[str]) -> None:
        super().__init__(service, "llm", outcomes)
        self._metrics = LlmMetrics(service)

    def answered(self, seconds: float, first_s: float, prompt_tokens: int, tokens: int, rank: int) -> None:
        by_rank = {"rank": str(rank)}
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.generated_tokens.inc(tokens)
        self._metrics.latency.observe(seconds)
        self._metrics.time_to_first_token.observe(first_s, tags=by_rank)
        if tokens > 1:
            self._metrics.time_per_token.observe((seconds - first_s) / (tokens - 1), tags=by_rank)


class _VisionRecorder(RequestRecorder):
    def __init__(self, service: str, outcomes: Counter[str]) -> None:
        super().__init__(service, "vision", outcomes)
        self._metrics = VisionMetrics(service)

    def answered(self, task: str, seconds: float, in_time: bool, gamma: int) -> None:
        self._metrics.answers.inc(tags={"task": task})
        self._metrics.latency.observe(seconds, tags={"gamma": str(gamma)})
        if not in_time:
            self._metrics.slo_violations.inc(tags={"task": task})
