"""A thousand greedy requests, of mixed lengths and arrivals, are answered token for token as by transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from decoders import FAMILIES, logits, save
from scripted_executor import byte_tokenizer

from pliant.deployments.llm.engine import Engine
from pliant.deployments.llm.request import Generation, Piece
from pliant.kernels import executor
from pliant.sampling import Sampling

REQUESTS = 92
"""For each of eleven families."""
LONGEST_PROMPT, LONGEST_ANSWER, VOCAB = 60, 30, 97


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    rng = random.Random(family)
    generations = [
        Generation(
            str(number),
            prompt=tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, LONGEST_PROMPT))),
            max_tokens=rng.randint(1, LONGEST_ANSWER),
            sampling=Sampling(temperature=0),
        )
        for number in range(REQUESTS)
    ]
    answers = serve(executor.load(tmp_path, slots=8), generations, rng)
    for generation in generations:
        answer = answers[generation.id]
        assert len(answer) == generation.max_tokens
        scores = logits(model, [*generation.prompt, *answer[:-1]])[len(generation.prompt) - 1 :]
        assert torch.equal(scores.argmax(-1), torch.tensor(answer)), generation


def serve(loaded: executor.Executor, generations: list[Generation], rng: random.Random) -> dict[str, list[int]]:
    """All answers, from an engine that checks itself; requests come a few at a time, and prompts in chunks."""
    engine = Engine(loaded, byte_tokenizer(), (), queue=len(generations), stall_s=0.002, debug=True)
    answers: dict[str, list[int]] = {generation.id: [] for generation in generations}
    coming = list(generations)
    while coming or engine.busy:
        for _ in range(min(rng.choice((0, 0, 1, 3)), len(coming))):
            engine.add(coming.pop())
        for name, item in engine.step():
            assert isinstance(item, Piece), item
            answers[name] += item.tokens
    return answers
