"""What an engine is put together from may be missing in part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pliant.config.llm import AdaptersConfig
from pliant.deployments.llm import assembly


@pytest.mark.parametrize(("pinned", "complaints"), [((), 0), (("sql", "law"), 1)])
def test_a_missing_folder_of_adapters_keeps_no_model_from_being_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, pinned: tuple[str, ...], complaints: int
) -> None:
    nothing: Any = None
    assembly._pin(nothing, AdaptersConfig(folder=str(tmp_path / "nothing"), pinned=pinned), nothing)
    assert caplog.text.count("no adapters can be pinned: ") == complaints
