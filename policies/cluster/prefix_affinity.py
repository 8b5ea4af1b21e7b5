"""Which replica gets a prompt: the one that has computed the most of it already, unless it has too much to do.

A replica keeps what it has computed for as long as that is worth its memory, so a conversation's next turn, or another
request with the same system prompt, had better go where the last one went. What was sent to a replica lately is known,
block by block, and of what it holds as much as it says: where what it holds ends or branches. A block of a prompt is
named by its tokens, all before it, and its root (adapter and tenant), as none is of use without these. Loads stay
bounded as they do for adapters (`adapter_affinity`), and where nothing of a prompt is known, its adapter decides.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

from pliant.policies.cluster.adapter_affinity import bound, preferred

R = TypeVar("R", bound=Hashable)


def root_block(root: str) -> bytes:
    """The name of what comes before the first block."""
    return blake2b(root.encode(), digest_size=8).digest()


def block(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a block with these tokens behind another one; all processes agree on it."""
    return blake2b(before + np.asarray(tokens, np.int64).tobytes(), digest_size=8).digest()


def blocks(root: str, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Names of the full blocks of a prompt, in order; all processes agree on them."""
    names = []
    name = root_block(root)
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        name = block(name, tokens[start : start + block_tokens])
        names.append(name)
    return names


class PrefixAffinity(Generic[R]):
    """Which replica was sent which blocks last, of at most `most` blocks, the latest ones; and what replicas hold."""

    def __init__(self, most: int = 2**16) -> None:
        if most < 1:
            raise ValueError(f"at least 1 block must be kept, got {most}")
        self._most = most
        self._sent: OrderedDict[bytes, R] = OrderedDict()
        self._held: dict[R, Collection[bytes]] = {}

    def holds(self, replica: R, names: Collection[bytes]) -> None:
        """`replica` says that it has blocks with these names, and thus those before them."""
        self._held[replica] = names

    def remove(self, replica: R) -> None:
        """`replica` is gone, and what it held with it."""
        self._held.pop(replica, None)

    def sent(self, names: Sequence[bytes], replica: R) -> None:
        """A prompt of blocks with these names went to `replica`. The first block is forgotten last."""
        for name in reversed(names):
            self._sent[name] = replica
            self._sent.move_to_end(name)
        while len(self._sent) > self._most:
            self._sent.popitem(last=False)

    def known(self, names: Sequence[bytes]) -> dict[R, int]:
        """By replica, up to which block it has the prompt, as it says itself or as it was the last to be sent that."""
        reach: dict[R, int] = {}
        for count, name in enumerate(names, 1):
            replica = self._sent.get(name)
            if replica is None:
                break
            reach[replica] = count
        for replica, held in self._held.items():
            last = next((count for count in range(len(names), 0, -1) if names[count - 1] in held), 0)
            if last > reach.get(replica, 0):
                reach[replica] = last
        return reach

    def choose(self, names: Sequence[bytes], tokens: int, live: Mapping[R, int], adapter: str | None = None) -> R:
        """The replica for a request of `tokens`; `live` has each replica's live tokens, at least one replica.

        Of those that stay within the bound, the one that was sent the most of the prompt; where none was sent any, the
        one that its adapter prefers, or that has the fewest live tokens.
        """
        most = bound(tokens, live)
        reach = {
            replica: count
            for replica, count in self.known(names).items()
            if replica in live and live[replica] + tokens <= most
        }
        if reach:
            return max(reach, key=lambda replica: (reach[replica], -live[replica]))
        return min(live, key=live.__getitem__) if adapter is None else preferred(adapter, tokens, live)
