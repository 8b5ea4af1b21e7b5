"""What int8 weights gain and cost: the time of a decode step, and the perplexity of texts that were not learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from tokenizers import Tokenizer

from pliant.bench.findings import Findings
from pliant.bench.llm.checkpoints import LARGE, checkpoint
from pliant.bench.llm.roofline import step_s
from pliant.bench.report import Figure, ratio
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.int8 import quantized
from pliant.models import sources
from pliant.torchvision_ops import declare
from pliant.zoo import documents, llama

_DTYPES = ("float32", "bfloat16")
_MODEL = "zoo/tiny-llama"


@dataclass(frozen=True)
class Scale:
    """Steps over texts of `context` tokens."""

    rows: tuple[int, ...]
    context: int
    steps: int
    repetitions: int

    @property
    def runs(self) -> int:
        return len(self.rows) * len(_DTYPES) * self.repetitions


def compare(scale: Scale, threads: int, done: Callable[[], object]) -> Findings:
    """Steps of 120M parameters, weights of either dtype and as int8 in turn; perplexity of the zoo's model."""
    took: dict[tuple[str, int, bool], list[float]] = {}
    for dtype in _DTYPES:
        folder, longest = checkpoint(LARGE, dtype), scale.context + scale.steps
        both = {
            int8: executor.load(folder, max(scale.rows), longest, dtype, "cpu", threads, int8=int8)
            for int8 in (False, True)
        }
        for _, rows in product(range(scale.repetitions), scale.rows):
            for int8, loaded in both.items():
                seconds = step_s(loaded, rows, scale.context, scale.steps)
                took.setdefault((dtype, rows, int8), []).append(seconds)
            done()
    figures = [
        ratio(f"int8_step_vs_{dtype}_b{rows}", took[dtype, rows, True], took[dtype, rows, False], "", "120M parameters")
        for dtype, rows in product(_DTYPES, scale.rows)
    ]
    return Findings([*figures, _perplexity()])


def _perplexity() -> Figure:
    declare()
    from transformers import LlamaForCausalLM

    folder = sources.fetch(_MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder)
    texts = documents.held_out()
    before = llama.perplexity(model, tokenizer, texts)
    _quantize(model)
    after = llama.perplexity(model, tokenizer, texts)
    return ratio("int8_perplexity_vs_float32", [after], [before], "<= 1.01", f"{_MODEL}, {before:.3f} and {after:.3f}")


@torch.no_grad()
def _quantize(model: Any) -> None:
    """Give all linear layers the weights that int8 stands for; embeddings stay as they are."""
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            values, scale = quantized(module.weight)
            module.weight.copy_(values * scale[:, None])
