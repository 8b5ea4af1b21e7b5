"""How long a pass over several texts takes, from a table of passes that were measured: T(texts, length).

What cuts a queue into passes asks it for mixes of lengths, and the simulator serves by it. No torch is imported.
"""

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator


class PassTimes(BaseModel):
    """Seconds of passes over `counts` texts (rows) of `lengths` tokens each (columns), both rising.

    0 stands for what was too much to measure: more texts of a length then take longer in proportion.
    """

    model_config = ConfigDict(frozen=True)

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> "PassTimes":
        table = np.array(self.seconds)
        rising = all(each[0] > 0 and (np.diff(each) > 0).all() for each in (self.counts, self.lengths))
        if not rising or table.shape != (len(self.counts), len(self.lengths)) or not (table[0] > 0).all():
            raise ValueError("counts and lengths must rise, and each length must have been measured with fewest texts")
        return self

    def packed_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a packed pass over texts of these lengths.

        They take as long as texts of one length that have as many tokens, and as many pairs of tokens that attend to
        each other, in all.
        """
        tokens, pairs = sum(lengths), sum(length * length for length in lengths)
        return self.uniform_s(tokens * tokens / pairs, pairs / tokens)

    def uniform_s(self, count: float, length: float) -> float:
        """Seconds of a pass over `count` texts of `length` tokens each; in between, a straight line in logarithms."""
        table = np.array(self.seconds)
        for row in range(1, len(table)):
            more = self.counts[row] / self.counts[row - 1]
            table[row] = np.where(table[row] > 0, table[row], table[row - 1] * more)
        logs = np.log(table)
        by_count = [np.interp(np.log(length), np.log(self.lengths), row) for row in logs]
        beyond = max(1.0, count / self.counts[-1])
        return float(np.exp(np.interp(np.log(count), np.log(self.counts), by_count)) * beyond)
