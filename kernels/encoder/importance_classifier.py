"""Tells which tokens are important without slowing the texts that nobody asks about (Tabi §4.2).

Attention weights exist only where attention is computed step by step, not by a fused kernel. For short texts that is
as fast: on a CPU it costs nothing up to 32 tokens and 5% at 64, and one pass gives both. Longer texts would pay (a
quarter at 128 tokens, more than the pass itself at 512): they are read by the plain runtime, and by the one that tells
only once it is known that the importance of their tokens is wanted.
"""

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pliant.kernels.encoder import compiled_classifier
from pliant.kernels.encoder.compiled_classifier import Runtime

FUSED = 64
"""Tokens of the longest text that one pass gives logits and importance of."""


class WithImportance(NamedTuple):
    """What a classifier says of one text, and of its tokens if that was wanted."""

    logits: np.ndarray
    """float32 [labels]."""
    importance: np.ndarray | None
    """float32 [tokens]: the attention that each token received (see `importance.received`); None if not wanted."""
    importance_s: float
    """Seconds that importance took beyond the logits; 0 where one pass gave both."""


class ImportanceRuntime:
    """A classifier that answers one text at a time and, on demand, tells of its tokens.

    `stepwise` gives both in one pass, `plain` logits alone; it may be None where no text is longer than FUSED. Any
    thread may call it, but one at a time.
    """

    def __init__(self, plain: Runtime | None, stepwise: Runtime) -> None:
        self._plain = plain
        self._stepwise = stepwise
        longest = plain or stepwise
        self.max_length = longest.max_length
        self.backend = longest.backend
        self.dynamic = longest.dynamic

    def __call__(self, ids: np.ndarray | Sequence[int], types: np.ndarray | Sequence[int] | None = None) -> np.ndarray:
        """The logits, float32 [labels], as `Runtime` gives them. Raises ValueError as it does."""
        return self._for(ids)(ids, types)

    def with_importance(
        self,
        ids: np.ndarray | Sequence[int],
        types: np.ndarray | Sequence[int] | None,
        wanted: Callable[[np.ndarray], bool],
    ) -> WithImportance:
        """The logits and, if these are `wanted` to come with it, the importance of tokens.

        Raises ValueError as `Runtime` does.
        """
        output = self._for(ids).run(ids, types)
        logits, importance = output.logits, output.importance
        if not wanted(logits):
            return WithImportance(logits, None, 0.0)
        if importance is not None:
            return WithImportance(logits, importance, 0.0)
        started = time.perf_counter()
        importance = self._stepwise.run(ids, types).importance
        return WithImportance(logits, importance, time.perf_counter() - started)

    def _for(self, ids: np.ndarray | Sequence[int]) -> Runtime:
        if self._plain is None or (self.dynamic and len(ids) <= FUSED):
            return self._stepwise
        return self._plain


def load(folder: Path, max_length: int, **options: Any) -> ImportanceRuntime:
    """The classifier in `folder`, as `compiled_classifier.load` with these options makes it, and able to tell.

    Raises ModelError as that does, also for a model without attention weights.
    """
    made = functools.partial(compiled_classifier.load, folder, max_length, **options)
    return ImportanceRuntime(made() if max_length > FUSED else None, made(importance=True))


def prepare(folder: Path, max_length: int, **options: Any) -> None:
    """Compile what `load` with these arguments asks for, as `compiled_classifier.prepare` does."""
    if max_length > FUSED:
        compiled_classifier.prepare(folder, max_length, **options)
    compiled_classifier.prepare(folder, max_length, importance=True, **options)


def is_prepared(folder: Path, max_length: int, **options: Any) -> bool:
    """Whether `load` with these arguments has nothing to compile."""
    plain = max_length <= FUSED or compiled_classifier.is_prepared(folder, max_length, **options)
    return plain and compiled_classifier.is_prepared(folder, max_length, importance=True, **options)
