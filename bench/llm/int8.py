"""What int8 gains and costs: times of decode steps and prompts, and the perplexity of texts that were not learned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from tokenizers import Tokenizer
from torch import Tensor

from pliant.bench.findings import Findings
from pliant.bench.llm.checkpoints import LARGE, checkpoint
from pliant.bench.llm.our_kernels import decode
from pliant.bench.llm.roofline import step_s
from pliant.bench.llm.workload import prompts
from pliant.bench.report import Figure, ratio
from pliant.kernels.decoder import cpu_kernels, executor
from pliant.kernels.decoder.executor import Executor
from pliant.models import sources
from pliant.zoo import documents, llama
from pliant.zoo.decoder import EMBEDDING, Decoder
from pliant.zoo.shapes import BASE, SHAPES, LlamaShape

_DTYPES = ("float32", "bfloat16")
_MODEL = f"zoo/{BASE}"
_PROMPTS = 3


@dataclass(frozen=True)
class Scale:
    """Steps over texts of `context` tokens, and prompts of `prompt` tokens, one at a time."""

    rows: tuple[int, ...]
    context: int
    steps: int
    prompt: int
    repetitions: int

    @property
    def runs(self) -> int:
        return (len(self.rows) + 1) * len(_DTYPES) * self.repetitions


def compare(scale: Scale, threads: int, done: Callable[[], object]) -> Findings:
    """Steps and prompts of 120M parameters, without int8 and with it in turn; perplexity of the zoo's model."""
    longest = max(scale.context + scale.steps, scale.prompt + 1)
    timed: dict[str, Callable[[Executor], float]] = {
        f"step_b{rows}": partial(step_s, batch=rows, context=scale.context, steps=scale.steps) for rows in scale.rows
    }
    timed[f"prompt_{scale.prompt}"] = partial(_prompt_s, tokens=scale.prompt)
    figures: list[Figure] = []
    for dtype in _DTYPES:
        folder = checkpoint(LARGE, dtype)
        without, with_int8 = (
            executor.load(folder, max(scale.rows), longest, dtype, "cpu", threads, int8=int8) for int8 in (False, True)
        )
        took: dict[str, tuple[list[float], list[float]]] = {what: ([], []) for what in timed}
        for _ in range(scale.repetitions):
            for what, seconds in timed.items():
                for loaded, times in zip((with_int8, without), took[what], strict=True):
                    times.append(seconds(loaded))
                done()
        figures += [
            ratio(f"int8_{what}_vs_{dtype}", ours, theirs, "", "120M parameters")
            for what, (ours, theirs) in took.items()
        ]
    return Findings([*figures, _perplexity(threads)])


def _prompt_s(loaded: Executor, tokens: int) -> float:
    """The median time of some prompts, each alone."""
    took = []
    for text in prompts(_PROMPTS, tokens, loaded.shape.vocab, seed=tokens):
        start = time.perf_counter()
        next(decode(loaded, [text], 1))
        took.append(time.perf_counter() - start)
    return median(took)


def _perplexity(threads: int) -> Figure:
    folder, shape = sources.fetch(_MODEL), SHAPES[BASE]
    assert isinstance(shape, LlamaShape)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = documents.held_out()
    model = Decoder.load(shape, folder)
    before = llama.perplexity(model, tokenizer, texts)
    after = llama.perplexity(_Int8(model, threads), tokenizer, texts)
    return ratio("int8_perplexity_vs_float32", [after], [before], "<= 1.01", f"{_MODEL}, {before:.3f} and {after:.3f}")


class _Int8(Decoder):
    """`model` with the linear layers that a service with `quantize: int8` has."""

    def __init__(self, model: Decoder, threads: int) -> None:
        super().__init__(model.shape, model.weights)
        kernels = cpu_kernels.best(threads)
        self._layers = {
            name.removesuffix(".weight"): kernels.int8_linear(weight, None)
            for name, weight in model.weights.items()
            if weight.ndim == 2 and name != EMBEDDING
        }

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self._layers[name](x.flatten(0, -2)).view(*x.shape[:-1], -1)
