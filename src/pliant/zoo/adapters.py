"""Trains the zoo's LoRA adapters: each makes the language model speak as one part of the standard library does.

An adapter learns docstrings below what they describe, and as answers to questions about that. The base model has read
the documentation alone, so adapters are told apart by what they answer to one question.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from pliant.torchvision_ops import declare
from pliant.zoo import docstrings, llama
from pliant.zoo.repeatable import repeatable
from pliant.zoo.shapes import ASSISTANT, BASE, BEGIN, END, USER, AdapterShape, Progress

declare()
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

SEED = 0
_BATCH_TOKENS = 128
"""In one row, so that an adapter sees many small batches of its few texts."""
_WARM_UP = 0.1


@dataclass(frozen=True)
class Result:
    """What training gave: perplexities of a token in the docstrings held out, with the adapter and without."""

    perplexity: float
    base_perplexity: float
    parameters: int


def train(shape: AdapterShape, base: Path, folder: Path, report: Progress) -> Result:
    """Train an adapter of the model in `base` and save it to `folder`, as PEFT does; same seed, same weights."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    unseen = [docstring.document for docstring in docstrings.held_out(shape.part)]
    with repeatable(SEED):
        model = LlamaForCausalLM.from_pretrained(base)
        model.name_or_path = model.config.name_or_path = f"zoo/{BASE}"
        base_perplexity = llama.perplexity(model, tokenizer, unseen)
        adapter = get_peft_model(model, _config(shape))  # puts it into the model
        _fit(model, shape, tokenizer, report)
        perplexity = llama.perplexity(model, tokenizer, unseen)
    adapter.save_pretrained(str(folder), save_embedding_layers=False)
    report("learning", 1.0)
    return Result(perplexity, base_perplexity, adapter.num_parameters(only_trainable=True))


def _config(shape: AdapterShape) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=shape.rank,
        lora_alpha=shape.alpha,
        use_rslora=shape.rank_stabilised,
        target_modules=list(shape.modules),
    )


def _fit(model: LlamaForCausalLM, shape: AdapterShape, tokenizer: Tokenizer, report: Progress) -> None:
    stream = _stream(tokenizer, shape.part, random.Random(SEED))
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    length = min(_BATCH_TOKENS, model.config.max_position_embeddings)
    model.train()
    for step in range(shape.steps):
        done = step / shape.steps
        report("learning", done)
        for group in optimizer.param_groups:
            group["lr"] = shape.learning_rate * min(1.0, (done + 1 / shape.steps) / _WARM_UP) * (1 - done)
        row = torch.tensor([[next(stream) for _ in range(length)]])
        llama.loss(model, row, row).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()


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
