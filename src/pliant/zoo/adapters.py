"""Trains the zoo's LoRA adapters: each makes the language model speak as one part of the standard library does.

An adapter learns docstrings below what they describe, and as answers to questions about that. The base model has read
the documentation alone, so adapters are told apart by what they answer to one question.

All learn side by side, a row of the batch each: what is the same for all is computed for all at once.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from pliant.training.learner import Group, Learner
from pliant.zoo import docstrings, llama
from pliant.zoo.decoder import Decoder, prefix
from pliant.zoo.repeatable import repeatable
from pliant.zoo.saving import save_json
from pliant.zoo.shapes import ASSISTANT, BASE, BEGIN, END, SHAPES, USER, AdapterShape, LlamaShape, Progress

SEED = 0
_ROW_TOKENS = 128
"""So that an adapter sees many small batches of its few texts."""


@dataclass(frozen=True)
class Result:
    """What training gave: perplexities of a token in the docstrings held out, with the adapter and without."""

    perplexity: float
    base_perplexity: float
    parameters: int


class Adapter:
    """A LoRA adapter: A [rank, in] and B [out, rank] by the names of the linear layers that they are added to."""

    def __init__(self, shape: AdapterShape, model: Decoder) -> None:
        self.shape = shape
        self.pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for layer in range(model.shape.layers):
            for module in shape.modules:
                block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
                name = f"{prefix(layer)}{block}.{module}"
                outputs, inputs = model.weights[f"{name}.weight"].shape
                bound = 1 / math.sqrt(inputs)
                a = torch.empty(shape.rank, inputs).uniform_(-bound, bound)
                self.pairs[name] = (a.requires_grad_(), torch.zeros(outputs, shape.rank, requires_grad=True))

    @property
    def weights(self) -> list[Tensor]:
        return [weight for pair in self.pairs.values() for weight in pair]

    def added(self, name: str, x: Tensor) -> Tensor | None:
        """What it adds to the output of the linear layer `name` for the input x; None if it leaves that alone."""
        if name not in self.pairs:
            return None
        a, b = self.pairs[name]
        return functional.linear(functional.linear(x, a) * self.shape.scaling, b)

    def save(self, folder: Path) -> None:
        """As PEFT does."""
        folder.mkdir(parents=True)
        tensors = {
            f"base_model.model.{name}.lora_{which}.weight": weight.detach()
            for name, pair in self.pairs.items()
            for which, weight in zip("AB", pair, strict=True)
        }
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        save_json(self.shape.config(), folder / "adapter_config.json")


def train(
    shapes: Mapping[str, AdapterShape], steps: int, base: Path, into: Path, report: Progress
) -> dict[str, Result]:
    """Train adapters of the model in `base` and save each to a folder in `into`; same seed, same weights."""
    shape = SHAPES[BASE]
    assert isinstance(shape, LlamaShape)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    model = Decoder.load(shape, base)
    with repeatable(SEED):
        made = {name: Adapter(each, model) for name, each in shapes.items()}
        _fit(model, list(made.values()), steps, tokenizer, report)
        results = {name: _measured(model, adapter, tokenizer) for name, adapter in made.items()}
    for name, adapter in made.items():
        adapter.save(into / name)
    report("learning", 1.0)
    return results


def _measured(model: Decoder, adapter: Adapter, tokenizer: Tokenizer) -> Result:
    unseen = [docstring.document for docstring in docstrings.held_out(adapter.shape.part)]
    return Result(
        llama.perplexity(model, tokenizer, unseen, lambda name, x: _with_each(model, [adapter], name, x)),
        llama.perplexity(model, tokenizer, unseen),
        sum(map(torch.numel, adapter.weights)),
    )


def _with_each(model: Decoder, adapters: Sequence[Adapter], name: str, x: Tensor) -> Tensor:
    """What the linear layer `name` makes of x [adapters, length, in], of which each row has its adapter."""
    found = model.linear(name, x)
    added = [adapter.added(name, row) for adapter, row in zip(adapters, x, strict=True)]
    if all(more is None for more in added):
        return found
    rows = [row if more is None else row + more for row, more in zip(found, added, strict=True)]
    return torch.stack(rows)


def _fit(model: Decoder, adapters: Sequence[Adapter], steps: int, tokenizer: Tokenizer, report: Progress) -> None:
    streams = [_stream(tokenizer, adapter.shape.part, random.Random(SEED)) for adapter in adapters]
    learners = [
        Learner([Group(adapter.weights, adapter.shape.learning_rate)], steps, betas=(0.9, 0.99), clip=1.0)
        for adapter in adapters
    ]
    length = min(_ROW_TOKENS, model.shape.positions)
    for step in range(steps):
        report("learning", step / steps)
        ids = torch.tensor([[next(stream) for _ in range(length)] for stream in streams])
        states = model.states(ids, linear=lambda name, x: _with_each(model, adapters, name, x))
        summed = model.loss(states, ids, ids >= 0) * len(adapters)
        summed.backward()  # type: ignore[no-untyped-call]
        for learner in learners:
            learner.step()


def _stream(tokenizer: Tokenizer, part: str, rng: random.Random) -> Iterator[int]:
    """Token ids without end: every docstring as a document or as an answer, in an order that changes every time."""
    known = docstrings.training(part)
    while True:
        for docstring in rng.sample(known, len(known)):
            if rng.random() < 0.5:
                yield from tokenizer.encode(docstring.document).ids
            else:
                question = rng.choice(docstrings.QUESTIONS).format(docstring.subject)
                asked, answer = (
                    tokenizer.encode(text, add_special_tokens=False).ids for text in (question, docstring.text)
                )
                yield from (BEGIN, USER, *asked, END, ASSISTANT, *answer)
            yield END
