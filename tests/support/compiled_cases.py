"""Which tiny classifiers the tests compile: as few as show everything, for each takes a quarter of a minute."""

from typing import NamedTuple


class Case(NamedTuple):
    """A model, and what it is compiled for (see `RuntimeSpec`)."""

    kind: str
    max_length: int
    dtype: str = "float32"
    dynamic: bool = False
    importance: bool = False
    batch: int = 1


STATIC = Case("roberta", 17)
TELLING = Case("distilbert", 24, dynamic=True, importance=True)
HALF = Case("electra", 24, dtype="bfloat16", dynamic=True)
TOGETHER = Case("albert", 9, batch=3)
"""Computed by transformers."""
CASES = (STATIC, TELLING, HALF, TOGETHER)
