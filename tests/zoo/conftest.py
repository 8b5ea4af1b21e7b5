"""The zoo's tests train in this process, with shapes of their own; `test_training_process` shows the real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pliant import zoo
from pliant.zoo.shapes import Progress


@pytest.fixture(scope="session", autouse=True)
def in_this_process() -> Iterator[None]:
    def train(name: str, into: Path, progress: Progress, _niceness: int) -> None:
        zoo.train(name, into, progress)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "train_apart", train)
        yield
