"""What a gateway asks a language model's replica for, and what comes back: plain data, pickled between the two."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pliant.deployments.serving.tenants import Tenant
from pliant.formats.adapter_info import AdapterRef
from pliant.message import message
from pliant.sampling import Sampling


@message
class Generation(NamedTuple):
    """One answer to compute."""

    id: str
    """Names the request; no two that are under way share it."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    """Of the whole answer, `generated` included."""
    sampling: Sampling
    generated: tuple[int, ...] = ()
    """The tokens of the answer that the client has already: it goes on behind them."""
    stop: tuple[str, ...] = ()
    """The answer ends before the first of these texts in it."""
    ignore_eos: bool = False
    """Whether tokens that end an answer are tokens like others, so that it gets max_tokens unless `stop` ends it."""
    first_token_within_s: float | None = None
    """Seconds in which the next token must come for the request to be worth taking; None takes it however late."""
    adapter: AdapterRef | None = None
    """None for the base model."""
    tenant: Tenant = Tenant()
    stop_token_ids: tuple[int, ...] = ()
    """The answer ends with the first of these, whose text is left out."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """None of these sequences of tokens, of two or more each, comes in the answer."""
    grammar: str | None = None
    """What the whole answer is bound to, as `grammars` writes it."""
    background: bool = False
    """It is computed only while nobody waits for anything else, and makes way at once."""
    prompt_logprobs: int | None = None
    """Asks for the log probabilities of each token of the prompt but the first, and of so many of the likeliest tokens
    in its place; None for none at all. Without effect where tokens are `generated`: the client has them."""

    def check_tokens(self, vocabulary: int) -> None:
        """Raise ValueError unless a model of so many tokens has all that it names."""
        biased = (token for token, _ in self.sampling.logit_bias)
        banned = (token for word in self.bad_words for token in word)
        named = (*self.prompt, *self.generated, *self.stop_token_ids, *biased, *banned)
        low, high = min(named, default=0), max(named, default=0)
        if low < 0 or high >= vocabulary:
            raise ValueError(f"token ids must lie in 0 to {vocabulary - 1}, got {low} to {high}")


@message
class TokenLogprobs(NamedTuple):
    """The natural logarithms of a token's probability and of the likeliest tokens' in its place."""

    token: int
    logprob: float
    top_ids: tuple[int, ...]
    """The likeliest tokens, likeliest first: as many as were asked for."""
    top: tuple[float, ...]
    """Their log probabilities."""
    rank: int | None = None
    """Of a token of the prompt: 1 if no other is likelier in its place."""

    def with_top(self, most: int) -> TokenLogprobs:
        """With so many of the likeliest tokens at most."""
        return self._replace(top_ids=self.top_ids[:most], top=self.top[:most])


@message
class Piece(NamedTuple):
    """What is new of one answer.

    Text may come later than its tokens: as long as a character is incomplete or a stop string may be beginning. So
    `text` is the next text of the answer, not that of `tokens`.
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token; None if they were not asked for."""
    finish: Literal["stop", "length"] | None = None
    """Why the answer ends with this piece; None if it goes on."""
    prompt_s: float | None = None
    """Seconds from when the answer had a slot to this piece, the first that a replica computed; None of all others."""
    cached: int | None = None
    """Tokens of the prompt that this replica had not to compute, as it had them; None of all but its first piece."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the answer's first piece, if they were asked for: of each token of the prompt but the first."""


def merged(pieces: list[Piece]) -> Piece:
    """Successive pieces of one answer, at least one, as one."""
    if len(pieces) == 1:
        return pieces[0]
    tokens, texts, logprobs, finishes, prompts, cached, prompt_logprobs = zip(*pieces, strict=True)
    return Piece(
        tokens=tuple(token for part in tokens for token in part),
        text="".join(texts),
        logprobs=None if logprobs[0] is None else tuple(row for part in logprobs for row in part),
        finish=finishes[-1],
        prompt_s=prompts[0],
        cached=cached[0],
        prompt_logprobs=prompt_logprobs[0],
    )
