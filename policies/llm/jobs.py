"""What a scheduler of a language model's replica is told of a request, and what it decides (Chameleon §4.2).

Keys name requests, adapters are whatever names them: both only need to be hashable. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
"""Names a request."""
A = TypeVar("A", bound=Hashable)
"""Names an adapter."""


class SchedulerError(Exception):
    """A scheduler contradicts itself: a defect, after which no decision may be trusted."""


class Job(NamedTuple, Generic[K, A]):
    """A request as the scheduler sees it."""

    key: K
    prompt: int
    """Tokens to compute before its first one, at least 1."""
    output: int
    """Tokens that its answer will have, as predicted, at least 1."""
    charge: int
    """Memory for keys and values that it holds from its admission on, to its end unless it is `extended`."""
    adapter: A | None
    """None for a request to the base model."""
    adapter_bytes: int
    """Memory that the adapter takes, which all its requests share; 0 without one."""
    arrived: float
    """When, in seconds."""


class Decisions(NamedTuple, Generic[K, A]):
    """To be carried out in this order, all before the next iteration; the scheduler counts it as done."""

    evict: list[A]
    """Nobody uses these adapters; their memory is given to others."""
    squash: list[K]
    """These running requests give back all they hold. They wait again, and go on later behind the tokens they have."""
    load: list[A]
    """To be loaded from now on; the scheduler waits for `loaded` or `load_failed`."""
    admit: list[Job[K, A]]
    """Their adapters are loaded. In the order in which their prompts should be computed."""


class Extension(NamedTuple, Generic[K, A]):
    """What is done so that a running request gets more memory, to be carried out in this order."""

    evict: list[A]
    squash: list[K]
    """As in `Decisions`; the request itself may be among them."""
    waits: bool = False
    """It does not get it now: it keeps what it has, and had better be extended when another has ended."""
