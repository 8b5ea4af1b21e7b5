"""A service as protocols see it: a text classifier. What other encoders answer is in `embedder` and `tagger`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from pliant.deployments.encoder.reading import Reader
from pliant.deployments.http.parameters import ClassifyParameters
from pliant.deployments.http.texts import Input, Prediction, Priority, Relevance
from pliant.deployments.serving.courier import each
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.scores import apply, likeliest
from pliant.models.encoder_head import Task
from pliant.texts import Pair


class Classifier(Reader):
    """Labels texts, or pairs of texts. One with a single label scores them, as rerankers do."""

    task: ClassVar[Task] = "classify"

    async def classify(self, texts: Sequence[Input], parameters: ClassifyParameters) -> list[Prediction]:
        """Answer all `texts`, or raise the RequestError of the first that fails."""
        if parameters.details:
            reason = f"parameters.details: {self.name} is no cascade, and has none"
            raise RequestError(Outcome.REJECTED, reason)
        if parameters.candidate_labels is not None:
            entailed = self._entailed()
            return await each([self._infer(text, parameters.candidate_labels, entailed, parameters) for text in texts])
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

    def _entailed(self) -> int:
        """Which label says that the first text of a pair implies the second."""
        found = [index for index, label in enumerate(self.labels) if label.lower().startswith("entail")]
        if not found:
            reason = (
                f"parameters.candidate_labels: {self.name} has no label that begins with 'entail', as models of "
                f"natural language inference do; it has {', '.join(self.labels)[:200]}"
            )
            raise RequestError(Outcome.REJECTED, reason)
        return found[0]

    async def _infer(
        self, text: Input, candidates: Sequence[str], entailed: int, parameters: ClassifyParameters
    ) -> Prediction:
        """Label a text by what it implies, as transformers' zero-shot pipeline does."""
        if not isinstance(text, str):
            raise RequestError(Outcome.REJECTED, "parameters.candidate_labels: got a pair; send single texts")
        hypotheses = [parameters.hypothesis_template.replace("{}", label) for label in candidates]
        readings = await each([self.ask(Pair(text, hypothesis), parameters) for hypothesis in hypotheses])
        logits = np.stack([reading.logits for reading in readings])
        if parameters.multi_label or len(candidates) == 1:
            against = logits[:, -1 if entailed == 0 else 0]
            scores = apply("sigmoid", logits[:, entailed] - against)
        else:
            scores = apply("softmax", logits[:, entailed])
        order = likeliest(scores, parameters.top_k)
        labels = [candidates[index] for index in order]
        warning = next((reading.warning for reading in readings if reading.warning), None)
        return Prediction(labels, scores[order].tolist(), warning, tokens=sum(reading.tokens for reading in readings))

    async def _relevance(self, pair: Pair, priority: Priority) -> Relevance:
        reading = await self.ask(pair, priority)
        return Relevance(float(apply(self.info.scores, reading.logits)[0]), reading.tokens)
