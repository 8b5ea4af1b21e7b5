"""The Open Inference Protocol's messages, whatever they carry: JSON, and its binary tensor extension."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
from fastapi import Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from pliant.deployments.http.validation import VERSION, check_count
from pliant.deployments.serving.outcome import Outcome, RequestError

HEADER_LENGTH = "Inference-Header-Content-Length"
T = TypeVar("T")

_PACKED = {"FP32": "<f4", "INT32": "<i4"}
_MOST_TENSORS = 16
_MOST_DIMENSIONS = 8
_Extent = Annotated[int, Field(ge=0, lt=2**63)]


class InputTensor(BaseModel):
    name: str
    shape: Annotated[list[_Extent], Field(max_length=_MOST_DIMENSIONS, fail_fast=True)]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class RequestedOutput(BaseModel):
    name: str
    parameters: dict[str, Any] = {}


class InferRequest(BaseModel):
    """The JSON part of an inference request."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    parameters: dict[str, Any] = {}
    inputs: Annotated[list[InputTensor], Field(max_length=_MOST_TENSORS, fail_fast=True)]
    outputs: Annotated[list[RequestedOutput], Field(max_length=_MOST_TENSORS, fail_fast=True)] | None = None

    def options(self) -> dict[str, Any]:
        """`parameters` without those that are the protocol's own."""
        return {key: value for key, value in self.parameters.items() if key != "binary_data_output"}


class OutputTensor(NamedTuple):
    """Rows of strings or numbers, all of the same length."""

    datatype: str
    """BYTES, FP32 or INT32."""
    rows: Sequence[Sequence[Any]]


def split(body: bytes, header_length: str | None) -> tuple[bytes, bytes]:
    """The JSON part of a request's body and what follows it, according to the header. Raises RequestError."""
    if header_length is None:
        return body, b""
    if not header_length.isdecimal() or len(header_length) > 10 or int(header_length) > len(body):
        raise RequestError(
            Outcome.REJECTED, f"{HEADER_LENGTH}: got {header_length[:60]!r}; the body has {len(body)} bytes"
        )
    return body[: int(header_length)], body[int(header_length) :]


class Given(NamedTuple):
    """An input tensor, and its data if they follow the JSON."""

    tensor: InputTensor
    binary: bytes | None


def only_input(call: InferRequest, tail: bytes, name: str) -> Given:
    """The one tensor that there is, and that is called so. Raises RequestError."""
    return inputs_of(call, tail, (name,))[0]


def inputs_of(call: InferRequest, tail: bytes, names: Sequence[str]) -> list[Given]:
    """The tensors of `call`, by the order of `names`: the first of them, and no others. Raises RequestError."""
    by_name = {tensor.name: index for index, tensor in enumerate(call.inputs)}
    if len(by_name) != len(call.inputs) or by_name.keys() != set(names[: len(by_name)]) or not by_name:
        got = ", ".join(tensor.name[:60] for tensor in call.inputs) or "none"
        more = f", and {', '.join(names[1:])} beside it" if names[1:] else ""
        raise RequestError(Outcome.REJECTED, f"inputs: got {got}; exactly one is allowed, named {names[0]}{more}")
    found = []
    at = 0
    for index, tensor in enumerate(call.inputs):
        size = tensor.parameters.get("binary_data_size")
        if size is None and not (tail and len(call.inputs) == 1):
            found.append(Given(tensor, None))
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(tail) - at:
            raise _wrong_size(index, size, len(tail) - at)
        found.append(Given(tensor, tail[at : at + size]))
        at += size
    if at != len(tail):
        raise _wrong_size(len(call.inputs) - 1, call.inputs[-1].parameters.get("binary_data_size"), len(tail))
    return [found[by_name[name]] for name in names[: len(found)]]


def _wrong_size(index: int, size: Any, there: int) -> RequestError:
    reason = f"inputs.{index}.parameters.binary_data_size: got {size!r}; {there} bytes follow the JSON"
    return RequestError(Outcome.REJECTED, reason)


def column(tensor: InputTensor, data: Iterable[T], most: int, what: str) -> list[T]:
    """The `data` of a `tensor` of shape [n] or [n, 1], n of at most `most`, each `what`. Raises RequestError."""
    shape = tensor.shape
    if not shape or len(shape) > 2 or shape[1:] not in ([], [1]):
        raise RequestError(Outcome.REJECTED, f"inputs.0.shape: got {shape}; allowed: [n] or [n, 1]")
    check_count(math.prod(shape), most, what)
    found = list(islice(data, shape[0] + 1))
    if len(found) != shape[0]:
        count = len(found) if len(found) < shape[0] else f"more than {shape[0]}"
        raise RequestError(Outcome.REJECTED, f"inputs.0.shape: got {shape} for {count} {what}s")
    return found


def strings(data: Sequence[Any]) -> Iterator[str]:
    """The elements of a BYTES tensor in JSON, [n] or [n, 1]. Raises RequestError."""
    for item in data:
        if isinstance(item, list) and len(item) == 1:
            item = item[0]
        if not isinstance(item, str):
            raise RequestError(Outcome.REJECTED, f"inputs.0.data: got {str(item)[:60]!r}; allowed: strings")
        yield item


def elements(tail: bytes) -> Iterator[bytes]:
    """The elements of a binary BYTES tensor. Raises RequestError."""
    at = 0
    while at < len(tail):
        if at + 4 > len(tail) or at + 4 + (length := struct.unpack_from("<I", tail, at)[0]) > len(tail):
            raise RequestError(Outcome.REJECTED, "inputs.0: the binary tensor ends within an element")
        yield tail[at + 4 : at + 4 + length]
        at += 4 + length


def requested(call: InferRequest, outputs: Mapping[str, str]) -> dict[str, bool]:
    """Which of `outputs`, datatypes by name, to answer with, and whether each in binary. Raises RequestError."""
    default = call.parameters.get("binary_data_output", False)
    if not isinstance(default, bool):
        raise RequestError(Outcome.REJECTED, f"parameters.binary_data_output: got {default!r}; allowed: true or false")
    if not call.outputs:
        return dict.fromkeys(outputs, default)
    found = {}
    for output in call.outputs:
        if output.name not in outputs:
            raise RequestError(Outcome.REJECTED, f"outputs: got {output.name!r}; allowed: {', '.join(outputs)}")
        if "classification" in output.parameters:
            raise RequestError(
                Outcome.REJECTED, f"outputs.{output.name}: the classification extension is not there; use top_k"
            )
        found[output.name] = bool(output.parameters.get("binary_data", default))
    return found


def respond(
    model: str, id_: str | None, tensors: Mapping[str, OutputTensor], binary: Mapping[str, bool], warning: str
) -> Response:
    """The answer of `model` with those of `tensors` that `binary` names, and whether each is binary."""
    outputs: list[dict[str, Any]] = []
    tail = b""
    for name, packed in binary.items():
        datatype, rows = tensors[name]
        tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [len(rows), len(rows[0])]}
        values = [value for row in rows for value in row]
        if packed:
            data = _pack(values) if datatype == "BYTES" else np.array(values, dtype=_PACKED[datatype]).tobytes()
            tensor["parameters"] = {"binary_data_size": len(data)}
            tail += data
        else:
            tensor["data"] = values
        outputs.append(tensor)
    content: dict[str, Any] = {"model_name": model, "model_version": VERSION, "outputs": outputs}
    if id_ is not None:
        content["id"] = id_
    if warning:
        content["parameters"] = {"warning": warning}
    response = JSONResponse(content)
    if not tail:
        return response
    head = bytes(response.body)
    return Response(head + tail, media_type="application/octet-stream", headers={HEADER_LENGTH: str(len(head))})


def _pack(texts: Sequence[str]) -> bytes:
    encoded = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(text)) + text for text in encoded)
