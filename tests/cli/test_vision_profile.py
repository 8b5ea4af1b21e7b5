"""What is shown of a vision service's profile."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from support.vision_profile import PROFILE

from pliant.cli.vision_profile import VisionProfile


def rows(profile: VisionProfile) -> list[list[str]]:
    console = Console(width=200, no_color=True)
    with console.capture() as said:
        console.print(profile.table())
    lines = (line.replace("┃", "│").split("│") for line in said.get().splitlines())
    return [[cell.strip() for cell in line[1:-1]] for line in lines if len(line) > 1]


def test_each_gamma_has_a_row() -> None:
    assert rows(PROFILE) == [
        ["gamma", "ms for 1", "ms for 8", "ms for 64", "images/s", "MB for 64", "digit", "parity", "used"],
        ["-5", "1.00", "4.00", "20.00", "3200", "2.5", "80.0%", "70.0%", "yes"],
        ["0", "1.10", "5.00", "30.00", "2133", "3.5", "90.0%", "71.0%", "yes"],
        ["+2", "1.20", "6.00", "40.00", "1600", "4.5", "95.0%", "-", "no"],
    ]
    assert PROFILE.summary() == (
        "gamma 2 is not used with these tasks: 0 is at least as fast, and as accurate for each"
    )
    assert not replace(PROFILE, useless={}).summary()


def test_the_file_has_all_of_it(tmp_path: Path) -> None:
    PROFILE.write(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["gammas"], found["batches"]) == ([-5, 0, 2], [1, 4, 8, 64])
    assert np.shape(found["seconds"]) == np.shape(found["memory_bytes"]) == (3, 4)
    assert found["accuracies"]["parity"] == {"-5": 0.7, "0": 0.71}
    assert found["useless"] == {"2": 0}


def test_the_file_is_json_that_everybody_reads(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        replace(PROFILE, seconds=((math.inf,),)).write(tmp_path / "a.json")


def test_a_picture_is_drawn_with_and_without_tasks(tmp_path: Path) -> None:
    for name, profile in (("with", PROFILE), ("without", replace(PROFILE, accuracies={}, useless={}))):
        profile.plot(tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.width > picture.height > 400
