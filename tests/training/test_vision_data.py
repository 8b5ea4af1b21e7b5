"""Images with labels as people keep them, and the one line that is said of those that nothing can be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.vision_folders import vision_folder

from pliant.deployments.http.images import ImageReader
from pliant.training.vision import Examples
from pliant.training.vision_data import DataError, read_labelled, split


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ImageReader:
    """For images of 16 x 16."""
    return ImageReader(vision_folder(tmp_path_factory.mktemp("model")), 1)


def pictures(folder: Path, **counts: int) -> Path:
    """So many images in each folder: one grey value each, rising."""
    for label, count in counts.items():
        (folder / label).mkdir(parents=True)
        for index in range(count):
            Image.new("L", (20, 20), 10 * index).save(folder / label / f"{index}.png")
    return folder


def arrays(path: Path, **changes: Any) -> Path:
    held = {"images": np.zeros((6, 16, 16, 3), np.uint8), "labels": np.arange(6) % 2, **changes}
    np.savez(path, **{name: array for name, array in held.items() if array is not None})
    return path


def refusal(data: Path, reader: ImageReader, *labels: str) -> str:
    with pytest.raises(DataError) as caught:
        read_labelled(data, labels, reader)
    said = str(caught.value)
    assert said.isprintable()
    assert said.startswith(str(data))
    return said


def test_a_folder_for_each_label(tmp_path: Path, reader: ImageReader) -> None:
    data = pictures(tmp_path, dog=2, cat=3)
    (data / ".hidden").mkdir()
    (data / "cat" / "notes.txt").write_text("no image")
    (data / "cat" / "more").mkdir()
    Image.new("RGB", (16, 16), (1, 2, 3)).save(data / "cat" / "more" / "a.BMP", "BMP")
    done: list[float] = []
    labels, examples = read_labelled(data, (), reader, done.append)
    assert labels == ("cat", "dog")
    assert examples.labels.tolist() == [0, 0, 0, 0, 1, 1]
    assert (examples.images.shape, examples.images.dtype) == ((6, 16, 16, 3), np.uint8)
    assert examples.images[:, 0, 0].tolist() == [[0] * 3, [10] * 3, [20] * 3, [1, 2, 3], [0] * 3, [10] * 3]
    assert done == sorted(done)
    assert done[-1] < 1


def test_labels_may_be_chosen_and_ordered(tmp_path: Path, reader: ImageReader) -> None:
    data = pictures(tmp_path, ant=9, dog=2, cat=3)
    labels, examples = read_labelled(data, ("dog", "cat"), reader)
    assert labels == ("dog", "cat")
    assert examples.labels.tolist() == [0, 0, 1, 1, 1]


def test_what_is_no_image_is_named(tmp_path: Path, reader: ImageReader) -> None:
    data = pictures(tmp_path, a=3, b=3)
    (data / "b" / "1.png").write_bytes(b"no image")
    said = refusal(data, reader)
    assert f"{data / 'b' / '1.png'}: no image of PNG" in said


def test_bombs_are_not_opened(tmp_path: Path, reader: ImageReader) -> None:
    data = pictures(tmp_path, a=3, b=3)
    Image.new("1", (2000, 2000)).save(data / "b" / "1.png")
    assert "2000 x 2000 pixels for at most 1 megapixels" in refusal(data, reader)


@pytest.mark.parametrize(
    ("counts", "labels", "words"),
    [
        ({}, (), "has images of no label; at least 2 are needed"),
        ({"a": 9}, (), "has images of 'a'; at least 2"),
        ({"a": 9, "b": 0}, (), "has no images of 'b'; add some"),
        ({"a": 2, "b": 2}, (), "has 4 images; at least 5"),
        (dict.fromkeys("abcdef", 1), (), "has one image of each label; some must have more"),
        ({"a": 5, "b": 5}, ("a", "c"), "has no images of 'c'; there are labels: 'a', 'b'"),
        ({}, ("a", "c"), "has no images of 'a'; there are labels: none"),
    ],
)
def test_folders_with_too_little_are_refused(
    counts: dict[str, int], labels: tuple[str, ...], words: str, tmp_path: Path, reader: ImageReader
) -> None:
    assert words in refusal(pictures(tmp_path, **counts), reader, *labels)


def test_arrays_of_numbers(tmp_path: Path, reader: ImageReader) -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3)).astype(np.uint8)
    labels, examples = read_labelled(arrays(tmp_path / "a.npz", images=images), (), reader)
    assert labels == ("0", "1")
    assert np.array_equal(examples.images, images)
    assert (examples.labels.tolist(), examples.labels.dtype) == ([0, 1] * 3, np.int64)
    assert read_labelled(tmp_path / "a.npz", ("even", "odd"), reader).labels == ("even", "odd")


def test_arrays_of_names_and_of_grey_floats_of_another_size(tmp_path: Path, reader: ImageReader) -> None:
    data = arrays(tmp_path / "a.npz", images=np.full((6, 8, 8), 0.2), labels=np.array(["b", "a"] * 3))
    labels, examples = read_labelled(data, (), reader)
    assert labels == ("a", "b")
    assert examples.labels.tolist() == [1, 0] * 3
    assert (examples.images == 51).all()
    assert examples.images.shape == (6, 16, 16, 3)
    assert read_labelled(data, ("b", "a"), reader).examples.labels.tolist() == [0, 1] * 3


@pytest.mark.parametrize(
    ("changes", "labels", "words"),
    [
        ({"images": None}, (), "has no images and labels"),
        ({"labels": None}, (), "has no images and labels"),
        ({"labels": np.array([{}] * 6)}, (), "cannot be read: 'Object arrays cannot be loaded"),
        ({"labels": np.zeros(6)}, (), "its labels are float64 [6]"),
        ({"labels": np.zeros(5, np.int64)}, (), "a number or a name for each of 6 images"),
        ({"labels": np.array([0, 1, 2, -1, 0, 1])}, (), "its labels go from -1 to 2; 3 have names"),
        ({}, ("only",), "its labels go from 0 to 1; 1 have names"),
        ({}, ("a", "b", "c"), "has no images of 'c'"),
        ({"labels": np.zeros(6, np.int64)}, (), "has images of '0'; at least 2"),
        ({"labels": np.array(["a", "b"] * 3)}, ("a", "c"), "has no images of 'c'"),
        ({"images": np.zeros((6, 16, 16, 4), np.uint8)}, (), "its images are uint8 [6, 16, 16, 4]"),
        ({"images": np.zeros((6, 16), np.uint8)}, (), "its images are uint8 [6, 16]"),
        ({"images": np.zeros((6, 16, 16), np.int64)}, (), "its images are int64"),
        ({"images": np.full((6, 16, 16), 2.0)}, (), "image 0: an image of floats must have values from 0 to 1"),
        ({"images": np.zeros((6, 1100, 1000), np.uint8)}, (), "image 0: the image is too large"),
        ({"images": np.zeros((6, 0, 16), np.uint8)}, (), "image 0: the image has 16 x 0 pixels"),
        ({"images": np.zeros((0, 16, 16), np.uint8), "labels": np.zeros(0, np.int64)}, (), "its labels are int64 [0]"),
    ],
)
def test_arrays_that_mean_nothing_are_refused(
    changes: dict[str, Any], labels: tuple[str, ...], words: str, tmp_path: Path, reader: ImageReader
) -> None:
    assert words in refusal(arrays(tmp_path / "a.npz", **changes), reader, *labels)


def test_files_that_are_none_are_refused(tmp_path: Path, reader: ImageReader) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "nowhere", reader)
    (tmp_path / "a.npz").write_bytes(b"no archive")
    assert "is no .npz; choose one, or a folder" in refusal(tmp_path / "a.npz", reader)
    whole = arrays(tmp_path / "b.npz").read_bytes()
    (tmp_path / "b.npz").write_bytes(whole[:100] + bytes(100) + whole[200:])
    assert "cannot be read" in refusal(tmp_path / "b.npz", reader)


def numbered(labels: Sequence[int]) -> Examples:
    """Images that say which one they are."""
    return Examples(np.arange(len(labels), dtype=np.uint8).reshape(-1, 1, 1, 1), np.array(labels))


def test_a_fifth_is_set_aside() -> None:
    examples = numbered(np.arange(50) % 5)
    training, profiling = split(examples, 3)
    assert (len(training.labels), len(profiling.labels)) == (40, 10)
    assert sorted(np.concatenate([training.images, profiling.images]).ravel()) == list(range(50))
    for part in (training, profiling):
        assert np.array_equal(part.images.ravel() % 5, part.labels)
    assert np.bincount(profiling.labels).tolist() == [2] * 5
    assert np.array_equal(split(examples, 3)[1].images, profiling.images)
    assert not np.array_equal(split(examples, 4)[1].images, profiling.images)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=8).filter(lambda counts: max(counts) > 1), st.integers(0, 99))
def test_every_label_has_images_to_learn_from(counts: list[int], seed: int) -> None:
    training, profiling = split(numbered(np.repeat(np.arange(len(counts)), counts)), seed)
    learned, measured = (np.bincount(part.labels, minlength=len(counts)) for part in (training, profiling))
    assert (learned + measured).tolist() == counts
    assert learned.min() > 0
    assert 1 <= measured.sum() <= max(1, round(sum(counts) / 5))
    assert all(abs(found - count / 5) < 2 for found, count in zip(measured, counts, strict=True) if min(counts) > 1)
