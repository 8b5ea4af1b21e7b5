"""What a replica does before it can answer: the planner hears of it, and through that gateways and people.

Serve lists a replica only once its constructor has ended, which may take as long as a model takes to be trained or
downloaded, and to be loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType

from ray import serve

from pliant.config.cluster import PLANNER
from pliant.deployments.serving import logs, tracing
from pliant.deployments.serving.calls import answer
from pliant.deployments.serving.messages import STARTING, Step
from pliant.errors import PliantError
from pliant.turns import LOADING, turn

_EVERY_S = 0.5
_ANSWER_WITHIN_S = 2.0
_AGAIN_S = 5.0
"""However little has changed: what is not said again is forgotten."""
_GATEWAY_WITHIN_S = 30.0
"""So long replicas leave the processors to gateways that start."""


class Startup:
    """A progress callback while it is entered, from any thread."""

    def __init__(self, service: str) -> None:
        logs.start()
        tracing.start()
        self._service = service
        self._step: Step | None = Step(STARTING, 0.0)
        """None once it can answer."""
        self._gateways = asyncio.Event()
        """Set when the planner has heard of a gateway."""
        self._reporting: asyncio.Task[None] | None = None

    def __call__(self, text: str, done: float) -> None:
        self._step = Step(text, done)

    async def __aenter__(self) -> Startup:
        self._reporting = asyncio.create_task(self._report())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reporting
        self._step = None if error is None else Step(f"failed: {_reason(error)}", 0.0, failed=True)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reporting, _ANSWER_WITHIN_S)

    @asynccontextmanager
    async def loading(self, folder: Path) -> AsyncIterator[None]:
        """Wait until it is this replica's turn to load the model in `folder`.

        As many replicas load at a time as there are CPUs: the first ones of each service before the second, small
        models before large. So something answers soon, where all at once would take as long as all together. Before
        that, gateways come up, which show people how far all this is.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._gateways.wait(), _GATEWAY_WITHIN_S)
        rank = serve.get_replica_context().rank
        urgency = (float(rank.rank if rank else 0), _size(folder))
        turns = turn(self._service, lambda: urgency, self, LOADING)
        await asyncio.to_thread(turns.__enter__)
        try:
            self("loading", 0.0)
            yield
        finally:
            turns.__exit__(None, None, None)

    async def _report(self) -> None:
        """Report each step, and at last that there is none any more, or why there is none."""
        replica = serve.get_replica_context().replica_id.unique_id
        planner = await asyncio.to_thread(serve.get_deployment_handle, PLANNER)  # it asks Serve's controller
        reported, quiet_s = None, 0.0
        while True:
            step = self._step
            if step != reported or quiet_s >= _AGAIN_S or not self._gateways.is_set():
                with suppress(Exception):  # the planner may start, too
                    async with asyncio.timeout(_ANSWER_WITHIN_S):
                        if await answer(planner.starting.remote(self._service, replica, step)):
                            self._gateways.set()
                    reported, quiet_s = step, 0.0
            if step is None or step.failed:
                return
            await asyncio.sleep(_EVERY_S)
            quiet_s += _EVERY_S


def _reason(error: BaseException) -> str:
    """In one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines and isinstance(error, PliantError) else f"{type(error).__name__}: {' '.join(lines[:1])}"


def _size(folder: Path) -> float:
    """Bytes of the files in `folder`."""
    return float(sum(file.stat().st_size for file in folder.glob("*")))
