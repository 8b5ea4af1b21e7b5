"""How a language model's tokens are chosen: what a client asks for. No torch: gateways and replicas exchange it."""

import math
from dataclasses import dataclass

MOST_LOGPROBS = 20
_COLDEST = 1e-5
"""Temperatures below this are taken for 0: dividing by them would leave float32."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer's tokens are chosen.

    Logits are divided by `temperature`; then the `top_k` most likely tokens are kept (0: all), and of these the fewest
    that together have probability `top_p`. Temperature 0 is greedy: the most likely token, whatever the rest says. The
    same `seed`, any whole number of 64 bits, gives the same answer. `logprobs` asks for the log probabilities of every
    token chosen and of that many of the likeliest (None: for none). Raises ValueError for what cannot be sampled.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a number of 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0, for all tokens, or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be a whole number of 64 bits, got {self.seed}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ValueError(f"logprobs must be 0 to {MOST_LOGPROBS}, got {self.logprobs}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen, without chance."""
        return self.temperature < _COLDEST
