"""What an image takes of memory while it is decoded, as its header says, before any of that is taken.

Pillow keeps four bytes of a pixel of several channels. Beside them libwebp keeps two pictures of an animation, whether
it is one or not, and libjpeg all that a progressive file says, up to eight bytes of a pixel.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

from PIL import PngImagePlugin
from PIL.ImageFile import ImageFile

_READS, _BYTES_A_READ = 10_000, 256
_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1, "I;16": 2}
"""By mode; all others have four."""
_WEBP_BYTES = 17
"""Of a pixel: two pictures, the one that is handed over, Pillow's, and what else decoding takes."""
_WEBP_LOSSLESS_BYTES = 21
"""One picture more."""
_COEFFICIENT_BYTES = 2
_SCALES = (1, 2, 4, 8)
"""A JPEG can be decoded so many times smaller."""

_ALONE = {0x00, 0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
"""Markers after which no length comes, to libjpeg or to Pillow; the other one refuses them."""
_FRAMES = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}
_PROGRESSIVE = {0xC2, 0xCA}
_SCAN = 0xDA

PngImagePlugin.MAX_TEXT_MEMORY = 2**20  # Pillow's own switch; it is 64 MB, and nobody here reads what it keeps


class Pieces(io.BytesIO):
    """The bytes of an image, which ends early if it comes in more pieces than any that was not made to.

    Pillow keeps something of each comment and each chunk, however short: of four million bytes that was 150 MB.
    """

    def __init__(self, encoded: bytes) -> None:
        super().__init__(encoded)
        self._left = _READS + len(encoded) // _BYTES_A_READ

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises ValueError, which says what to do."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("it consists of very many pieces; save it anew, without comments")
        return super().read(size)


def shrink(image: ImageFile, encoded: bytes, most: int) -> int:
    """How many bytes decoding `image` will take. One of a JPEG that are more than `most` is decoded smaller, if that
    helps: half, a quarter or an eighth as wide and high."""
    pixels = image.width * image.height
    if image.format == "WEBP":
        lossless = b"VP8L" in encoded or b"ALPH" in encoded
        return pixels * (_WEBP_LOSSLESS_BYTES if lossless else _WEBP_BYTES)
    each = _PIXEL_BYTES.get(image.mode, 4)
    if image.format not in ("JPEG", "MPO"):
        return pixels * each
    kept = _coefficients(encoded)
    scale = next((scale for scale in _SCALES if kept + pixels // scale**2 * each <= most), 1)
    if scale > 1:
        image.draft(None, (image.width // scale, image.height // scale))
    return kept + image.width * image.height * each


def _coefficients(encoded: bytes) -> int:
    """The bytes of what libjpeg keeps of a whole JPEG: nothing, where one scan has all channels of each pixel."""
    samples = channels = 0
    progressive = False
    for marker, at in _markers(encoded):
        if marker in _FRAMES:
            height, width, channels = struct.unpack_from(">HHB", encoded, at + 3)
            factors = [divmod(encoded[at + 9 + 3 * index], 16) for index in range(channels)]
            most_across, most_down = map(max, zip(*factors, strict=True))
            columns, rows = -(-width // (8 * most_across)), -(-height // (8 * most_down))
            samples = 64 * columns * rows * sum(across * down for across, down in factors)
            progressive = marker in _PROGRESSIVE
        if marker == _SCAN and (progressive or encoded[at + 2] < channels):
            return _COEFFICIENT_BYTES * samples
    return 0


def _markers(encoded: bytes) -> Iterator[tuple[int, int]]:
    """Of a JPEG up to its first scan, and where what belongs to each begins, with its length."""
    at = 2
    while (at := encoded.find(b"\xff", at)) >= 0:
        while encoded[at : at + 1] == b"\xff":
            at += 1
        marker = encoded[at]
        at += 1
        yield marker, at
        if marker == _SCAN:
            return
        if marker not in _ALONE:
            at += int.from_bytes(encoded[at : at + 2])
