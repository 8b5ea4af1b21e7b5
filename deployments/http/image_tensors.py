"""Images as tensors of the Open Inference Protocol.

The one input, `image`, is either BYTES, [n] or [n, 1], of encoded images (in JSON as base64), or pixels, UINT8 or FP32
in [0, 1], [n, height, width, channels] or [n, channels, height, width].
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pliant.deployments.http.images import ImageReader
from pliant.deployments.http.tensors import (
    InferRequest,
    InputTensor,
    check_column,
    elements,
    is_binary,
    only_input,
    strings,
)
from pliant.deployments.http.validation import bounded, check_count
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.vision.endpoint import Image

_PIXELS: dict[str, np.dtype[Any]] = {"UINT8": np.dtype("u1"), "FP32": np.dtype("<f4")}
_CHANNELS = (1, 3)


def images(call: InferRequest, tail: bytes, reader: ImageReader, most: int) -> list[Image]:
    """The images of a request, encoded or [height, width, channels]; at most `most`. Raises RequestError."""
    tensor = only_input(call, "image")
    binary = is_binary(tensor, tail)
    if tensor.datatype == "BYTES":
        check_column(tensor.shape)
        data = elements(tail) if binary else map(decoded, strings(tensor.data or []))
        encoded: list[Image] = list(data)
        if len(encoded) != math.prod(tensor.shape):
            raise RequestError(Outcome.REJECTED, f"inputs.0.shape: got {tensor.shape} for {len(encoded)} images")
        return bounded(encoded, most, "image")
    if tensor.datatype not in _PIXELS:
        raise RequestError(
            Outcome.REJECTED, f"inputs.0.datatype: got {tensor.datatype!r}; allowed: BYTES, {', '.join(_PIXELS)}"
        )
    if len(tensor.shape) != 4 or min(tensor.shape) < 0:
        wanted = "[n, height, width, channels] or [n, channels, height, width]"
        raise RequestError(Outcome.REJECTED, f"inputs.0.shape: got {tensor.shape}; allowed for pixels: {wanted}")
    check_count(tensor.shape[0], most, "image")
    if 0 in tensor.shape:
        raise RequestError(Outcome.REJECTED, f"inputs.0.shape: got {tensor.shape}; an image must have some pixels")
    pixels = _binary(tensor, tail) if binary else _in_json(tensor)
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
    try:
        values = np.array(tensor.data or [])
    except ValueError:
        raise RequestError(Outcome.REJECTED, "inputs.0.data: its lists are of unequal lengths") from None
    if values.size != math.prod(tensor.shape):
        raise _wrong_size(tensor.shape, values.size)
    integers = tensor.datatype == "UINT8"
    if values.size and (values.dtype.kind not in ("iu" if integers else "iuf")):
        raise RequestError(Outcome.REJECTED, f"inputs.0.data: allowed: {'whole ' * integers}numbers")
    if integers and values.size and not 0 <= values.min() <= values.max() <= 255:
        raise RequestError(Outcome.REJECTED, f"inputs.0.data: got {values.min()} to {values.max()}; allowed: 0 to 255")
    return values.astype(_PIXELS[tensor.datatype]).reshape(tensor.shape)


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
