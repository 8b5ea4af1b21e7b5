"""Chooses the next token of every request in a batch, each in its own way, in one vectorised pass.

A token is drawn by an exponential race: every token that the filters keep has a random number that depends on the
answer's seed, the place in the answer and the token, and on nothing else, and the greatest ratio of probability to it
wins. So an answer does not depend on the batch that it is computed in, and one that is resumed elsewhere goes on as it
would have. Rounding, which does depend on them, changes a token only where two of them nearly tie. (An inverse CDF
takes one random number instead of one a token, but there rounding moves every bound between two tokens.)
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pliant.kernels.decoder.decode_step import RowLogprobs, RowMasks
from pliant.kernels.decoder.logit_edits import Biases, Ids, Penalties, ban, moved
from pliant.kernels.decoder.uniform import uniform
from pliant.kernels.upload import upload
from pliant.sampling import Sampling as Sampling

_NO_LOGPROBS = -1
_RACING = 2**22
"""Probabilities that are filtered at a time: each takes up to ten numbers of 8 bytes meanwhile."""
_NO_IDS: Ids = np.empty(0, np.int32)


class Ranked(NamedTuple):
    """The log probabilities of n rows, on their device; m is the most alternatives that any row asked for."""

    chosen: Tensor
    """[n] float32, of the tokens chosen."""
    top_ids: Tensor
    """[n, m] int64"""
    top: Tensor
    """[n, m] float32"""
    counts: Tensor
    """[n] int64: how many alternatives the row asked for, -1 if it wants no log probabilities."""


@dataclass(frozen=True)
class Sampled:
    """What was drawn: `tokens` [n] int64, and `ranked` if a row wants log probabilities."""

    tokens: Tensor
    ranked: Ranked | None = None

    @property
    def logprobs(self) -> list[RowLogprobs | None] | None:
        """For each row what it asked for, None if no row asked. Waits for the device."""
        if self.ranked is None:
            return None
        rows = zip(*(tensor.tolist() for tensor in self.ranked), strict=True)
        return [
            None if count == _NO_LOGPROBS else RowLogprobs(chosen, ids[:count], top[:count])
            for chosen, ids, top, count in rows
        ]


class Needs(NamedTuple):
    """Which work a batch needs, known without asking the device."""

    chance: bool
    """Whether any row is not greedy."""
    top_k: int
    """The largest top_k, rounded up to a power of two; 0 if no row filters by it."""
    narrow: bool
    """Whether all rows that are not greedy filter by top_k, so that no more than the likeliest tokens matter."""
    top_p: bool
    logprobs: int
    """The most alternatives that a row asked for; -1 if no row wants log probabilities."""
    min_p: bool = False
    typical_p: bool = False
    biased: bool = False
    penalized: bool = False
    said: int | None = None
    """Tokens that no answer has more of, rounded up to a power of two; None if that is not known."""

    @property
    def drawable(self) -> bool:
        """Whether `Sampler.draw` gives the tokens of the batch, if no masks are there."""
        return not (self.typical_p or self.biased or self.penalized)


class Sampler:
    """The sampling parameters of every slot, on the device, and the draw.

    `vocab` counts tokens, and `longest` those that an answer may have. Of what `Needs` leaves out nothing is computed;
    what it asks for in excess changes no token. Behind the slots there is one more, which is always greedy.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str, longest: int) -> None:
        self._vocab = vocab
        self._longest = longest
        self._slots = slots
        self._device = device
        self._biases: Biases | None = None
        self._penalties: Penalties | None = None
        self._samplings = [Sampling(temperature=0.0)] * slots
        count = slots + 1
        self._temperature = torch.zeros(count, device=device)
        self._top_k = torch.zeros(count, dtype=torch.int64, device=device)
        self._top_p = torch.ones(count, dtype=torch.float64, device=device)
        self._min_p = torch.zeros(count, device=device)
        self._typical_p = torch.ones(count, dtype=torch.float64, device=device)
        self._seed = torch.zeros(count, dtype=torch.int64, device=device)
        self._logprobs = torch.full((count,), _NO_LOGPROBS, device=device)

    @torch.inference_mode()
    def set(self, slot: int, sampling: Sampling, prompt: Ids = _NO_IDS, answer: Ids = _NO_IDS) -> None:
        """From now on, sample for `slot` in this way, behind these tokens of prompt and answer."""
        self._samplings[slot] = sampling
        numbers = {
            self._temperature: 0.0 if sampling.greedy else sampling.temperature,
            self._top_k: self._kept(sampling),
            self._top_p: 1.0 if sampling.greedy else sampling.top_p,
            self._min_p: sampling.min_p,
            self._typical_p: sampling.typical_p,
            self._seed: sampling.seed if sampling.seed < 2**63 else sampling.seed - 2**64,
            self._logprobs: _NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs,
        }
        for parameter, number in numbers.items():
            parameter[slot].fill_(number)
        if sampling.biased and not self._biases:
            self._biases = Biases(self._slots, self._device)
        if sampling.penalized and not self._penalties:
            self._penalties = Penalties(self._slots, self._vocab, self._longest, self._device)
        if self._biases:
            self._biases.set(slot, sampling)
        if self._penalties:
            self._penalties.set(slot, sampling, prompt, answer)

    @property
    def remembers(self) -> bool:
        """Whether the tokens that are drawn are to be recorded."""
        return self._penalties is not None and any(sampling.penalized for sampling in self._samplings)

    @torch.inference_mode()
    def record(self, slots: slice | Tensor, indices: Tensor, tokens: Tensor) -> None:
        """The answers in `slots` have these tokens [n] at the places `indices` [n]."""
        if self._penalties:
            self._penalties.record(_listed(slots, tokens.device), indices, tokens)

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Take the parameters of each source slot to its target.

        No slot is both a source and a target.
        """
        if not moves:
            return
        for source, target in moves:
            self._samplings[target] = self._samplings[source]
        sources, targets = upload(np.array(moves).T, self._seed.device)
        parameters = [self._temperature, self._top_k, self._top_p, self._min_p, self._typical_p, self._seed]
        parameters.append(self._logprobs)
        for edits in (self._biases, self._penalties):
            parameters += edits.parameters if edits else []
        moved(parameters, sources, targets)

    def needs(self, slots: Iterable[int], said: int | None = None) -> Needs:
        """What sampling for these slots takes, whose answers have at most `said` tokens, if that is known."""
        asked = [self._samplings[slot] for slot in slots]
        drawn = [sampling for sampling in asked if not sampling.greedy]
        kept = [self._kept(sampling) for sampling in drawn]
        widest = max(kept, default=0)
        return Needs(
            chance=bool(drawn),
            top_k=min(1 << (widest - 1).bit_length(), self._vocab) if widest else 0,
            narrow=bool(kept) and all(kept),
            top_p=any(sampling.top_p < 1 for sampling in drawn),
            logprobs=max(
                (_NO_LOGPROBS if sampling.logprobs is None else sampling.logprobs for sampling in asked),
                default=_NO_LOGPROBS,
            ),
            min_p=any(sampling.min_p for sampling in drawn),
            typical_p=any(sampling.typical_p < 1 for sampling in drawn),
            biased=self._biases is not None and any(sampling.biased for sampling in asked),
            penalized=self._penalties is not None and any(sampling.penalized for sampling in asked),
            said=None if said is None else 1 << max(0, said - 1).bit_length(),
        )

    @torch.inference_mode()
    def sample(
        self,
        logits: Tensor,
        slots: slice | Tensor,
        indices: Tensor,
        needs: Needs,
        masks: RowMasks | None = None,
    ) -> Sampled:
        """Draw a token for each row of `logits` [n, vocab], whose parameters are those of its slot, of those that
        `masks` allow it.

        `indices` [n] int64 tells the place of each row's token in its answer. On a GPU nothing waits for the device.
        """
        scores = self._edited(logits, slots, indices, needs, masks)
        if scores.is_cuda and not needs.typical_p:
            tokens = self.draw(scores, _listed(slots, scores.device), indices)
        else:
            tokens = _likeliest(scores)
            if needs.chance:
                listed = _listed(slots, scores.device)
                rows = max(1, _RACING // self._vocab)
                blocks = zip(*(torch.split(each, rows) for each in (scores, listed, indices)), strict=True)
                drawn = torch.cat([self._race(part, those, at, needs) for part, those, at in blocks])
                tokens = torch.where(self._temperature[slots] > 0, drawn, tokens)
        return self.sampled(logits, slots, tokens, needs)

    def draw(self, logits: Tensor, slots: Tensor, indices: Tensor) -> Tensor:
        """The tokens [n] of rows of `logits` [n, vocab] on a GPU, where nobody needs more than is `Needs.drawable`.

        The work is the same whatever the slots [n] and their parameters are, so that a CUDA graph can hold it.
        """
        from pliant.kernels.decoder import triton_sampling  # which a CPU has not

        return triton_sampling.draw(
            logits, slots, indices, self._temperature, self._top_k, self._top_p, self._min_p, self._seed
        )

    @torch.inference_mode()
    def sampled(self, logits: Tensor, slots: slice | Tensor, tokens: Tensor, needs: Needs) -> Sampled:
        """These `tokens` [n], with the log probabilities by `logits` [n, vocab] that the slots want."""
        return Sampled(tokens, self._ranked(logits, slots, tokens, needs.logprobs))

    def _kept(self, sampling: Sampling) -> int:
        """Its top_k, or 0 if that filters nothing."""
        return 0 if sampling.greedy or sampling.top_k >= self._vocab else sampling.top_k

    def _edited(
        self, logits: Tensor, slots: slice | Tensor, indices: Tensor, needs: Needs, masks: RowMasks | None
    ) -> Tensor:
        if masks is not None:
            logits = ban(logits.float(), masks)
        if needs.biased and self._biases:
            logits = self._biases.add(logits.float(), slots, indices)
        if needs.penalized and self._penalties:
            logits = self._penalties.subtract(logits.float(), slots, indices, needs.said)
        return logits

    def _race(self, logits: Tensor, slots: Tensor, indices: Tensor, needs: Needs) -> Tensor:
        candidates = None
        if needs.narrow:  # twice as many as needed, for the sake of tokens that are equally likely
            candidates = logits.topk(min(2 * needs.top_k, self._vocab)).indices.sort().values
            logits = logits.gather(1, candidates)
        temperature = self._temperature[slots]
        scores = logits.float() / torch.where(temperature > 0, temperature, 1.0)[:, None]
        if needs.top_k:
            keep_top_k(scores, self._top_k[slots], needs.top_k)
        probabilities = scores.softmax(-1)
        if needs.top_p:
            keep_top_p(probabilities, self._top_p[slots])
        if needs.min_p:
            least = probabilities.amax(-1) * self._min_p[slots]
            probabilities.masked_fill_(probabilities < least[:, None], 0.0)
        if needs.typical_p:
            keep_typical(probabilities, self._typical_p[slots])
        tokens = torch.arange(self._vocab, device=logits.device)[None] if candidates is None else candidates
        winner = _likeliest(probabilities / -uniform(self._seed[slots], indices, tokens).log_())
        return winner if candidates is None else candidates.gather(1, winner[:, None])[:, 0]

    def _ranked(self, logits: Tensor, slots: slice | Tensor, tokens: Tensor, most: int) -> Ranked | None:
        if most == _NO_LOGPROBS:
            return None
        exact = logits.float()
        total = exact.logsumexp(-1, keepdim=True)
        top, top_ids = exact.topk(min(most, exact.shape[1]))
        chosen = exact.gather(1, tokens[:, None])
        return Ranked((chosen - total)[:, 0], top_ids, top - total, self._logprobs[slots].clone())


def _listed(slots: slice | Tensor, device: torch.device) -> Tensor:
    return torch.arange(slots.start, slots.stop, device=device) if isinstance(slots, slice) else slots


def _likeliest(logits: Tensor) -> Tensor:
    """By row: the first of the greatest logits. On CPUs it is NumPy's to find, which is nine times as fast at it."""
    if logits.is_cpu:
        return torch.from_numpy(logits.float().numpy().argmax(-1))
    return logits.argmax(-1)


def keep_top_k(scores: Tensor, top_k: Tensor, widest: int) -> None:
    """Set to -inf, in place, all but the `top_k` [n] highest of each row of `scores` [n, vocab].

    0 keeps all, and no top_k is above `widest`. Scores equal to the lowest that is kept are kept too.
    """
    lowest = scores.topk(widest).values.gather(1, (top_k - 1).clamp(min=0)[:, None])
    scores.masked_fill_(scores < torch.where(top_k[:, None] > 0, lowest, -torch.inf), -torch.inf)


def keep_top_p(probabilities: Tensor, top_p: Tensor) -> None:
    """Set to 0, in place, all but the fewest likeliest of each row [n, vocab] that together reach `top_p` [n].

    Tokens as likely as the least likely that is kept are kept too; 1 keeps all.
    """
    vocab = probabilities.shape[1]
    filtered = (top_p < 1)[:, None]
    if probabilities.is_cpu:  # sorting the vocabulary costs more than a step of a small model
        least = torch.where(filtered, (1 - top_p)[:, None] / vocab, 1.0).float()
        vocab = max(1, int((probabilities > least).sum(-1).max()))  # all others together do not make up 1 - top_p
    ranked = probabilities.topk(vocab).values.double()
    before = ranked.cumsum(-1) - ranked
    lowest = ranked.masked_fill_(before >= top_p[:, None], torch.inf).amin(-1, keepdim=True)
    probabilities.masked_fill_(probabilities < torch.where(filtered, lowest, 0.0).float(), 0.0)


def keep_typical(probabilities: Tensor, typical_p: Tensor) -> None:
    """Set to 0, in place, all but the fewest of each row [n, vocab] that together reach `typical_p` [n], those first
    whose information is nearest to the row's entropy. 1 keeps all; the rows need not add up to 1.
    """
    exact = probabilities.double()
    exact = exact / exact.sum(-1, keepdim=True)
    information = -exact.log()
    entropy = torch.where(exact > 0, exact * information, 0.0).sum(-1, keepdim=True)
    distances = (information - entropy).abs()
    ranked, order = distances.sort(-1)
    shares = exact.gather(1, order)
    before = shares.cumsum(-1) - shares
    furthest = ranked.masked_fill(before >= typical_p[:, None], -torch.inf).amax(-1, keepdim=True)
    probabilities.masked_fill_((typical_p < 1)[:, None] & (distances > furthest), 0.0)
