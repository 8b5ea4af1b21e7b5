"""A service as protocols see it: a text classifier. What other encoders answer is in `embedder` and `tagger`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pliant.deployments.encoder.reading import Reader
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Input, Pair, Prediction, Priority, Relevance
from pliant.deployments.serving.courier import each
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.scores import apply, likeliest
from pliant.models.encoder_head import Task


class Classifier(Reader):
    """Labels texts, or pairs of texts. One with a single label scores them, as rerankers do."""

    task: ClassVar[Task] = "classify"

    async def classify(self, texts: Sequence[Input], parameters: ClassifyParameters) -> list[Prediction]:
        """Answer all `texts`, or raise the RequestError of the first that fails."""
        if parameters.details:
            reason = f"parameters.details: {self.name} is no cascade, and has none"
            raise RequestError(Outcome.REJECTED, reason)
        return await each([self._classify(text, parameters) for text in texts])

    async def relevance(self, pairs: Sequence[Pair], priority: Priority) -> list[Relevance]:
        """How well the second text of each pair suits the first. Raises RequestError."""
        if not self.info.scores_pairs:
            reason = f"{self.name} chooses among {len(self.labels)} labels; only models of one label score a text"
            raise RequestError(Outcome.REJECTED, reason, param="model")
        return await each([self._relevance(pair, priority) for pair in pairs])

    async def _classify(self, text: Input, parameters: ClassifyParameters) -> Prediction:
        reading = await self.ask(text, parameters)
        scores = apply(parameters.function_to_apply or self.info.scores, reading.logits)
        order = likeliest(scores, parameters.top_k)
        labels = [self.labels[index] for index in order]
        return Prediction(labels, scores[order].tolist(), reading.warning, tokens=reading.tokens)

    async def _relevance(self, pair: Pair, priority: Priority) -> Relevance:
        reading = await self.ask(pair, priority)
        return Relevance(float(apply(self.info.scores, reading.logits)[0]), reading.tokens)
