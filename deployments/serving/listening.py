"""Has the replicas of any kind listen for lines, see `line`."""

from __future__ import annotations

import os
from typing import Any

import ray

from pliant.deployments.serving.line import Address, Listener

LINE = "line"
"""Of what Serve passes on of a replica: its `Address`."""


def listening(target: Any, most: int) -> type:
    """`target`, the class of replicas, whose objects listen, too, for `most` calls at a time each.

    Not where Ray encrypts what processes say to each other: a line does not.
    """

    class Listening(target):  # type: ignore[misc]
        _listener: Listener | None = None

        async def __init__(self, service: str, config: Any) -> None:  # type: ignore[misc]  # Serve awaits it
            made: Any = super().__init__(service, config)
            if made is not None:
                await made
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                self._listener = Listener(self, most)
                self._address = await self._listener.listen(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

        def record_replica_metadata(self) -> dict[str, Any]:
            found: dict[str, Any] = super().record_replica_metadata()
            return {**found, LINE: tuple(self._address)} if self._listener else found

        async def __del__(self) -> None:
            """Serve calls and awaits it when it stops the replica, after the calls that it knows of have ended."""
            if self._listener:
                await self._listener.drain()
            if end := getattr(super(), "__del__", None):
                end()

    Listening.__name__ = Listening.__qualname__ = target.__name__
    return Listening


def address(metadata: dict[str, Any]) -> Address | None:
    """Where the replica listens of which Serve has this `metadata`, if it does. It is taken out: it is a secret."""
    said = metadata.pop(LINE, None)
    return Address(*said) if said else None
