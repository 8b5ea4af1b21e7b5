"""Images as tensors of the Open Inference Protocol.

The one input, `image`, is either BYTES, [n] or [n, 1], of encoded images (in JSON as base64), or pixels, UINT8 or FP32
in [0, 1], [n, height, width, channels] or [n, channels, height, width].
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.http.image_answers import Image
from pliant.deployments.http.images import ImageReader
from pliant.deployments.http.tensors import (
    InferRequest,
    InputTensor,
    column,
    elements,
    only_input,
    strings,
)
from pliant.deployments.http.validation import check_count
from pliant.deployments.serving.outcome import Outcome, RequestError

_PIXELS: dict[str, np.dtype[Any]] = {"UINT8": np.dtype("u1"), "FP32": np.dtype("<f4")}
_CHANNELS = (1, 3)


def images(call: InferRequest, tail: bytes, reader: ImageReader, most: int) -> list[Image]:
    """The images of a request, encoded or [height, width, channels]; at most `most`. Raises RequestError."""
    tensor, binary = only_input(call, tail, "image")
    if tensor.datatype == "BYTES":
        data = elements(binary) if binary is not None else map(decoded, strings(tensor.data or []))
        return list[Image](column(tensor, data, most, "image"))
    if tensor.datatype not in _PIXELS:
        raise RequestError(
            Outcome.REJECTED, f"inputs.0.datatype: got {tensor.datatype!r}; allowed: BYTES, {', '.join(_PIXELS)}"
        )
    if len(tensor.shape) != 4:
        wanted = "[n, height, width, channels] or [n, channels, height, width]"
        raise RequestError(Outcome.REJECTED, f"inputs.0.shape: got {tensor.shape}; allowed for pixels: {wanted}")
    check_count(tensor.shape[0], most, "image")
    if 0 in tensor.shape:
        raise RequestError(Outcome.REJECTED, f"inputs.0.shape: got {tensor.shape}; an image must have some pixels")
    pixels = _binary(tensor, binary) if binary is not None else _in_json(tensor)
    return list(_channels_last(pixels, reader))


def decoded(text: str) -> bytes:
    """The image that `text` has in base64. Raises RequestError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(Outcome.REJECTED, f"an image is not base64: {error}") from None


def _binary(tensor: InputTensor, tail: bytes) -> NDArray[Any]:
    dtype = _PIXELS[tensor.datatype]
    if len(tail) != math.prod(tensor.shape) * dtype.itemsize:
        raise _wrong_size(tensor.shape, len(tail) // dtype.itemsize)
    return np.frombuffer(tail, dtype).reshape(tensor.shape)


def _in_json(tensor: InputTensor) -> NDArray[Any]:
    """NumPy sees the numbers only once it is known that they are numbers, in range, and as many as there should be."""
    values = _flat(tensor.data or [], len(tensor.shape))
    if len(values) != math.prod(tensor.shape):
        raise _wrong_size(tensor.shape, len(values))
    integers = tensor.datatype == "UINT8"
    if not set(map(type, values)) <= ({int} if integers else {int, float}):
        raise RequestError(Outcome.REJECTED, f"inputs.0.data: allowed: {'whole ' * integers}numbers")
    if not 0 <= min(values) <= max(values) <= (255 if integers else 1):
        given = f"got {min(values)!s:.60} to {max(values)!s:.60}"
        allowed = "0 to 255" if integers else "from 0 to 1, not normalised; or send UINT8"
        raise RequestError(Outcome.REJECTED, f"inputs.0.data: {given}; allowed: {allowed}")
    return np.array(values, _PIXELS[tensor.datatype]).reshape(tensor.shape)


def _flat(data: list[Any], most_deep: int) -> list[Any]:
    """What is in the lists of `data`, which are nested up to `most_deep`. Raises RequestError if they differ."""
    for _ in range(most_deep - 1):
        lists = sum(type(each) is list for each in data)
        if not lists:
            break
        if lists < len(data) or len(set(map(len, data))) > 1:
            raise RequestError(Outcome.REJECTED, "inputs.0.data: its lists are of unequal lengths")
        data = list(chain.from_iterable(data))
    return data


def _wrong_size(shape: Sequence[int], numbers: int) -> RequestError:
    return RequestError(
        Outcome.REJECTED, f"inputs.0.shape: got {list(shape)}, {math.prod(shape)} numbers, for {numbers} of them"
    )


def _channels_last(pixels: NDArray[Any], reader: ImageReader) -> NDArray[Any]:
    shape = pixels.shape
    if shape[3] in _CHANNELS and shape[1:] != (reader.channels, reader.height, reader.width):
        return pixels
    if shape[1] in _CHANNELS:
        return pixels.transpose(0, 2, 3, 1)
    raise RequestError(
        Outcome.REJECTED, f"inputs.0.shape: got {list(shape)}; either the second or the last must be 1 or 3 channels"
    )
