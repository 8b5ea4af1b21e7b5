"""Images from strangers: what timm would make of them, upright, flat and small; and bombs, rubbish and wrong shapes."""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support.images import encoded

from pliant.deployments.http import images
from pliant.deployments.http.images import FORMATS, ImageError, ImageReader
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.models.vision_info import VisionInfo
from pliant.torchvision_ops import declare

INFO = VisionInfo(
    architecture="vit_tiny_patch16_224",
    height=32,
    width=32,
    channels=3,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    interpolation="bicubic",
    crop_pct=0.9,
    squash=False,
    labels=(),
    layers=2,
    hidden=8,
    patch=16,
    prefix=1,
)
GREY = replace(INFO, channels=1, mean=(0.5,), std=(0.5,))
RNG = np.random.default_rng(0)


def reader(max_megapixels: float = 1, **changes: Any) -> ImageReader:
    return ImageReader(replace(INFO, **changes), max_megapixels)


def taken_mb(run: Callable[[], object]) -> float:
    """By how much this process grew meanwhile, at most."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or else it is taken from what was given back before
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = status_mb("VmRSS")
    run()
    return status_mb("VmHWM") - before_mb


def status_mb(key: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0]) / 2**10


def picture(width: int = 50, height: int = 40, mode: str = "RGB") -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(32, 32), (50, 40), (40, 51), (33, 90), (16, 16), (300, 200)])
@pytest.mark.parametrize(
    "changes", [{}, {"squash": True}, {"interpolation": "bilinear", "crop_pct": 1.0}, {"width": 48}]
)
def test_pixels_are_those_of_timm(size: tuple[int, int], changes: dict[str, Any]) -> None:
    declare()
    from timm.data.transforms_factory import transforms_imagenet_eval

    info, image = replace(INFO, **changes), picture(*size)
    transform = transforms_imagenet_eval(
        img_size=(info.height, info.width),
        crop_pct=info.crop_pct,
        crop_mode="squash" if info.squash else "center",
        interpolation=info.interpolation,
        normalize=False,
    )
    found = reader(**changes).decode(encoded(image))
    np.testing.assert_array_equal(found, np.asarray(transform(image)).transpose(1, 2, 0))


@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_is_read(format_: str) -> None:
    image = Image.new("RGB", (40, 40), (255, 0, 0))
    found = reader().decode(encoded(image, format_))
    assert found.shape == (32, 32, 3)
    assert found.dtype == np.uint8
    assert np.abs(found.astype(int) - (255, 0, 0)).max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"])
@pytest.mark.parametrize("info", [INFO, GREY])
def test_every_mode_is_converted(mode: str, info: VisionInfo) -> None:
    format_ = {"CMYK": "JPEG", "YCbCr": "JPEG"}.get(mode, "PNG")
    source = picture(mode="RGB").convert("P").convert("PA") if mode == "PA" else picture(mode=mode)
    if mode in ("HSV", "LAB", "PA"):
        source = source.convert("RGBA")
    found = ImageReader(info, 1).decode(encoded(source, format_))
    assert found.shape == (32, 32, info.channels)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.full((32, 32), 0x8040, dtype=np.uint16))
    assert np.unique(ImageReader(GREY, 1).decode(encoded(deep))).tolist() == [0x80]


def test_transparent_pixels_lie_on_white() -> None:
    clear = Image.new("RGBA", (32, 32), (10, 20, 30, 0))
    palette = Image.new("P", (32, 32), 0)
    palette.putpalette([1, 2, 3])
    for file in (encoded(clear), encoded(clear, "WEBP"), encoded(palette, transparency=0)):
        assert np.unique(reader().decode(file)).tolist() == [255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(orientation: int) -> None:
    upright = picture(32, 32)
    back = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    stored = upright if back is None else upright.transpose(Image.Transpose(back))
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = reader(crop_pct=1.0).decode(encoded(stored, exif=exif))
    np.testing.assert_array_equal(found, np.asarray(upright))


def test_broken_exif_data_are_ignored() -> None:
    image = picture(32, 32)
    found = reader(crop_pct=1.0).decode(encoded(image, exif=b"Exif\x00\x00rubbish" * 3))
    np.testing.assert_array_equal(found, np.asarray(image))


@pytest.mark.parametrize("format_", ["GIF", "WEBP", "PNG"])
def test_the_first_picture_of_an_animation_counts(format_: str) -> None:
    red, blue = (Image.new("RGB", (32, 32), colour) for colour in ("red", "blue"))
    moving = encoded(red, format_, save_all=True, append_images=[blue, red], duration=50)
    assert reader().decode(moving)[16, 16].argmax() == 0


@pytest.mark.parametrize(
    ("content", "fault", "reason"),
    [
        (b"", None, "has no bytes"),
        (b"hello, world", Fault.MEDIA_TYPE, "no image of PNG, JPEG, WEBP, BMP, GIF: its first bytes are 68 65 6c"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", Fault.MEDIA_TYPE, "no image of"),
        (encoded(picture(), "TIFF"), Fault.MEDIA_TYPE, "no image of"),
        (encoded(picture())[:300], None, "cannot be decoded"),
        (encoded(picture(200, 200), "JPEG")[:900], None, "truncated"),
        (encoded(picture(), "WEBP")[:100], None, "cannot be decoded"),
        (png(1001, 1000), Fault.TOO_LARGE, "1001 x 1000 pixels for at most 1 megapixels; send it smaller"),
        (png(60_000, 60_000), Fault.TOO_LARGE, "too large"),
        (png(2**31 - 1, 2**31 - 1), Fault.TOO_LARGE, "too large"),
        (png(5000, 10), Fault.TOO_LARGE, "no side may be 100 times the other"),
        (png(100, 100), None, "cannot be decoded"),
        (png(8, 8)[:20], None, "cannot be decoded"),
    ],
)
def test_what_is_no_image_is_told_why(content: bytes, fault: Fault | None, reason: str) -> None:
    with pytest.raises(ImageError) as error:
        reader().decode(content)
    assert reason in str(error.value)
    assert error.value.outcome == Outcome.REJECTED
    assert error.value.fault == fault
    assert "\n" not in str(error.value)


def test_a_compressed_bomb_is_refused_by_its_size_alone() -> None:
    bomb = png(30_000, 30_000, b"\0" * 10_000_000)
    assert len(bomb) < 20_000
    with pytest.raises(ImageError, match="too large"):
        reader(25).decode(bomb)


def progressive(width: int, height: int, scans: int) -> bytes:
    """A small file that claims a size, and has its last scan again and again."""
    file = encoded(Image.new("L", (16, 16)), "JPEG", progressive=True)
    size = file.index(b"\xff\xc2") + 5
    file = file[:size] + struct.pack(">HH", height, width) + file[size + 4 :]
    last = file[file.rindex(b"\xff\xda") : -2]
    return file[:-2] + last * (scans - file.count(b"\xff\xda")) + b"\xff\xd9"


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    """Each takes a dozen bytes, and milliseconds."""
    bomb = progressive(1000, 1000, 10_000)
    assert len(bomb) < 200_000
    with pytest.raises(ImageError, match="10000 scans of 1000 x 1000 pixels; save it anew") as error:
        reader().decode(bomb)
    assert error.value.fault == Fault.TOO_LARGE
    with pytest.raises(ImageError, match="21 scans"):
        reader().decode(progressive(1000, 1000, 21))
    assert reader().decode(progressive(1000, 1000, 20)).shape == (32, 32, 3)


def test_what_takes_long_is_told_by_its_header() -> None:
    assert reader(25).decode_quick(png(3000, 3000)) is None
    assert reader(25).decode_quick(progressive(1000, 1000, 5)) is None
    with pytest.raises(ImageError, match="too large"):
        reader(25).decode_quick(png(6000, 5000))
    image = encoded(picture())
    np.testing.assert_array_equal(reader().decode_quick(image), reader().decode(image))


def webp_canvas() -> bytes:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    file = bytearray(encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]))
    size = file.index(b"VP8X") + 12
    file[size : size + 6] = (16_382).to_bytes(3, "little") * 2
    return bytes(file)


def gif_frame() -> bytes:
    file = bytearray(encoded(Image.new("P", (16, 16)), "GIF"))
    size = file.index(b",") + 5
    file[size : size + 4] = struct.pack("<HH", 20_000, 20_000)
    return bytes(file)


@pytest.mark.parametrize("bomb", [webp_canvas(), gif_frame()])
def test_sizes_that_other_headers_claim_count(bomb: bytes) -> None:
    with pytest.raises(ImageError, match="too large") as error:
        reader(25).decode(bomb)
    assert error.value.fault == Fault.TOO_LARGE


@pytest.mark.parametrize("name", [b"zTXt", b"iCCP"])
def test_texts_and_profiles_are_unpacked_within_limits(name: bytes) -> None:
    start, rest = png(8, 8, bytes(25 * 8))[:33], png(8, 8, bytes(25 * 8))[33:]
    bomb = start + chunk(name, b"k\0\0" + zlib.compress(bytes(50_000_000))) + rest
    with pytest.raises(ImageError, match="too large for PngImagePlugin"):
        reader().decode(bomb)
    assert reader().decode(start + rest).shape == (32, 32, 3)


@given(position=st.integers(0, 2000), value=st.integers(0, 255), format_=st.sampled_from(FORMATS))
@settings(max_examples=150)
def test_a_damaged_file_is_decoded_or_refused(position: int, value: int, format_: str) -> None:
    file = bytearray(encoded(Image.new("RGB", (24, 20), "green"), format_))
    file[position % len(file)] = value
    try:
        with warnings.catch_warnings(action="ignore"):
            found = reader().decode(bytes(file))
    except ImageError:
        return
    assert found.shape == (32, 32, 3)


def test_pixels_of_the_models_size_are_taken_as_they_are() -> None:
    pixels = RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    np.testing.assert_array_equal(reader().fit(pixels), pixels)
    np.testing.assert_array_equal(reader().fit(pixels / np.float32(255)), pixels)


def test_other_pixels_are_resized_as_images_are() -> None:
    image = picture(64, 48)
    np.testing.assert_array_equal(reader().fit(np.asarray(image)), reader().decode(encoded(image)))


def test_channels_are_converted() -> None:
    grey = RNG.integers(0, 256, (32, 32, 1), dtype=np.uint8)
    np.testing.assert_array_equal(reader().fit(grey), np.repeat(grey, 3, axis=2))
    assert ImageReader(GREY, 1).fit(RNG.integers(0, 256, (32, 32, 3), dtype=np.uint8)).shape == (32, 32, 1)


@pytest.mark.parametrize("value", [-0.01, 1.01, np.nan, np.inf, 255.0])
def test_floats_must_be_shares(value: float) -> None:
    with pytest.raises(ImageError, match="from 0 to 1, not normalised"):
        reader().fit(np.full((32, 32, 3), value, dtype=np.float32))


@pytest.mark.parametrize("shape", [(0, 32, 3), (32, 0, 1), (2000, 1000, 1), (8, 1000, 3)])
def test_pixels_of_bad_sizes_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ImageError):
        reader().fit(np.zeros(shape, dtype=np.uint8))


MEGABYTE = 2**20
FEW_MB = 48
"""What an image takes, and the strips and buffers beside it: with a quick one and a request of 4 MB, less than 64."""

LARGEST = [
    *[(4990, mode, "PNG", {"compress_level": 1}) for mode in ("1", "L", "P")],
    (4500, "I;16", "PNG", {"compress_level": 1}),
    *[(3200, mode, "PNG", {"compress_level": 1}) for mode in ("LA", "RGB", "RGBA")],
    (4990, "P", "PNG", {"compress_level": 1, "transparency": 3}),
    (4990, "P", "GIF", {}),
    (3200, "RGB", "BMP", {}),
    (1550, "RGB", "WEBP", {"method": 0}),
    (1400, "RGBA", "WEBP", {"method": 0}),
    (1400, "RGB", "WEBP", {"method": 0, "lossless": True}),
    (1400, "RGBA", "WEBP", {"method": 0, "lossless": True}),
    *[(4990, mode, "JPEG", {}) for mode in ("L", "RGB", "CMYK")],
    (4400, "L", "JPEG", {"progressive": True}),
    (2600, "RGB", "JPEG", {"progressive": True, "subsampling": "4:4:4"}),
    (3650, "RGB", "JPEG", {"progressive": True, "subsampling": "4:2:0"}),
    (2200, "CMYK", "JPEG", {"progressive": True, "subsampling": "4:4:4"}),
]
"""The side of about the largest image of each sort that is read."""


@functools.lru_cache(1)
def pattern(side: int, mode: str) -> Image.Image:
    """Something that does not compress to nothing."""
    small = RNG.integers(0, 256, (side // 50, side // 50, 4), dtype=np.uint8)
    if mode == "I;16":
        return Image.fromarray(small[..., :2].copy().view(np.uint16)[..., 0]).resize((side, side))
    image = Image.fromarray(small[..., :3]).resize((side, side), Image.Resampling.NEAREST).convert(mode)
    if "A" in mode:
        image.putalpha(Image.fromarray(small[..., 3]).resize((side, side), Image.Resampling.NEAREST))
    return image


@pytest.mark.parametrize(("side", "mode", "form", "options"), LARGEST)
def test_no_image_takes_more_memory_than_it_may(side: int, mode: str, form: str, options: dict[str, Any]) -> None:
    """Turned, which those that are not are cheaper than."""
    exif = Image.Exif()
    exif[0x0112] = 6
    more = {} if form in ("GIF", "BMP") else {"exif": exif}
    image = encoded(pattern(side, mode), form, **options, **more)
    read, shapes = reader(25), []
    assert taken_mb(lambda: shapes.append(read.decode(image).shape)) < FEW_MB
    assert shapes == [(32, 32, 3)]


@pytest.mark.parametrize(("side", "mode", "form", "options"), [each for each in LARGEST if each[0] < 4990])
def test_a_larger_image_is_refused_before_it_is_decoded(
    side: int, mode: str, form: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "_MOST_BYTES", 10 * MEGABYTE)
    image = encoded(pattern(side * 6 // 10, mode), form, **options)

    def refuse() -> None:
        with pytest.raises(ImageError, match="the image is too large: ") as error:
            reader(5).decode(image)
        assert error.value.fault == Fault.TOO_LARGE

    assert taken_mb(refuse) < len(image) / MEGABYTE + 8


def test_what_takes_too_much_memory_is_told_a_way_out() -> None:
    with pytest.raises(ImageError, match=r"4000 x 4000 pixels of a PNG take 65 MB to decode, of at most 42; send it"):
        reader(25).decode(png(4000, 4000))


def test_more_memory_is_taken_where_larger_images_are_allowed() -> None:
    image = encoded(Image.new("RGB", (4000, 4000)), compress_level=1)
    assert reader(50).decode(image).shape == (32, 32, 3)


def test_a_jpeg_that_is_decoded_smaller_looks_the_same() -> None:
    small = Image.fromarray(RNG.integers(0, 256, (20, 20, 3), dtype=np.uint8))
    image = encoded(small.resize((4400, 4400), Image.Resampling.BICUBIC), "JPEG", quality=95)
    half, whole = reader(25).decode(image).astype(int), reader(80).decode(image)
    assert 0 < np.abs(half - whole).max() <= 3


def test_scans_of_single_channels_count_as_a_progressive_file_does() -> None:
    """libjpeg keeps all of them until the last one."""
    image = encoded(Image.new("RGB", (3000, 3000)), "JPEG", subsampling="4:4:4")
    assert reader(25).decode(image).shape == (32, 32, 3)
    scan = image.index(b"\xff\xda") + 4
    with pytest.raises(ImageError, match=r"take 9\d MB"):
        reader(25).decode(image[:scan] + b"\x01" + image[scan + 1 :])


def test_a_long_image_is_refused_that_would_be_large_once_it_is_resized() -> None:
    long = np.zeros((20_000, 200, 1), dtype=np.uint8)
    assert reader(25).fit(long).shape == (32, 32, 3)
    with pytest.raises(ImageError, match=r"200 x 20000 pixels take \d+ MB"):
        reader(25, height=1024, width=1024).fit(long)


def pieces(name: str) -> bytes:
    """Four million bytes of an image, of which nearly all are pieces without pixels."""
    image = encoded(picture(), name, **({"exif": Image.Exif()} if name == "PNG" else {}))
    many = {"JPEG": b"\xff\xe9\x00\x02" * 10**6, "PNG": chunk(b"prVt", b"") * 330_000, "GIF": b"!\xfe\1a\0" * 800_000}
    at = {"JPEG": 2, "PNG": 33, "GIF": image.find(b",")}[name]
    return image[:at] + many[name] + image[at:]


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF"])
def test_an_image_of_very_many_pieces_is_refused(name: str) -> None:
    """Pillow keeps something of each, up to 150 bytes."""
    image = pieces(name)

    def refuse() -> None:
        with pytest.raises(ImageError, match="very many pieces; save it anew, without comments"):
            reader().decode(image)

    assert taken_mb(refuse) < 16


def test_texts_of_a_png_take_little_memory() -> None:
    text = zlib.compress(bytes(1_000_000))
    texts = b"".join(chunk(b"zTXt", b"%d\0\0" % number + text) for number in range(60))
    image = encoded(picture())

    def refuse() -> None:
        with pytest.raises(ImageError, match="cannot be decoded: Too much memory used in text chunks"):
            reader().decode(image[:33] + texts + image[33:])

    assert taken_mb(refuse) < 8


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
@pytest.mark.parametrize("changes", [{}, {"width": 48}, {"squash": True, "width": 48}])
def test_large_images_are_resized_strip_by_strip_as_they_would_be_whole(
    orientation: int, mode: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Image.fromarray(RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8))
    image, exif = small.resize((60, 50), Image.Resampling.BICUBIC).convert(mode), Image.Exif()
    exif[0x0112] = orientation
    file = encoded(image, exif=exif)
    whole = reader(**changes).decode(file).astype(int)
    monkeypatch.setattr(images, "_STRIP_PIXELS", 300)
    assert np.abs(reader(**changes).decode(file) - whole).max() <= 8  # where values overshoot, the order counts


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
@pytest.mark.parametrize("into", [INFO, GREY])
def test_images_are_laid_on_white_strip_by_strip_as_they_would_be_whole(
    mode: str, into: VisionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    see_through = picture().convert("RGBA")
    see_through.putalpha(Image.fromarray(RNG.integers(0, 256, (40, 50), dtype=np.uint8)))
    image = encoded(see_through.convert(mode), "PNG", **({"transparency": 3} if mode == "P" else {}))
    found = []
    for pixels in (60, 10**9):
        monkeypatch.setattr(images, "_STRIP_PIXELS", pixels)
        found.append(ImageReader(into, 1).decode(image).astype(int))
    assert np.abs(found[0] - found[1]).max() <= 2
