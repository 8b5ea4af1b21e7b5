"""Drawn tokens follow the distribution that was asked for, and depend on seed and place alone."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pliant.kernels.decoder import sampling as drawing
from pliant.kernels.decoder.decode_step import RowLogprobs, RowMasks
from pliant.kernels.decoder.sampling import Needs, Sampled, Sampler, Sampling, keep_top_k, keep_top_p
from pliant.kernels.decoder.uniform import uniform
from pliant.torchvision_ops import declare

declare()
from transformers.generation.logits_process import (  # noqa: E402
    LogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

VOCAB = 50
DRAWS = 20_000
GREEDY = Sampling(temperature=0.0)
LONGEST = 10_010

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 40, VOCAB, 10**6]),
    top_p=st.sampled_from([1.0, 0.95, 0.4, 1e-6]),
    seed=st.integers(-(2**63), 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 5]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    typical_p=st.sampled_from([1.0, 0.9, 0.2]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (4, -math.inf))]),
    min_tokens=st.sampled_from([0, 20]),
    ends=st.sampled_from([(), (0, 7)]),
)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sampler_of(*asked: Sampling, vocab: int = VOCAB) -> Sampler:
    sampler = Sampler(len(asked), vocab, "cpu", LONGEST)
    for slot, sampling in enumerate(asked):
        sampler.set(slot, sampling)
    return sampler


def sample(
    sampler: Sampler, logits: Tensor, slots: slice | Tensor, indices: Tensor, masks: RowMasks | None = None
) -> Sampled:
    """With what these slots need."""
    listed = range(slots.start, slots.stop) if isinstance(slots, slice) else slots.tolist()
    return sampler.sample(logits, slots, indices, sampler.needs(listed), masks)


def draws(logits: Tensor, sampling: Sampling, count: int = DRAWS) -> Tensor:
    """[count] tokens of one answer, each from the same logits [vocab]."""
    sampler = sampler_of(sampling, vocab=len(logits))
    rows = logits.expand(count, -1)
    return sample(sampler, rows, torch.zeros(count, dtype=torch.int64), torch.arange(count)).tokens


def expected(logits: Tensor, sampling: Sampling) -> Tensor:
    """What transformers would sample from, [vocab]."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    if sampling.typical_p < 1:
        scores = TypicalLogitsWarper(sampling.typical_p)(None, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1),
        Sampling(temperature=0.5, seed=2),
        Sampling(temperature=3.0, top_k=5, seed=3),
        Sampling(temperature=1.5, top_p=0.8, seed=-4),
        Sampling(temperature=2.0, top_k=20, top_p=0.9, seed=2**64 - 5),
        Sampling(min_p=0.1, seed=6),
        Sampling(temperature=1.5, typical_p=0.6, seed=7),
        Sampling(temperature=2.0, top_k=30, top_p=0.95, min_p=0.2, typical_p=0.8, seed=8),
    ],
)
def test_draws_follow_the_distribution_of_transformers(sampling: Sampling) -> None:
    logits = random_logits(1)[0] / 3
    wanted = expected(logits, sampling) * DRAWS
    counts = torch.bincount(draws(logits, sampling), minlength=VOCAB)
    assert not counts[wanted == 0].any()
    often = wanted >= 5
    squares = (counts[often] - wanted[often]) ** 2 / wanted[often]
    freedom = int(often.sum()) - 1
    assert squares.sum() < freedom + 4 * math.sqrt(2 * freedom)


@given(
    top_k=st.integers(0, VOCAB), top_p=st.floats(0.01, 1.0), scale=st.sampled_from([0.1, 3.0]), seed=st.integers(0, 99)
)
@settings(max_examples=100)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, scale: float, seed: int) -> None:
    logits = random_logits(3, seed=seed) * scale
    scores = logits.clone()
    keep_top_k(scores, torch.tensor([top_k, 0, 1]), max(top_k, 1))
    probabilities = scores.softmax(-1)
    keep_top_p(probabilities, torch.tensor([top_p, top_p, 1.0], dtype=torch.float64))
    for row, sampling in enumerate([Sampling(top_k=top_k, top_p=top_p), Sampling(top_p=top_p), Sampling(top_k=1)]):
        wanted = expected(logits[row], sampling)
        torch.testing.assert_close(probabilities[row] / probabilities[row].sum(), wanted)


def test_equally_likely_tokens_are_kept_or_dropped_together() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert set(draws(logits, Sampling(top_k=2), 500).tolist()) == {0, 1, 2, 3}
    assert set(draws(logits, Sampling(top_p=0.5), 500).tolist()) == {0, 1, 2, 3}


TEXT = ([5, 9, 9, 11], [9, 30, 30, 30, 31])
"""A prompt and the answer so far."""


@pytest.mark.parametrize(
    ("sampling", "processor"),
    [
        (Sampling(repetition_penalty=1.7), RepetitionPenaltyLogitsProcessor(1.7)),
        (Sampling(repetition_penalty=0.6), RepetitionPenaltyLogitsProcessor(0.6)),
        (Sampling(logit_bias=((3, 2.5), (9, -1e4))), SequenceBiasLogitsProcessor([[[3], 2.5], [[9], -1e4]])),
        (Sampling(min_tokens=6, ends=(2, 4)), MinNewTokensLengthLogitsProcessor(4, 6, [2, 4], device="cpu")),
        (Sampling(min_tokens=5, ends=(2, 4)), MinNewTokensLengthLogitsProcessor(4, 5, [2, 4], device="cpu")),
    ],
)
def test_edits_are_those_of_transformers(sampling: Sampling, processor: LogitsProcessor) -> None:
    logits = random_logits(1)[0]
    wanted = processor(torch.tensor([TEXT[0] + TEXT[1]]), logits[None])[0].softmax(-1)
    assert_drawn(logits, sampling, wanted)


@pytest.mark.parametrize("penalties", [(1.5, 0.0), (0.0, 0.7), (-1.0, 0.4)])
def test_penalties_are_those_that_openai_describes(penalties: tuple[float, float]) -> None:
    presence, frequency = penalties
    logits = random_logits(1)[0]
    wanted = logits.clone()
    for token in set(TEXT[1]):
        wanted[token] -= presence + TEXT[1].count(token) * frequency
    sampling = Sampling(presence_penalty=presence, frequency_penalty=frequency)
    assert_drawn(logits, sampling, wanted.softmax(-1))


def assert_drawn(logits: Tensor, sampling: Sampling, wanted: Tensor) -> None:
    """Behind TEXT, tokens are drawn as if they were as likely as `wanted`, and greedily the likeliest of these."""
    prompt, answer = (np.array(ids, np.int32) for ids in TEXT)
    at = torch.tensor([len(answer)])
    sampler = Sampler(1, VOCAB, "cpu", LONGEST)
    sampler.set(0, replace(sampling, temperature=0.0), prompt, answer)
    assert int(sample(sampler, logits[None], slice(0, 1), at).tokens) == int(wanted.argmax())
    count = 4_000
    sampler = Sampler(count, VOCAB, "cpu", 10)
    for slot in range(count):
        sampler.set(slot, replace(sampling, seed=slot), prompt, answer)
    drawn = sample(sampler, logits.expand(count, -1), slice(0, count), at.expand(count)).tokens
    counts = torch.bincount(drawn, minlength=VOCAB)
    assert not counts[wanted == 0].any()
    often = wanted * count >= 5
    expected_counts = wanted[often] * count
    squares = (counts[often] - expected_counts) ** 2 / expected_counts
    freedom = int(often.sum()) - 1
    assert squares.sum() < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2.0}, {"repetition_penalty": 1e6}])
def test_penalties_count_what_was_recorded_and_nothing_behind_it(penalty: dict[str, float]) -> None:
    logits = torch.tensor([[0.5, 1.0, 2.0]])
    sampler = sampler_of(Sampling(temperature=0.0, **penalty), GREEDY, vocab=3)

    def likeliest(index: int) -> int:
        return int(sample(sampler, logits, torch.tensor([0]), torch.tensor([index])).tokens)

    assert sampler.remembers
    assert likeliest(0) == 2
    sampler.record(slice(0, 1), torch.tensor([0]), torch.tensor([2]))
    assert likeliest(1) == 1
    sampler.record(slice(0, 1), torch.tensor([1]), torch.tensor([1]))
    assert likeliest(1) == 1, "a row that meant nothing leaves no trace"
    assert likeliest(2) == 0
    sampler.move([(0, 1)])
    sampler.set(0, GREEDY)
    assert likeliest(2) == 2
    assert int(sample(sampler, logits, slice(1, 2), torch.tensor([2])).tokens) == 0
    sampler.set(1, GREEDY)
    assert not sampler.remembers


@pytest.mark.parametrize(("said", "read"), [(0, 1), (1, 1), (5, 8), (8, 8), (9, 16), (LONGEST, 2**14)])
def test_penalties_read_no_more_than_the_longest_answer(said: int, read: int) -> None:
    asked = [Sampling(frequency_penalty=1.0, repetition_penalty=1.3, seed=seed) for seed in range(40)]
    sampler, logits = sampler_of(*asked), random_logits(40)
    for place in range(min(said, 20)):
        sampler.record(slice(0, 40), torch.full((40,), place), torch.randint(VOCAB, (40,)))
    places = torch.full((40,), min(said, 20))
    needs = sampler.needs(range(40), said)
    assert needs.said == read
    found = sampler.sample(logits, slice(0, 40), places, needs)
    assert torch.equal(found.tokens, sampler.sample(logits, slice(0, 40), places, needs._replace(said=None)).tokens)


@pytest.mark.parametrize("vocab", [50, 64, 70])
def test_masks_ban_tokens_of_their_rows_alone(vocab: int) -> None:
    allowed = [[1, 31, 32], [40]]
    bits = np.zeros((2, 2), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            bits[row, token // 32] |= np.uint32(1 << token % 32)
    sampler, logits = sampler_of(*[Sampling(5.0, seed=seed) for seed in range(200)], vocab=vocab), torch.zeros(vocab)
    masks = RowMasks(np.array([7, 150]), bits)
    rows, places = logits.expand(200, -1), torch.zeros(200, dtype=torch.int64)
    plain = sample(sampler, rows, slice(0, 200), places).tokens
    masked = [sample(sampler, rows, slice(0, 200), places + place, masks=masks).tokens.tolist() for place in range(40)]
    assert {tokens[7] for tokens in masked} == set(allowed[0])
    assert {tokens[150] for tokens in masked} == set(allowed[1])
    others = [row for row in range(200) if row not in (7, 150)]
    assert torch.equal(torch.tensor(masked[0])[others], plain[others])


@given(asked=st.lists(samplings, min_size=2, max_size=8), seed=st.integers(0, 99), index=st.integers(0, 10**4))
@settings(max_examples=100)
def test_a_token_is_the_same_whatever_the_other_rows(asked: list[Sampling], seed: int, index: int) -> None:
    logits = random_logits(len(asked), seed=seed)
    indices = torch.arange(index, index + len(asked))
    together = sample(sampler_of(*asked), logits, slice(0, len(asked)), indices)
    for row, sampling in enumerate(asked):
        alone = sample(sampler_of(sampling), logits[row : row + 1], torch.tensor([0]), indices[row : row + 1])
        assert alone.tokens[0] == together.tokens[row]
        if sampling.logprobs is not None:
            assert alone.logprobs == [together.logprobs[row]]
        if sampling.greedy and not (sampling.biased or sampling.penalized):
            assert together.tokens[row] == logits[row].argmax()


@given(asked=st.lists(samplings, min_size=1, max_size=4), excess=st.booleans())
@settings(max_examples=50)
def test_needs_in_excess_change_no_token(asked: list[Sampling], excess: bool) -> None:
    sampler, rows = sampler_of(*asked), slice(0, len(asked))
    logits, indices = random_logits(len(asked)), torch.arange(len(asked))
    everything = Needs(True, VOCAB, False, True, 5, min_p=True, typical_p=True, biased=True, penalized=True)
    assert torch.equal(
        sample(sampler, logits, rows, indices).tokens, sampler.sample(logits, rows, indices, everything).tokens
    )


def test_rows_are_filtered_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as memory is left for on a GPU."""
    asked = [Sampling(typical_p=0.6, top_p=0.9, seed=seed) for seed in range(7)]
    sampler, logits, places = sampler_of(GREEDY, *asked), random_logits(7), torch.arange(7)
    expected = sample(sampler, logits, slice(1, 8), places).tokens
    rows, keep = [], drawing.keep_typical

    def counted(probabilities: Tensor, typical_p: Tensor) -> None:
        rows.append(len(probabilities))
        keep(probabilities, typical_p)

    monkeypatch.setattr(drawing, "keep_typical", counted)
    monkeypatch.setattr(drawing, "_RACING", 3 * VOCAB)
    assert torch.equal(sample(sampler, logits, slice(1, 8), places).tokens, expected)
    assert rows == [3, 3, 1]


def test_all_greedy_needs_nothing() -> None:
    assert sampler_of(GREEDY, Sampling(temperature=1e-9, top_k=5)).needs(range(2)) == Needs(False, 0, False, False, -1)
    assert sampler_of(GREEDY, Sampling(top_k=5, top_p=0.5)).needs(range(2)) == Needs(True, 8, True, True, -1)
    assert sampler_of(Sampling(top_k=VOCAB), Sampling(top_k=5)).needs(range(2)) == Needs(True, 8, False, False, -1)


def test_a_move_carries_the_parameters() -> None:
    asked = [Sampling(seed=1), GREEDY, Sampling(top_k=3, seed=2, logprobs=2), Sampling(top_p=0.5, seed=3)]
    sampler, logits, indices = sampler_of(*asked), random_logits(1).expand(2, -1), torch.tensor([7, 8])
    before = sample(sampler, logits, slice(2, 4), indices)
    sampler.move([(2, 0), (3, 1)])
    sampler.set(2, GREEDY)
    sampler.set(3, GREEDY)
    after = sample(sampler, logits, slice(0, 2), indices)
    assert torch.equal(before.tokens, after.tokens)
    assert before.logprobs == after.logprobs
    sampler.move([])


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3)
    sampler = sampler_of(Sampling(temperature=0.0, logprobs=2), GREEDY, Sampling(2.0, top_k=2, logprobs=0))
    sampled = sample(sampler, logits, slice(0, 3), torch.arange(3))
    exact = logits.log_softmax(-1)
    first, none, last = sampled.logprobs or []
    assert none is None
    assert last == RowLogprobs(pytest.approx(float(exact[2, sampled.tokens[2]]), abs=1e-5), [], [])
    best = exact[0].topk(2)
    assert first is not None
    assert first.top_ids == best.indices.tolist()
    assert first.top == pytest.approx(best.values.tolist(), abs=1e-5)
    assert first.chosen == first.top[0]
    assert sample(sampler, logits[1:2], slice(1, 2), torch.arange(1)).logprobs is None


def test_half_precision_logits_are_sampled_in_float32() -> None:
    logits = random_logits(1).bfloat16()[0]
    asked = Sampling(temperature=0.7, top_p=0.9, seed=5)
    assert torch.equal(draws(logits, asked, 100), draws(logits.float(), asked, 100))


def test_no_shape_and_no_branch_depends_on_data_off_the_cpu() -> None:
    """Tensors without data stand for those of a GPU: whoever reads one gets an error."""
    sampler = Sampler(4, VOCAB, "meta", LONGEST)
    sampler.set(1, Sampling(0.5, top_k=4, top_p=0.9, logprobs=3))
    sampler.set(2, Sampling(0.5, top_p=0.9, min_p=0.1, typical_p=0.9))
    sampler.set(
        3, Sampling(repetition_penalty=1.5, presence_penalty=1, logit_bias=((1, 2.0),), min_tokens=2, ends=(1,))
    )
    sampler.move([(1, 0)])
    rows = torch.empty(2, dtype=torch.int64, device="meta")
    for slots in (slice(1, 3), slice(2, 4), rows):
        needs = sampler.needs(range(4))
        sampled = sampler.sample(torch.empty(2, VOCAB, device="meta"), slots, rows, needs)
        assert sampled.tokens.shape == (2,)
        sampler.record(slots, rows, sampled.tokens)
        if slots != slice(2, 4):
            assert sampled.ranked is not None
            assert sampled.ranked.top.shape == (2, 3)


def test_random_numbers_are_uniform_and_unrelated() -> None:
    seeds, indices = (grid.flatten() for grid in torch.meshgrid(torch.arange(20), torch.arange(30), indexing="ij"))
    numbers = uniform(seeds, indices, torch.arange(200)[None]).view(20, 30, 200)
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 100, 0, 1)
    assert ((counts - 1200) ** 2 / 1200).sum() < 99 + 4 * math.sqrt(2 * 99)
    for axis in range(3):
        steps = numbers.shape[axis] - 1
        pairs = torch.stack([numbers.narrow(axis, 0, steps).flatten(), numbers.narrow(axis, 1, steps).flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1]) < 4 / math.sqrt(pairs.shape[1])
    assert len(numbers.unique()) > 0.98 * numbers.numel()


def test_random_numbers_are_as_written_down() -> None:
    """Against the generator written with Python's unbounded integers."""
    mask, half = 2**64 - 1, 2**32 - 1

    def mix_64(bits: int) -> int:
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & mask
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & mask
        return bits ^ bits >> 31

    def mix_32(bits: int) -> int:
        bits = (bits ^ bits >> 16) * 0x7FEB352D & half
        bits = (bits ^ bits >> 15) * 0x846CA68B & half
        return bits ^ bits >> 16

    golden = 0x9E3779B97F4A7C15
    for seed, index, token in ((0, 0, 0), (1, 2, 3), (-1, 5, 151_000), (2**63 - 1, 10**9, 2**31 - 1)):
        key = mix_64((mix_64(seed + golden & mask) + (index + 1) * golden) & mask)
        bits = mix_32(mix_32((token * 0x9E3779B9 + key) & half) ^ key >> 32)
        found = uniform(torch.tensor([seed]), torch.tensor([index]), torch.tensor([[token]]))
        assert float(found) == ((bits >> 9) + 0.5) / 2**23


def test_rounding_hardly_ever_changes_a_token() -> None:
    """Logits of a million tokens differ as those of a prompt's pass and of a decode step do."""
    sampling = Sampling(top_p=0.9)
    logits = random_logits(1000, 1000)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)) * 3e-6
    seeds = [replace(sampling, seed=seed) for seed in range(1000)]
    indices = torch.zeros(1000, dtype=torch.int64)
    exact, noisy = (
        sample(sampler_of(*seeds, vocab=1000), given, slice(0, 1000), indices).tokens
        for given in (logits, logits + noise)
    )
    assert (exact != noisy).sum() <= 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": 2**64}, "64 bits"),
        ({"logprobs": 21}, "0 to 20"),
        ({"min_p": 1.5}, "min_p"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
    ],
)
def test_what_cannot_be_sampled_is_refused(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**wrong)
