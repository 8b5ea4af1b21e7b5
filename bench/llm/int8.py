"""What int8 gains and costs, and fp8 costs: times of decode steps and prompts, and the perplexity of texts that were
not learned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pliant.bench.findings import Findings
from pliant.bench.llm.checkpoints import LARGE, checkpoint
from pliant.bench.llm.our_kernels import GREEDY, decode
from pliant.bench.llm.roofline import step_s
from pliant.bench.llm.workload import prompts
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
_PROMPTS = 3
_WAYS: tuple[Quantize | None, ...] = None, "int8"


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
            executor.load(folder, max(scale.rows), longest, dtype, "cpu", threads, quantize=quantize)
            for quantize in _WAYS
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
    return Findings([*figures, *_perplexities()])


def _prompt_s(loaded: Executor, tokens: int) -> float:
    """The median time of some prompts, each alone."""
    took = []
    for text in prompts(_PROMPTS, tokens, loaded.shape.vocab, seed=tokens):
        start = time.perf_counter()
        next(decode(loaded, [text], 1))
        took.append(time.perf_counter() - start)
    return median(took)


def _perplexities() -> list[Figure]:
    """What the executor makes of the zoo's model; with fp8 its keys and values are rounded, too."""
    folder = sources.fetch(_MODEL)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [encoding.ids for encoding in tokenizer.encode_batch(list(documents.held_out()))]
    ways: tuple[Quantize | None, ...] = *_WAYS, "fp8"
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
