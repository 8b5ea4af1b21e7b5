"""Texts in the Hugging Face inference shape: what the body is, and what is answered, follows from the model's task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from pliant.deployments.http.body import off_loop
from pliant.deployments.http.parameters import ClassifyParameters, EmbedParameters, TagParameters, validated_json
from pliant.deployments.http.texts import (
    Embedding,
    Entity,
    Input,
    Prediction,
    Tagged,
    TextClassifier,
    TextEmbedder,
    TextTagger,
    many_numbers,
    task_of,
)
from pliant.deployments.http.validation import bounded, check_count
from pliant.texts import Pair

Options = dict[str, Any]
"""Of the hosted service (caching, waiting for a model): accepted, without effect."""


class TextPair(BaseModel):
    """Two texts to read together."""

    model_config = ConfigDict(extra="forbid")

    text: str
    text_pair: str | None = None

    def read(self) -> Input:
        return self.text if self.text_pair is None else Pair(self.text, self.text_pair)


class TextClassificationRequest(BaseModel):
    """A text, or several, to classify; a text may be a pair."""

    model_config = ConfigDict(extra="forbid")

    inputs: str | TextPair | Annotated[list[str | TextPair], Field(fail_fast=True)]
    parameters: ClassifyParameters = ClassifyParameters()
    options: Options = {}


class TokenClassificationRequest(BaseModel):
    """A text, or several, whose entities are wanted."""

    model_config = ConfigDict(extra="forbid")

    inputs: str | Annotated[list[str], Field(fail_fast=True)]
    parameters: TagParameters = TagParameters()
    options: Options = {}


class Sentences(BaseModel):
    """A sentence, and others to compare with it."""

    model_config = ConfigDict(extra="forbid")

    source_sentence: str
    sentences: Annotated[list[str], Field(fail_fast=True)]


class FeatureExtractionRequest(BaseModel):
    """A text, or several, to embed, or sentences to compare; clients put parameters beside `inputs`."""

    model_config = ConfigDict(extra="forbid")

    inputs: str | Sentences | Annotated[list[str], Field(fail_fast=True)]
    parameters: EmbedParameters = EmbedParameters()
    options: Options = {}
    normalize: bool | None = None
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    truncate: bool | None = None
    truncation_direction: Literal["right", "Right"] | None = None

    def merged(self) -> EmbedParameters:
        """What is said beside `inputs` counts before what `parameters` say."""
        beside = self.model_dump(include={"normalize", "prompt_name", "dimensions", "truncate"}, exclude_none=True)
        return self.parameters.model_copy(update=beside)


BODIES = (TextClassificationRequest, TokenClassificationRequest, FeatureExtractionRequest)


async def answer_texts(endpoint: Any, body: bytes, most: int) -> Response:
    """What `endpoint` says of the texts in `body`, at most `most`. Raises RequestError."""
    match task_of(endpoint):
        case "embed":
            return await _embed(endpoint, body, most)
        case "tokens":
            return await _tag(endpoint, body, most)
    return await _classify(endpoint, body, most)


async def _classify(classifier: TextClassifier, body: bytes, most: int) -> Response:
    """A list of labels for each text, also for a single one unless the labels are the client's."""
    call = await off_loop(len(body), lambda: validated_json(TextClassificationRequest, body))
    given = bounded(call.inputs if isinstance(call.inputs, list) else [call.inputs], most, "text")
    texts = [text if isinstance(text, str) else text.read() for text in given]
    candidates = call.parameters.candidate_labels
    if candidates is not None:
        check_count(len(texts) * len(candidates), most, "label")
    predictions = await classifier.classify(texts, call.parameters)
    found = [_scored(prediction, call.parameters.details) for prediction in predictions]
    return JSONResponse(found[0] if candidates is not None and isinstance(call.inputs, str) else found)


async def _tag(tagger: TextTagger, body: bytes, most: int) -> Response:
    """A list of entities for a text, or a list of these for a list of texts."""
    call = await off_loop(len(body), lambda: validated_json(TokenClassificationRequest, body))
    texts = bounded([call.inputs] if isinstance(call.inputs, str) else call.inputs, most, "text")
    found = [_entities(tagged) for tagged in await tagger.tag(texts, call.parameters)]
    return JSONResponse(found[0] if isinstance(call.inputs, str) else found)


async def _embed(embedder: TextEmbedder, body: bytes, most: int) -> Response:
    """A vector for a text, a list of these for a list, or how much alike sentences are."""
    call = await off_loop(len(body), lambda: validated_json(FeatureExtractionRequest, body))
    parameters = call.merged()
    if isinstance(call.inputs, Sentences):
        others = bounded(call.inputs.sentences, most, "text")
        first, *rest = await embedder.embed([call.inputs.source_sentence, *others], parameters)
        return JSONResponse([embedder.similarity(first.vector, each.vector) for each in rest])
    texts = bounded([call.inputs] if isinstance(call.inputs, str) else call.inputs, most, "text")
    return await _vectors(await embedder.embed(texts, parameters), isinstance(call.inputs, str))


async def _vectors(embeddings: Sequence[Embedding], single: bool) -> Response:
    def write() -> Response:
        vectors = [embedding.vector.tolist() for embedding in embeddings]
        return JSONResponse(vectors[0] if single else vectors)

    return await asyncio.to_thread(write) if many_numbers(embeddings) else write()


def _scored(prediction: Prediction, details: bool) -> list[dict[str, Any]]:
    """Each label with its score and, as clients keep to this shape, what there is to say of the whole answer."""
    more: dict[str, Any] = {"warning": prediction.warning} if prediction.warning else {}
    if prediction.details and (details or prediction.details.degraded):
        more |= asdict(prediction.details)
    return [
        {"label": label, "score": score, **more}
        for label, score in zip(prediction.labels, prediction.scores, strict=True)
    ]


def _entities(tagged: Tagged) -> list[dict[str, Any]]:
    more: dict[str, Any] = {"warning": tagged.warning} if tagged.warning else {}
    return [{**_entity(entity), **more} for entity in tagged.entities]


def _entity(entity: Entity) -> dict[str, Any]:
    """As transformers' pipeline has it: of a token, or of a group of them."""
    where = {"word": entity.word, "start": entity.start, "end": entity.end}
    if entity.index is None:
        return {"entity_group": entity.label, "score": entity.score, **where}
    return {"entity": entity.label, "score": entity.score, "index": entity.index, **where}
