"""A profile is drawn with the kinds of runtimes that were measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.doubles import profile

from pliant.cli.profile_plot import plot
from pliant.formats.pass_times import PassTimes
from pliant.formats.profile import Profile

BOTH = profile(static_share=0.5)
PACKED = {"packed_s": BOTH.static_s, "passes": PassTimes(counts=(1,), lengths=(512,), seconds=((1.0,),))}


@pytest.mark.parametrize(
    "drawn",
    [
        BOTH,
        profile(static_share=1.0),
        Profile(**BOTH.model_dump() | PACKED),
        Profile(**BOTH.model_dump() | PACKED | {"static_s": (), "static_at": ()}),
    ],
)
def test_a_profile_is_drawn(drawn: Profile, tmp_path: Path) -> None:
    plot(drawn, (64, 512), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 10_000
