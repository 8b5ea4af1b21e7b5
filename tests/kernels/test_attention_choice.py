"""No model on a GPU computes attention with cuDNN, which plans for each shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support import tiny_classifiers
from support.vision_folders import vision_folder

from pliant.kernels.encoder import eager_classifier
from pliant.kernels.vision import model as vision_model


@pytest.fixture
def cudnn() -> Iterator[Callable[[], bool]]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield torch.backends.cuda.cudnn_sdp_enabled
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("cuda", False)])
def test_encoders(device: str, kept: bool, cudnn: Callable[[], bool], tmp_path: Path) -> None:
    tiny_classifiers.save(tmp_path, "bert")
    with suppress(RuntimeError, AssertionError):  # there may be no GPU to bring the weights to
        eager_classifier.load_model(tmp_path, device, torch.float32)
    assert cudnn() == kept


@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("cuda", False)])
def test_vision_transformers(device: str, kept: bool, cudnn: Callable[[], bool], tmp_path: Path) -> None:
    vision_folder(tmp_path)
    with suppress(RuntimeError, AssertionError):
        vision_model.load_model(tmp_path, "float32", device)
    assert cudnn() == kept
