"""A service as protocols see it whose model labels the tokens of a text: entities, as Hugging Face's pipeline has them.

The strategies are transformers' `TokenClassificationPipeline`'s, word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from pliant.config.encoder import EncoderConfig
from pliant.deployments.encoder.reading import Reader
from pliant.deployments.http.parameters import TagParameters
from pliant.deployments.http.texts import Entity, Tagged
from pliant.deployments.serving.courier import each
from pliant.models.decoder_info import read_json
from pliant.models.encoder_head import Task

Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Token:
    word: str
    scores: Scores
    """[labels]"""
    start: int
    end: int
    index: int
    continues: bool
    """Whether it goes on with the word of the token before it."""


class Tagger(Reader):
    """Labels tokens, and puts together what belongs together."""

    task: ClassVar[Task] = "tokens"

    def __init__(self, name: str, config: EncoderConfig, folder: Path, *others: Any) -> None:
        super().__init__(name, config, folder, *others)
        model: Any = self._tokenizer.model
        self._knows_words = bool(getattr(model, "continuing_subword_prefix", None))
        said = read_json(folder / "tokenizer_config.json").get("unk_token", getattr(model, "unk_token", None))
        unknown = said["content"] if isinstance(said, dict) else said
        self._unknown = self._tokenizer.token_to_id(unknown) if unknown else None

    async def tag(self, texts: Sequence[str], parameters: TagParameters) -> list[Tagged]:
        """The entities of all `texts`, or raise the RequestError of the first that fails."""
        return await each([self._tag(text, parameters) for text in texts])

    async def _tag(self, text: str, parameters: TagParameters) -> Tagged:
        reading = await self.ask(text, parameters)
        assert reading.encoding
        logits = reading.logits.reshape(-1, len(self.labels))
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        scores = shifted / shifted.sum(1, keepdims=True)
        tokens = list(self._labelled(text, reading.encoding, scores))
        strategy = parameters.aggregation_strategy
        if strategy in ("none", "simple"):
            entities = [self._entity(token.scores, [token], token.word, token.index) for token in tokens]
        else:
            words = [(word, self._joined([token.word for token in word])) for word in _words(tokens)]
            entities = [self._entity(_COMBINED[strategy](word), word, said) for word, said in words]
        if strategy != "none":
            entities = [self._group(group) for group in _groups(entities)]
        return Tagged(
            [entity for entity in entities if entity.label not in parameters.ignore_labels],
            reading.tokens,
            reading.warning,
        )

    def _labelled(self, text: str, encoding: Encoding, scores: Scores) -> Sequence[_Token]:
        found = []
        for index, (start, end) in enumerate(encoding.offsets):
            if encoding.special_tokens_mask[index]:
                continue
            word, said = encoding.tokens[index], text[start:end]
            if self._knows_words:
                continues = len(word) != len(said)
            else:
                continues = start > 0 and " " not in text[start - 1 : start + 1]
            if encoding.ids[index] == self._unknown:
                word, continues = said, False
            found.append(_Token(word, scores[index], start, end, index, continues))
        return found

    def _entity(self, scores: Scores, tokens: Sequence[_Token], word: str, index: int | None = None) -> Entity:
        best = int(scores.argmax())
        return Entity(self.labels[best], float(scores[best]), word, tokens[0].start, tokens[-1].end, index)

    def _group(self, entities: Sequence[Entity]) -> Entity:
        score = float(np.mean([entity.score for entity in entities]))
        word = self._joined([entity.word for entity in entities])
        label = entities[0].label.split("-", 1)[-1]
        return Entity(label, score, word, entities[0].start, entities[-1].end, None)

    def _joined(self, words: list[str]) -> str:
        decoder: Any = self._tokenizer.decoder
        return str(decoder.decode(words)) if decoder is not None else " ".join(words)


def _best_of(word: Sequence[_Token]) -> Scores:
    return max(word, key=lambda token: float(token.scores.max())).scores


def _average(word: Sequence[_Token]) -> Scores:
    average: Scores = np.mean([token.scores for token in word], axis=0)
    return average


_COMBINED: dict[str, Callable[[Sequence[_Token]], Scores]] = {
    "first": lambda word: word[0].scores,
    "max": _best_of,
    "average": _average,
}
"""By strategy: what the scores of a word are."""


def _words(tokens: Sequence[_Token]) -> list[list[_Token]]:
    words: list[list[_Token]] = []
    for token in tokens:
        if words and token.continues:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _groups(entities: Sequence[Entity]) -> list[list[Entity]]:
    """Entities of one label that follow each other, but where another one begins (`B-`)."""
    groups: list[list[Entity]] = []
    for entity in entities:
        begins, label = _tag(entity.label)
        if groups and not begins and label == _tag(groups[-1][-1].label)[1]:
            groups[-1].append(entity)
        else:
            groups.append([entity])
    return groups


def _tag(label: str) -> tuple[bool, str]:
    """Whether an entity begins with it, and of which kind that is."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label
