"""Images as clients send them."""

from __future__ import annotations

import base64
import io
from typing import Any

from numpy.typing import NDArray
from PIL import Image


def encoded(image: Image.Image, format_: str = "PNG", **options: Any) -> bytes:
    """The file that Pillow saves with these `options`."""
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def png(pixels: NDArray[Any]) -> bytes:
    return encoded(Image.fromarray(pixels))


def base64_png(pixels: NDArray[Any]) -> str:
    return base64.b64encode(png(pixels)).decode()
