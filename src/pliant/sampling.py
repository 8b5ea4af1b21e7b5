"""How a language model's tokens are chosen: what a client asks for. No torch: gateways and replicas exchange it."""

import math
from dataclasses import dataclass

from pliant.message import message

MOST_LOGPROBS = 20
MOST_PENALTY = 2.0
_COLDEST = 1e-5
"""Temperatures below this are taken for 0: dividing by them would leave float32."""


@message
@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer's tokens are chosen.

    First logits are edited: `logit_bias` adds to those of tokens (-inf bans one), and as long as the answer has fewer
    than `min_tokens`, `ends` are banned. Those of tokens in prompt or answer are divided by `repetition_penalty` if
    they are positive, else multiplied (Keskar et al., "CTRL", 2019, §4.1); those of tokens in the answer lose
    `presence_penalty` once and `frequency_penalty` for each time.

    Then logits are divided by `temperature`; the `top_k` most likely tokens are kept (0: all), of these the fewest that
    together have probability `top_p`, of these those that have at least `min_p` of the likeliest one's, and of these
    the fewest of most typical information that together have `typical_p` (Meister et al., "Locally Typical Sampling",
    2023). Temperature 0 is greedy: the most likely token by edited logits, whatever the filters say. The same `seed`,
    any whole number of 64 bits, gives the same answer. `logprobs` asks for the log probabilities of every token chosen
    and of that many of the likeliest (None: for none). Raises ValueError for what cannot be sampled.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits."""
    min_tokens: int = 0
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a number of 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0, for all tokens, or more, got {self.top_k}")
        for name, share in (("top_p", self.top_p), ("typical_p", self.typical_p)):
            if not 0 < share <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {share}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be 0 to 1, got {self.min_p}")
        for name, penalty in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            if not abs(penalty) <= MOST_PENALTY:
                raise ValueError(f"{name} must be {-MOST_PENALTY:g} to {MOST_PENALTY:g}, got {penalty}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty must be a number above 0, got {self.repetition_penalty}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be a whole number of 64 bits, got {self.seed}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise ValueError(f"logprobs must be 0 to {MOST_LOGPROBS}, got {self.logprobs}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be 0 or more, got {self.min_tokens}")
        if not all(value < math.inf for _, value in self.logit_bias):
            raise ValueError("logit_bias must be of numbers, or minus infinity")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is chosen, without chance."""
        return self.temperature < _COLDEST

    @property
    def penalized(self) -> bool:
        """Whether it depends on the tokens of prompt and answer."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def biased(self) -> bool:
        """Whether any logits are added to, for the whole answer or at its beginning."""
        return bool(self.logit_bias or (self.min_tokens and self.ends))
