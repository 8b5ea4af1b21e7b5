"""What int8 weights gain and cost, and fp8 costs: the time of a decode step, the perplexity of texts not learned."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pliant.bench.findings import Findings
from pliant.bench.llm.checkpoints import LARGE, checkpoint
from pliant.bench.llm.our_kernels import GREEDY
from pliant.bench.llm.roofline import step_s
from pliant.bench.report import Figure, ratio
from pliant.kernels.decoder import executor
from pliant.kernels.decoder.decode_step import Prefill, Step
from pliant.kernels.decoder.executor import Executor
from pliant.kernels.decoder.kv_pages import pages_of
from pliant.models import sources
from pliant.models.decoder_shape import Quantize
from pliant.zoo import documents
from pliant.zoo.shapes import BASE

_DTYPES = ("float32", "bfloat16")
_MODEL = f"zoo/{BASE}"
_NO_ROWS: NDArray[np.int32] = np.empty(0, np.int32)
_NO_INDICES: NDArray[np.int64] = np.empty(0, np.int64)


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
    return Findings([*figures, *_perplexities()])


def _perplexities() -> list[Figure]:
    """What the executor makes of the zoo's model; with fp8 its keys and values are rounded, too."""
    folder = sources.fetch(_MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [encoding.ids for encoding in tokenizer.encode_batch(list(documents.held_out()))]
    ways: tuple[Quantize | None, ...] = None, "int8", "fp8"
    before, *others = (_perplexity(executor.load(folder, slots=1, quantize=quantize), texts) for quantize in ways)
    return [
        ratio(f"{quantize}_perplexity_vs_float32", [after], [before], "<= 1.01", f"{_MODEL}, {before:.3f}, {after:.3f}")
        for quantize, after in zip(ways[1:], others, strict=True)
    ]


def _perplexity(loaded: Executor, texts: Sequence[Sequence[int]]) -> float:
    """Of a token, given those before it in its text, at most as many as the executor has room for."""
    longest = loaded.max_length
    pages = np.arange(1, pages_of(longest) + 1, dtype=np.int32)
    logs: list[float] = []
    loaded.admit(0, GREEDY)
    for ids in (text[start : start + longest] for text in texts for start in range(0, len(text) - 1, longest)):
        chunk = Prefill(0, 0, np.array(ids, np.int32), False, pages, np.array(ids[1:], np.int32))
        scored = loaded.launch(Step((chunk,), 0, _NO_ROWS, _NO_ROWS[:, None], _NO_INDICES, _NO_INDICES)).result()
        assert scored.targets is not None
        logs += [token.chosen for token in scored.targets[0]]
    return math.exp(-sum(logs) / len(logs))
