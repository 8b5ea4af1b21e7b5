"""A profile answers for every length, says what to do, and is made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pliant.cli.profile_plot import plot
from pliant.formats.pass_times import PassTimes
from pliant.formats.profile import Profile, kept


def profile(**changes: Any) -> Profile:
    lengths = tuple(range(64, 513, 64))
    seconds = tuple(float(length) for length in lengths)
    fields: dict[str, Any] = {
        "model": "m",
        "device": "a processor",
        "dtype": "float32",
        "threads": 1,
        "torch": "2.13",
        "lengths": lengths,
        "dynamic_s": seconds,
        "static_s": tuple(second / 2 for second in seconds),
        "static_at": (64, 512),
        "steps": (),
    }
    return Profile(**fields | changes)


def test_interpolates_between_lengths() -> None:
    made = profile()
    assert made.longest == 512
    assert made.service_s(96, "dynamic") == pytest.approx(96)
    assert made.service_s(512, "static") == 256
    assert made.service_s(1, "dynamic") == 64
    for length in (0, 513):
        with pytest.raises(ValueError, match=f"got {length} tokens; the profile covers 1 to 512"):
            made.service_s(length, "dynamic")


def test_static_pays_only_if_it_makes_up_for_padding() -> None:
    lengths = tuple(range(8, 513, 8))
    seconds = tuple(float(length) for length in lengths)
    unpadded = profile(lengths=lengths, dynamic_s=seconds, static_s=tuple(0.9 * second for second in seconds))
    assert unpadded.unpadded_saving == pytest.approx(0.1)
    assert unpadded.static_saving == pytest.approx(1 - 0.9 * 288 / 260)
    assert not unpadded.static_pays
    assert unpadded.summary() == (
        "Latency rises with length without a staircase. Static runtimes take 10.0% less time than a dynamic one at "
        "their own length and 0.3% less with padding: one dynamic runtime serves all lengths."
    )


def test_says_that_static_pays_and_where_latency_jumps() -> None:
    assert profile(steps=(128, 256)).static_pays
    assert profile(steps=(128, 256)).summary() == (
        "Latency jumps after 128, 256 tokens. Static runtimes take 50.0% less time than a dynamic one at their own "
        "length and 50.0% less with padding: static runtimes serve."
    )


@pytest.mark.parametrize(
    ("packed", "static", "fastest"),
    [
        (0.5, 0.9, "packed"),
        (1.2, 1.0, "packed"),  # it takes several texts at a time
        (1.3, 1.0, "dynamic"),
        (1.0, 0.85, "packed"),
        (None, 1.0, "dynamic"),
        (0.9, 0.5, "static"),
        (None, 0.7, "static"),
    ],
)
def test_the_fastest_kind_is_chosen_and_said_why(packed: float | None, static: float, fastest: str) -> None:
    lengths = tuple(range(8, 513, 8))
    made = profile(
        lengths=lengths,
        dynamic_s=lengths,
        static_s=tuple(static * length for length in lengths),
        packed_s=() if packed is None else tuple(packed * length for length in lengths),
        passes=None if packed is None else PassTimes(counts=(1,), lengths=(512,), seconds=((512 * packed,),)),
    )
    assert made.fastest() == fastest
    assert made.reason().startswith(f"{fastest}: a text of any length takes ")
    assert ("packed" in made.reason()) == (packed is not None)


def test_without_static_times_the_packed_runtime_serves_and_says_why() -> None:
    times = PassTimes(counts=(1,), lengths=(512,), seconds=((256.0,),))
    packed_s = tuple(length / 2 for length in range(64, 513, 64))
    made = profile(static_s=(), static_at=(), packed_s=packed_s, passes=times)
    assert (made.kinds, made.fastest((512,)), made.static_pays) == (("packed", "dynamic"), "packed", False)
    assert made.summary() == (
        "Latency rises with length without a staircase. The packed runtime takes 50.0% less time than a dynamic one. "
        "Static ones could not save 20% of its time, so none were compiled."
    )
    with pytest.raises(ValueError, match="no static runtime"):
        made.mean_s("static")


def test_static_runtimes_are_judged_by_the_lengths_that_there_are_to_be() -> None:
    lengths = tuple(range(8, 513, 8))
    made = profile(lengths=lengths, dynamic_s=lengths, static_s=tuple(0.9 * length for length in lengths))
    assert made.fastest(lengths) == "static"
    assert made.fastest((512,)) == "dynamic"


@pytest.mark.parametrize("longest", [3, 20, 100, 512])
def test_savings_are_defined_for_any_longest_length(longest: int) -> None:
    lengths = (*range(8, longest, 8), longest)
    seconds = tuple(float(length) for length in lengths)
    made = profile(lengths=lengths, dynamic_s=seconds, static_s=seconds, static_at=(longest,))
    assert made.unpadded_saving == 0
    assert -0.2 < made.static_saving <= 0


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": (8, 8)},
        {"dynamic_s": (1.0,)},
        {"steps": (65,)},
        {"static_at": ()},
        {"static_s": ()},
        {"static_s": (), "static_at": ()},
        {"unknown": 1},
        {"packed_s": (1.0,)},
        {"packed_s": (1.0,) * 8},
    ],
)
def test_refuses_what_contradicts_itself(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        profile(**changes)


def test_is_made_once_and_kept_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    made: list[Profile] = []

    def make() -> Profile:
        made.append(profile())
        return made[-1]

    def fail() -> Profile:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        kept("name", fail)
    assert kept("name", make) == kept("name", make) == made[0]
    assert len(made) == 1
    assert '"static_at"' in (tmp_path / "profiles" / "name" / "profile.json").read_text()


@pytest.mark.parametrize("steps", [(), (128, 256)])
def test_is_drawn_as_png(tmp_path: Path, steps: tuple[int, ...]) -> None:
    plot(profile(steps=steps), (128, 512), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
