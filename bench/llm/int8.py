"""What int8 weights gain and cost: the time of a decode step, and the perplexity of texts that were not learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from tokenizers import Tokenizer
from torch import Tensor

from pliant.bench.findings import Findings
from pliant.bench.llm.checkpoints import LARGE, checkpoint
from pliant.bench.llm.roofline import step_s
from pliant.bench.report import Figure, ratio
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.int8 import quantized
from pliant.models import sources
from pliant.models.decoder_shape import Quantize
from pliant.zoo import documents, llama
from pliant.zoo.decoder import EMBEDDING, Decoder
from pliant.zoo.shapes import BASE, SHAPES, LlamaShape

_DTYPES = ("float32", "bfloat16")
_MODEL = f"zoo/{BASE}"


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
    took: dict[tuple[str, int, Quantize | None], list[float]] = {}
    ways: tuple[Quantize | None, ...] = None, "int8"
    for dtype in _DTYPES:
        folder, longest = checkpoint(LARGE, dtype), scale.context + scale.steps
        both = {
            quantize: executor.load(folder, max(scale.rows), longest, dtype, "cpu", threads, quantize=quantize)
            for quantize in ways
        }
        for _, rows in product(range(scale.repetitions), scale.rows):
            for quantize, loaded in both.items():
                seconds = step_s(loaded, rows, scale.context, scale.steps)
                took.setdefault((dtype, rows, quantize), []).append(seconds)
            done()
    figures = [
        ratio(
            f"int8_step_vs_{dtype}_b{rows}", took[dtype, rows, "int8"], took[dtype, rows, None], "", "120M parameters"
        )
        for dtype, rows in product(_DTYPES, scale.rows)
    ]
    return Findings([*figures, _perplexity()])


def _perplexity() -> Figure:
    folder, shape = sources.fetch(_MODEL), SHAPES[BASE]
    assert isinstance(shape, LlamaShape)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Decoder.load(shape, folder)
    texts = documents.held_out()
    before = llama.perplexity(model, tokenizer, texts)
    model.weights |= {name: _as_int8(weight) for name, weight in model.weights.items() if _is_linear(name, weight)}
    after = llama.perplexity(model, tokenizer, texts)
    return ratio("int8_perplexity_vs_float32", [after], [before], "<= 1.01", f"{_MODEL}, {before:.3f} and {after:.3f}")


def _is_linear(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and name != EMBEDDING


def _as_int8(weight: Tensor) -> Tensor:
    """What int8 stands for."""
    values, scale = quantized(weight)
    return values * scale[:, None]
