"""Nodes on which every replica finds room."""

from __future__ import annotations

from pliant.deployments.serving.places import Room, Rooms


async def roomy() -> Rooms:
    return [Room(8, 64)], Room(8, 64)
