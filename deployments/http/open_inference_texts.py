"""Texts in the Open Inference Protocol v2.

The inputs are `text` and, for models that read pairs, `text_pair` (BYTES, shape [n] or [n, 1]). What the outputs are
follows from the model's task:

- labels: `label` (BYTES) and `score` (FP32), both of shape [n, k], the likeliest label first. Of a cascade there are
  also `level` (BYTES), `confidence` (FP32), `words_pruned` and `degraded` (INT32), all [n, 1], if the request names
  them or its parameters say `details`.
- entities: `entity`, `word` (BYTES), `score` (FP32), `start` and `end` (INT32), all of shape [n, k], k as many as the
  text has that has the most, and `count` (INT32, [n, 1]), how many of them each text has; the rest is empty or 0.
- vectors: `embedding` (FP32, [n, dimensions]).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from pliant.deployments.http.body import off_loop
from pliant.deployments.http.parameters import (
    ClassifyParameters,
    EmbedParameters,
    TagParameters,
    validated,
    validated_json,
)
from pliant.deployments.http.tensors import (
    Given,
    InferRequest,
    OutputTensor,
    column,
    elements,
    inputs_of,
    requested,
    respond,
    split,
    strings,
)
from pliant.deployments.http.texts import (
    Input,
    Tagged,
    TextClassifier,
    TextEmbedder,
    TextTagger,
    levels_of,
    many_numbers,
    task_of,
    warning_of,
)
from pliant.deployments.http.validation import VERSION, check_count
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.texts import Pair

_INPUTS = ("text", "text_pair")
_LABELS = {"label": "BYTES", "score": "FP32"}
_DETAILS = {"level": "BYTES", "confidence": "FP32", "words_pruned": "INT32", "degraded": "INT32"}
_ENTITIES = {"entity": "BYTES", "score": "FP32", "word": "BYTES", "start": "INT32", "end": "INT32", "count": "INT32"}
_VECTORS = {"embedding": "FP32"}
_EMPTY: dict[str, Any] = {"BYTES": "", "FP32": 0.0, "INT32": 0}


async def infer_texts(endpoint: Any, body: bytes, header: str | None, most: int) -> Response:
    """What `endpoint` says of the texts in `body`, at most `most`. Raises RequestError."""

    def parsed() -> tuple[InferRequest, list[Input]]:
        head, tail = split(body, header)
        call = validated_json(InferRequest, head)
        return call, _texts(inputs_of(call, tail, _INPUTS), most)

    call, texts = await off_loop(len(body), parsed)
    match task_of(endpoint):
        case "embed":
            return await _embed(endpoint, call, texts)
        case "tokens":
            return await _tag(endpoint, call, texts)
    return await _classify(endpoint, call, texts, most)


def text_metadata(endpoint: Any) -> dict[str, Any]:
    """What there is to say of a service: inputs, outputs, and its labels or dimensions."""
    task, levels = task_of(endpoint), levels_of(endpoint)
    parameters: dict[str, Any] = {"task": task}
    if task == "embed":
        outputs = _VECTORS
        parameters["dimensions"] = endpoint.dimensions
    else:
        outputs = _ENTITIES if task == "tokens" else _outputs(endpoint)
        parameters["labels"] = ",".join(endpoint.labels)
    if revisions := getattr(endpoint, "revisions", None):
        parameters["revision"] = ",".join(revisions)
    if levels:
        parameters["levels"] = ",".join(levels)
    scores_pairs = task == "classify" and len(endpoint.labels) == 1
    inputs = _INPUTS if scores_pairs or getattr(endpoint, "reads_pairs", False) else _INPUTS[:1]
    return {
        "name": endpoint.name,
        "versions": [VERSION],
        "platform": "pliant_cascade" if levels else "pliant_encoder",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in inputs],
        "outputs": described(outputs),
        "parameters": parameters,
    }


def described(types: Mapping[str, str]) -> list[dict[str, Any]]:
    """Outputs of these datatypes by name, as metadata has them."""
    return [{"name": name, "datatype": type_, "shape": [-1, -1]} for name, type_ in types.items()]


async def _classify(classifier: TextClassifier, call: InferRequest, texts: Sequence[Input], most: int) -> Response:
    parameters = validated(ClassifyParameters, call.options())
    binary = requested(call, _outputs(classifier))
    if not call.outputs and not parameters.details:
        binary = {name: packed for name, packed in binary.items() if name in _LABELS}
    check_count(len(texts) * len(parameters.candidate_labels or [""]), most, "label")
    predictions = await classifier.classify(texts, parameters)
    tensors = {
        "label": OutputTensor("BYTES", [item.labels for item in predictions]),
        "score": OutputTensor("FP32", [item.scores for item in predictions]),
    }
    for name in binary.keys() & _DETAILS.keys():
        tensors[name] = OutputTensor(_DETAILS[name], [[getattr(item.details, name)] for item in predictions])
    return respond(classifier.name, call.id, tensors, binary, warning_of(predictions))


async def _tag(tagger: TextTagger, call: InferRequest, texts: Sequence[Input]) -> Response:
    parameters = validated(TagParameters, call.options())
    binary = requested(call, _ENTITIES)
    found = await tagger.tag(_single(tagger.name, texts), parameters)
    return respond(tagger.name, call.id, _entities(found), binary, warning_of(found))


async def _embed(embedder: TextEmbedder, call: InferRequest, texts: Sequence[Input]) -> Response:
    parameters = validated(EmbedParameters, call.options())
    binary = requested(call, _VECTORS)
    found = await embedder.embed(_single(embedder.name, texts), parameters)
    warning = warning_of(found)

    def write() -> Response:
        tensors = {"embedding": OutputTensor("FP32", [item.vector.tolist() for item in found])}
        return respond(embedder.name, call.id, tensors, binary, warning)

    return await asyncio.to_thread(write) if many_numbers(found) else write()


def _entities(found: Sequence[Tagged]) -> dict[str, OutputTensor]:
    columns: dict[str, list[list[Any]]] = {name: [] for name in _ENTITIES}
    most = max(len(tagged.entities) for tagged in found)
    for tagged in found:
        entities = tagged.entities
        values_by_name: dict[str, list[Any]] = {
            "entity": [entity.label for entity in entities],
            **{name: [getattr(entity, name) for entity in entities] for name in ("score", "word", "start", "end")},
        }
        for name, values in values_by_name.items():
            columns[name].append(values + [_EMPTY[_ENTITIES[name]]] * (most - len(values)))
        columns["count"].append([len(entities)])
    return {name: OutputTensor(_ENTITIES[name], rows) for name, rows in columns.items()}


def _outputs(classifier: TextClassifier) -> dict[str, str]:
    return _LABELS | (_DETAILS if levels_of(classifier) else {})


def _single(name: str, texts: Sequence[Input]) -> list[str]:
    single = [text for text in texts if isinstance(text, str)]
    if len(single) < len(texts):
        raise RequestError(Outcome.REJECTED, f"inputs: got text_pair; {name} reads single texts")
    return single


def _texts(given: Sequence[Given], most: int) -> list[Input]:
    columns = [_column(index, each, most) for index, each in enumerate(given)]
    if len(columns) == 1:
        return list(columns[0])
    firsts, seconds = columns
    if len(firsts) != len(seconds):
        reason = f"inputs: got {len(firsts)} of text, and {len(seconds)} of text_pair; send as many of both"
        raise RequestError(Outcome.REJECTED, reason)
    return [Pair(*both) for both in zip(firsts, seconds, strict=True)]


def _column(index: int, given: Given, most: int) -> list[str]:
    tensor, binary = given
    if tensor.datatype != "BYTES":
        raise RequestError(Outcome.REJECTED, f"inputs.{index}.datatype: got {tensor.datatype!r}; allowed: BYTES")
    if binary is not None:
        return column(tensor, map(_utf8, elements(binary)), most, "text")
    return column(tensor, strings(tensor.data or []), most, "text")


def _utf8(element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise RequestError(Outcome.REJECTED, f"inputs.0: a text is not UTF-8: {error}") from None
