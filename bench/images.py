"""Images as clients send them."""

from __future__ import annotations

import base64
import io
from typing import Any

from numpy.typing import NDArray
from PIL import Image


def png(pixels: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def base64_png(pixels: NDArray[Any]) -> str:
    return base64.b64encode(png(pixels)).decode()
