"""One answer in the making: what it may become, and what each of its tokens means to the client."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.llm.detokenizer import Detokenizer, TokenBytes
from pliant.deployments.llm.guide import Guide
from pliant.deployments.llm.request import Generation, Piece, TokenLogprobs
from pliant.formats.adapter_info import AdapterRef
from pliant.kernels.decoder.decode_step import RowLogprobs


class BrokenError(Exception):
    """The executor failed, and with it all that its slots held; the engine computes nothing any more."""


class TooLongError(ValueError):
    """The request does not fit into a slot, whatever else there is."""


class Answer:
    """The answer to `generation` in a slot of `max_length` tokens; `eos` are the tokens that end it, and `guide`, to
    which nothing was pushed, says what may come next in it.

    `max_tokens` is cut to what fits. Raises TooLongError when nothing does, and another ValueError when the request
    makes no sense. Answers are compared by identity.
    """

    __slots__ = (
        *("_detokenizer", "_ends", "_fresh", "_logprobs", "_scores", "_stops"),
        *("adapter", "alternatives", "begun", "computed", "count", "deadline", "ended", "id", "ids"),
        *("foreseen", "guide", "most", "placed", "predicted", "running", "sampling", "size", "tenant"),
    )

    def __init__(
        self,
        generation: Generation,
        max_length: int,
        eos: Collection[int],
        contents: TokenBytes,
        guide: Guide | None = None,
    ) -> None:
        prompt, generated = len(generation.prompt), len(generation.generated)
        if not prompt:
            raise ValueError("the prompt has no tokens; give at least one")
        if generation.max_tokens <= generated:
            raise ValueError(f"max_tokens must be above the {generated} of the answer, got {generation.max_tokens}")
        if prompt + generated >= max_length:
            raise TooLongError(
                f"a prompt of {prompt} tokens and {generated + 1} of its answer do not fit into {max_length} tokens; "
                "shorten the prompt, or raise max_length"
            )
        self.id = generation.id
        self.ids: NDArray[np.int32] = np.array(generation.prompt + generation.generated, np.int32)
        """What is computed before its next token."""
        ends = () if generation.ignore_eos else {*eos} - (guide.ends if guide else set())
        self._stops = frozenset(generation.stop_token_ids)
        self._ends = self._stops.union(ends)
        self.sampling = generation.sampling
        if self.sampling.min_tokens:
            self.sampling = replace(self.sampling, ends=tuple(self._ends))
        self.adapter: AdapterRef | None = generation.adapter
        self.alternatives = None if generated else generation.prompt_logprobs
        """As in `prompt_logprobs` of the request; None from its first token on, with which they are given."""
        self._scores: list[TokenLogprobs] = []
        """Of its prompt's tokens but the first, as far as it is computed."""
        self.begun = self.count = generated
        """Its tokens when it came, and until now."""
        self.computed = 0
        """Tokens of its prompt that were computed for it, twice if it lost them."""
        self.most = min(generation.max_tokens, max_length - prompt)
        """Its tokens at the end, at most."""
        self.size = prompt + self.most
        """Tokens of prompt and answer at the end, at most."""
        self.deadline: float | None = None
        """By the engine's clock: when it must have a slot; None once it had one."""
        self.predicted = self.most
        """Its tokens at the end, as predicted."""
        self.tenant = generation.tenant
        self.foreseen = self.most
        """Its tokens at the end, as its tenant is charged for it when it gets its memory."""
        self.placed = 0.0
        """By the engine's clock: when it got its slot."""
        self.running = False
        """Whether it holds memory, from its admission to its end or until it is put back."""
        self.ended = False
        """What is still computed for it is dropped."""
        self._fresh: list[int] = []
        """Its tokens that are not in `ids`."""
        self.guide = guide
        self._logprobs = generation.sampling.logprobs is not None
        self._detokenizer = Detokenizer(contents, generation.stop, generation.sampling.min_tokens)
        for token in generation.generated:
            self._detokenizer.push(token)
            if guide and not guide.push(token):
                raise ValueError(f"the {generated} tokens given are no answer that its grammar allows")
        if self._detokenizer.stopped:
            raise ValueError(f"the answer has ended: there is a stop string in the {generated} tokens given")
        if generated and guide and guide.complete:
            raise ValueError(f"the answer has ended: its grammar allows nothing behind the {generated} tokens given")

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.size - self.most

    @property
    def cached(self) -> int:
        """Tokens of the prompt that were there without it."""
        return max(0, self.prompt - self.computed)

    @property
    def progress(self) -> int | None:
        """Tokens of its prompt that were computed for it; None while it waits for a slot."""
        return self.computed if self.running else None

    def queued(self) -> Sequence[int]:
        """What is computed before its next token, to be read."""
        return self.ids.data

    def known(self, start: int = 0) -> list[int]:
        """The tokens of its prompt, and then its own, from number `start` on."""
        ids: list[int] = self.ids[start:].tolist()
        return ids + self._fresh[max(0, start - len(self.ids)) :]

    def targets(self, start: int, stop: int) -> NDArray[np.int32]:
        """The tokens of its prompt that follow tokens `start` to `stop`, if their log probabilities are wanted."""
        last = self.prompt if self.alternatives is not None else 0
        return self.ids[start + 1 : max(start + 1, min(stop + 1, last))]

    def score(self, rows: Iterable[RowLogprobs]) -> None:
        """How likely the next of them are."""
        for row in rows:
            token = int(self.ids[1 + len(self._scores)])
            self._scores.append(TokenLogprobs(token, row.chosen, tuple(row.top_ids), tuple(row.top), row.rank))

    def put_back(self) -> None:
        """It loses its slot, and goes on later behind the tokens it has."""
        self._scores.clear()
        self.running = False
        self.ids = np.concatenate((self.ids, np.array(self._fresh, np.int32)))
        self._fresh.clear()

    def read(self, token: int, row: RowLogprobs | None) -> Piece:
        """The piece that its next token makes. Raises GuideError if its guide can have no such token."""
        self.count += 1
        self._fresh.append(token)
        finish: Literal["stop", "length"] | None = None
        guided = self.guide is None or token in self._stops or self.guide.push(token)
        if token in self._ends or not guided:
            text, finish = self._detokenizer.flush(), "stop"
        else:
            text = self._detokenizer.push(token)
            if self.count == self.most and not self._detokenizer.stopped:
                text, finish = text + self._detokenizer.flush(), "length"
            elif self.guide and self.guide.complete:
                text, finish = text + self._detokenizer.flush(), "stop"
            if self._detokenizer.stopped:
                finish = "stop"
        logprobs = None
        if self._logprobs and row is not None:
            logprobs = (TokenLogprobs(token, row.chosen, tuple(row.top_ids), tuple(row.top)),)
        return Piece((token,), text, logprobs, finish, prompt_logprobs=self._prompt_logprobs())

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Once, if they are wanted."""
        if self.alternatives is None:
            return None
        self.alternatives = None
        return tuple(self._scores)
