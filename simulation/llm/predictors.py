"""Who tells a simulated scheduler how long an answer will be: an oracle that errs, as the paper has it, or ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pliant.policies.llm.output_length import OutputLengths
from pliant.simulation.llm.outcome import Request


class Predictor(Protocol):
    """Asked once for each request, in order of arrival; requests are named by their place in the workload."""

    def predict(self, key: int) -> int:
        """Tokens of its answer, at least 1."""

    def observe(self, key: int) -> None:
        """It is answered, and how long the answer is may be known from now on."""


class NoisyOracle:
    """Right for a share `accuracy` of the requests; of the others it says the length of another one, drawn at random.

    The paper's predictor classifies lengths with an accuracy of 80% and is evaluated with 100% and 60% too (§5.4).
    """

    def __init__(self, requests: Sequence[Request], accuracy: float, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        outputs = np.array([request.output for request in requests])
        right = rng.random(len(outputs)) < accuracy
        self._lengths: list[int] = np.where(right, outputs, rng.permutation(outputs)).tolist()

    def predict(self, key: int) -> int:
        return self._lengths[key]

    def observe(self, key: int) -> None:
        pass


class Online:
    """Our predictor: it starts with nothing, and learns from what is answered."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.lengths: OutputLengths[int] = OutputLengths()
        self._requests = requests
        self._most = max(request.output for request in requests)
        self._predicted: dict[int, int] = {}

    def predict(self, key: int) -> int:
        request = self._requests[key]
        self._predicted[key] = self.lengths.predict(request.adapter, request.prompt, self._most)
        return self._predicted[key]

    def observe(self, key: int) -> None:
        request = self._requests[key]
        self.lengths.observe(request.adapter, request.prompt, request.output, self._predicted.pop(key))
