"""Images as strangers send them, made into what a vision transformer takes: bounded, decoded, turned, resized and cut.

What an image is resized and cut to is what timm's `create_transform` makes of the same pretrained_cfg, pixel by pixel;
of large images but for rounding. Of an animation the first picture counts. Transparent pixels lie on white, as in a
browser.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile

from pliant.deployments.http.image_memory import Pieces, shrink
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.models.vision_info import VisionInfo

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
_ORIENTATION = 0x0112
_TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What brings an image upright, by EXIF orientation."""
_SIDEWAYS = {_TURNED[orientation] for orientation in (5, 6, 7, 8)}
_MODES = {1: "L", 3: "RGB"}
_MOST_ELONGATED = 100
"""Sides' ratio; resized by its short side, a longer image would take more memory than its pixels suggest."""
_MOST_SCANS = 20
"""Of the largest JPEG: each takes time for all pixels, however few bytes it has. Usual files have up to ten."""
_QUICK_PIXELS = 4_000_000
"""In all scans of an image that takes little time, some hundredths of a second."""
_QUICK_BYTES = 5 * 2**20
"""That such an image takes at most."""
_MOST_BYTES = 40 * 2**20
"""That any image takes. With a quick one beside it, and the request that has both, that is less than 64 MB."""
_RESIZED_BYTES = 4
"""Of a pixel."""
_BYTES_A_PIXEL = 1.5
"""Of `max_megapixels`, where that is more than _MOST_BYTES: so many are allowed then."""
_STRIP_PIXELS = 250_000
"""That are made flat and resized together."""
_SCAN = b"\xff\xda"
_MILLION = 1_000_000

Pixels = NDArray[np.uint8]


class ImageError(RequestError):
    """What was sent is no image that is served."""

    def __init__(self, reason: str, fault: Fault | None = None) -> None:
        super().__init__(Outcome.REJECTED, reason, fault=fault)


class ImageReader:
    """Makes images into the input [height, width, channels] of the model `info`.

    An image of more than `max_megapixels`, or that would take too much memory, is refused before it is decoded. All
    methods may run in threads.
    """

    def __init__(self, info: VisionInfo, max_megapixels: float) -> None:
        self.height, self.width, self.channels = info.height, info.width, info.channels
        self._mode = _MODES[info.channels]
        self._most_pixels = int(max_megapixels * _MILLION)
        self._most_bytes = max(_MOST_BYTES, int(_BYTES_A_PIXEL * self._most_pixels))
        self._resampling = Image.Resampling[info.interpolation.upper()]
        self._scaled = math.floor(info.height / info.crop_pct), math.floor(info.width / info.crop_pct)
        self._squash = info.squash

    def decode(self, encoded: bytes) -> Pixels:
        """The image in a file of one of `FORMATS`. Raises ImageError."""
        with self._opened(encoded) as (image, _):
            return self._decoded(image)

    def decode_quick(self, encoded: bytes) -> Pixels | None:
        """As `decode`, but None for an image that takes long, or much memory, as its header says."""
        with self._opened(encoded) as (image, quick):
            return self._decoded(image) if quick else None

    @contextmanager
    def _opened(self, encoded: bytes) -> Iterator[tuple[ImageFile, bool]]:
        """The image in a file, not decoded yet, and whether that is quick. Makes all errors an ImageError."""
        if not encoded:
            raise ImageError("the image is empty: it has no bytes")
        try:
            with Image.open(Pieces(encoded), formats=FORMATS) as opened:
                self._check_size(*opened.size)
                scans = encoded.count(_SCAN) if opened.format in ("JPEG", "MPO") else 1
                self._check_scans(scans, *opened.size)
                pixels, what = scans * opened.width * opened.height, _described(opened)
                taken = shrink(opened, encoded, self._most_bytes)
                self._check_taken(taken, opened.size, what)
                yield opened, pixels <= _QUICK_PIXELS and taken <= _QUICK_BYTES
        except ImageError:
            raise
        except UnidentifiedImageError:
            begins = encoded[:12].hex(" ")
            raise ImageError(
                f"no image of {', '.join(FORMATS)}: its first bytes are {begins}", Fault.MEDIA_TYPE
            ) from None
        except Image.DecompressionBombError:
            raise self._too_large("hundreds of megapixels") from None
        except Exception as error:  # decoders raise whatever the broken file leads them to
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise ImageError(f"the image cannot be decoded: {reason[:200]}") from None

    def fits(self, pixels: NDArray[Any]) -> bool:
        """Whether `fit` would take `pixels` as they are."""
        return pixels.dtype == np.uint8 and pixels.shape == (self.height, self.width, self.channels)

    def fit(self, pixels: NDArray[Any]) -> Pixels:
        """Pixels [height, width, 1 or 3], as bytes or as floats in [0, 1]. Raises ImageError.

        Those of the model's size are taken as they are; others are resized and cut as encoded images are.
        """
        height, width, channels = pixels.shape
        self._check_size(width, height)
        whole = pixels if pixels.dtype == np.uint8 else _as_bytes(pixels)
        if pixels.shape == (self.height, self.width, self.channels):
            return np.ascontiguousarray(whole)
        image = Image.fromarray(np.ascontiguousarray(whole[..., 0] if channels == 1 else whole))
        self._check_taken(0, image.size, f"{width} x {height} pixels")
        if (height, width) == (self.height, self.width):
            return self._pixels(image.convert(self._mode))
        return self._fitted(image)

    def _check_size(self, width: int, height: int) -> None:
        if not width or not height:
            raise ImageError(f"the image has {width} x {height} pixels; send one with some")
        if width * height > self._most_pixels:
            raise self._too_large(f"{width} x {height} pixels")
        if max(width, height) > _MOST_ELONGATED * min(width, height):
            raise ImageError(
                f"the image has {width} x {height} pixels; no side may be {_MOST_ELONGATED} times the other",
                Fault.TOO_LARGE,
            )

    def _check_scans(self, scans: int, width: int, height: int) -> None:
        if scans * width * height > _MOST_SCANS * self._most_pixels:
            raise ImageError(
                f"the JPEG has {scans} scans of {width} x {height} pixels; save it anew, not progressive",
                Fault.TOO_LARGE,
            )

    def _check_taken(self, decoded: int, size: tuple[int, int], what: str) -> None:
        """Raise ImageError unless there is memory for `decoded` bytes of an image and for resizing it from `size`."""
        resized = max(width * (size[1] + height) for width, height in map(partial(self._size, size), (False, True)))
        if (taken := decoded + _RESIZED_BYTES * resized) > self._most_bytes:
            needs = f"{what} take {taken / _MILLION:.0f} MB to decode, of at most {self._most_bytes / _MILLION:.0f}"
            advice = "send it smaller, or as a JPEG that is not progressive"
            raise ImageError(f"the image is too large: {needs}; {advice}", Fault.TOO_LARGE)

    def _too_large(self, what: str) -> ImageError:
        allowed = f"{self._most_pixels / _MILLION:g} megapixels"
        return ImageError(f"the image is too large: {what} for at most {allowed}; send it smaller", Fault.TOO_LARGE)

    def _decoded(self, image: ImageFile) -> Pixels:
        image.load()
        return self._fitted(image, _turn(image))

    def _fitted(self, image: Image.Image, turn: Image.Transpose | None = None) -> Pixels:
        width, height = self._size(image.size, turn in _SIDEWAYS)
        small = self._narrowed(image, width).resize((width, height), self._resampling)
        upright = small if turn is None else small.transpose(turn)
        return self._pixels(_centre(upright, self.width, self.height).convert(self._mode))

    def _size(self, size: tuple[int, int], sideways: bool) -> tuple[int, int]:
        """What an image of `size` is resized to before it is turned and cut."""
        if self._squash:
            width, height = self._scaled[::-1]
        else:
            width, height = _covering(size[::-1] if sideways else size, self._scaled)
        return (height, width) if sideways else (width, height)

    def _narrowed(self, image: Image.Image, width: int) -> Image.Image:
        """`image`, flat, and if it is large as wide as it will be: strip by strip, as whole it would be in memory four
        times. Pillow, too, resizes in one direction after the other, if not always in this order."""
        rows = max(1, _STRIP_PIXELS // image.width)
        if rows >= image.height:
            return self._plain(image)
        narrow = None
        for top in range(0, image.height, rows):
            strip = self._plain(image.crop((0, top, image.width, min(top + rows, image.height))))
            narrow = narrow or Image.new(strip.mode, (width, image.height))
            narrow.paste(strip.resize((width, strip.height), self._resampling), (0, top))
        assert narrow
        return narrow

    def _plain(self, image: Image.Image) -> Image.Image:
        """`image`, flat, and in the model's mode or with one channel, which is resized as each of three would be."""
        flat = _flat(image)
        return flat if flat.mode in (self._mode, "L") else flat.convert(self._mode)

    def _pixels(self, image: Image.Image) -> Pixels:
        return np.asarray(image, dtype=np.uint8).reshape(self.height, self.width, self.channels)


def _as_bytes(pixels: NDArray[Any]) -> Pixels:
    if not np.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > 1:
        raise ImageError("an image of floats must have values from 0 to 1, not normalised; or send UINT8")
    whole: Pixels = np.rint(pixels * 255).astype(np.uint8)
    return whole


def _turn(image: Image.Image) -> Image.Transpose | None:
    """What brings `image` upright, as its EXIF data say; broken ones are ignored, as they are by other viewers."""
    try:
        return _TURNED.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        return None


def _flat(image: Image.Image) -> Image.Image:
    """`image` with 8 bits for each channel, and without transparency."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ImageError(f"the image has 32-bit pixels (mode {image.mode}); send 8 or 16 bits", Fault.MEDIA_TYPE)
    if not image.has_transparency_data:
        return image
    seen = image.convert("RGBA")
    white = Image.new("RGBA", seen.size, "white")
    white.alpha_composite(seen)
    return white.convert("RGB")


def _described(image: ImageFile) -> str:
    progressive = "progressive " * ("progressive" in image.info)
    return f"{image.width} x {image.height} pixels of a {progressive}{image.format}"


def _covering(size: tuple[int, int], scaled: tuple[int, int]) -> tuple[int, int]:
    """The width and height of an image of `size` when it just covers `scaled`, a height and a width."""
    (width, height), (tall, wide) = size, scaled
    if tall == wide:  # torchvision's Resize of the shorter side
        shorter = min(width, height)
        return int(tall * width / shorter), int(tall * height / shorter)
    ratio = min(height / tall, width / wide)  # timm's ResizeKeepRatio
    return round(width / ratio), round(height / ratio)


def _centre(image: Image.Image, width: int, height: int) -> Image.Image:
    """The middle of `image`, which torchvision's CenterCrop pads with black where it is too small."""
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))
