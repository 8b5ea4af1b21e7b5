"""How long a classifier computes at each length, on each kind of runtime, on one machine (Arlo §2.2, figure 2; §3.2).

`pliant.kernels.encoder.latency_profile` measures it; nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, model_validator

from pliant.cache import cache_folder, made_once
from pliant.formats.pass_times import PassTimes

RuntimeKind = Literal["packed", "dynamic", "static"]
"""Of runtimes: one that takes several texts of any length at a time; one that takes each at its own length; or one for
each length, to which texts are padded."""

PAYS = 0.05
"""The share of a dynamic runtime's time that static ones must save to be worth compiling."""

_UNPACKED_PAYS = 0.2
"""The share of a packed runtime's time with one text that others must save: under load it takes several in a pass, each
in less, and on CPUs a replica with any other has torch in memory, too."""

EVEN_BINS = 8
"""Static runtimes, evenly spaced, that a dynamic one is compared with; the paper has one every 64 tokens, up to 512."""


class Profile(BaseModel):
    """The latency of one model on one kind of device.

    `dynamic_s[i]` is the seconds that a dynamic runtime takes for a text of `lengths[i]` tokens, `static_s[i]` those of
    a static runtime compiled for that many. Static times were measured at the lengths in `static_at`, and estimated
    between them from the dynamic ones; there are none where a packed runtime leaves them no chance. Where it leaves a
    dynamic one none either, or nothing can be compiled, `dynamic_s` are those of the uncompiled model. `packed_s` are
    those of a packed runtime with one text; none if the model has none here; `passes` those of several texts together.
    `steps` are the last lengths before latency jumps: the staircase's edges, empty where there is none. `device` is the
    processor's name; `threads` are those of the CPU for one forward pass.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    device: str
    dtype: str
    threads: PositiveInt
    torch: str
    lengths: tuple[PositiveInt, ...]
    dynamic_s: tuple[PositiveFloat, ...]
    compiled: bool = True
    """Whether the dynamic runtime is."""
    static_s: tuple[PositiveFloat, ...] = ()
    static_at: tuple[PositiveInt, ...] = ()
    packed_s: tuple[PositiveFloat, ...] = ()
    passes: PassTimes | None = None
    steps: tuple[PositiveInt, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.lengths or any(left >= right for left, right in pairwise(self.lengths)):
            raise ValueError("lengths must rise, and there must be one")
        if len(self.dynamic_s) != len(self.lengths):
            raise ValueError("each length needs a dynamic time")
        for kind, seconds in (("static", self.static_s), ("packed", self.packed_s)):
            if seconds and len(seconds) != len(self.lengths):
                raise ValueError(f"each length needs a {kind} time, or none does")
        if bool(self.packed_s) != (self.passes is not None):
            raise ValueError("packed times need those of passes, and the other way round")
        if not (self.static_s or self.packed_s):
            raise ValueError("static times may be missing only where there are packed ones")
        if bool(self.static_at) != bool(self.static_s):
            raise ValueError("static times need lengths at which they were measured, and the other way round")
        if not set(self.static_at + self.steps) <= set(self.lengths):
            raise ValueError("static_at and steps must be among the lengths")
        return self

    @property
    def longest(self) -> int:
        """The longest text, in tokens."""
        return self.lengths[-1]

    @property
    def kinds(self) -> tuple[RuntimeKind, ...]:
        """Those that were measured; of two that take equally long the former serves."""
        return tuple(kind for kind, seconds in self._measured.items() if seconds)

    def name(self, kind: RuntimeKind) -> str:
        """What people should read for it."""
        return "uncompiled" if kind == "dynamic" and not self.compiled else kind

    def service_s(self, length: int, kind: RuntimeKind) -> float:
        """Seconds for one text of `length` tokens on a runtime of this kind, a static one compiled for exactly that
        many.

        Raises ValueError if there was no measurement for such a long text, or of the kind.
        """
        if not 1 <= length <= self.longest:
            raise ValueError(f"got {length} tokens; the profile covers 1 to {self.longest}")
        return float(np.interp(length, self.lengths, self._seconds(kind)))

    def mean_s(self, kind: RuntimeKind, bins: Sequence[int] | None = None) -> float:
        """Seconds for a text, all lengths alike, one at a time; static runtimes are those for `bins`, or EVEN_BINS."""
        at = np.array(self.lengths)
        if kind == "static":
            edges = np.array(bins or np.arange(1, EVEN_BINS + 1) * self.longest / EVEN_BINS)
            at = edges[np.minimum(np.searchsorted(edges, at), len(edges) - 1)]
        return float(np.mean(np.interp(at, self.lengths, self._seconds(kind))))

    def fastest(self, bins: Sequence[int] | None = None) -> RuntimeKind:
        """What to serve with where a replica may hold what it likes; static runtimes would be those for `bins`.

        A packed runtime answers several texts at a time, and a dynamic one leaves each replica open to all lengths:
        another kind must save more than what that is worth.
        """
        chosen, *others = self.kinds
        for kind in others:
            if self.mean_s(kind, bins) <= worthwhile_s(chosen, self.mean_s(chosen, bins)):
                chosen = kind
        return chosen

    def reason(self, bins: Sequence[int] | None = None) -> str:
        """Why `fastest` says so, in a line."""
        compared = ", ".join(f"{self.name(kind)} {self.mean_s(kind, bins) * 1e3:.3g} ms" for kind in self.kinds)
        return f"{self.fastest(bins)}: a text of any length takes {compared} on average"

    @property
    def _measured(self) -> dict[RuntimeKind, tuple[float, ...]]:
        return {"packed": self.packed_s, "dynamic": self.dynamic_s, "static": self.static_s}

    def _seconds(self, kind: RuntimeKind) -> tuple[float, ...]:
        seconds = self._measured[kind]
        if not seconds:
            raise ValueError(f"{self.model} has no {kind} runtime on this device")
        return seconds

    @property
    def unpadded_saving(self) -> float:
        """The share of the dynamic runtime's time that static ones save at their own lengths; negative if slower."""
        at = np.isin(self.lengths, self.static_at)
        return float(1 - np.mean(np.array(self.static_s)[at] / np.array(self.dynamic_s)[at]))

    @property
    def static_saving(self) -> float:
        """The same with padding: for texts of every length alike, on EVEN_BINS evenly spaced runtimes."""
        return 1 - self.mean_s("static") / self.mean_s("dynamic")

    @property
    def static_pays(self) -> bool:
        """Whether static runtimes are worth compiling on this device."""
        return bool(self.static_s) and self.static_saving >= PAYS

    def summary(self) -> str:
        """What an operator should know, in a few sentences."""
        edges = ", ".join(map(str, self.steps))
        steps = f"Latency jumps after {edges} tokens" if edges else "Latency rises with length without a staircase"
        if not self.static_s:
            saved = _compared(1 - self.mean_s("packed") / self.mean_s("dynamic"))
            than, others = ("a dynamic one", "Static ones") if self.compiled else ("the uncompiled model", "Others")
            return (
                f"{steps}. The packed runtime takes {saved} time than {than}. {others} could not "
                f"save {_UNPACKED_PAYS:.0%} of its time, so none were compiled."
            )
        unpadded, padded = _compared(self.unpadded_saving), _compared(self.static_saving)
        verdict = "static runtimes serve" if self.static_pays else "one dynamic runtime serves all lengths"
        return (
            f"{steps}. Static runtimes take {unpadded} time than a dynamic one at their own length and {padded} with "
            f"padding: {verdict}."
        )


def worthwhile_s(kind: RuntimeKind, mean_s: float) -> float:
    """The mean seconds at which runtimes of another kind serve instead of one of this kind, which takes `mean_s`."""
    return (1 - (_UNPACKED_PAYS if kind == "packed" else PAYS)) * mean_s


def kept(name: str, make: Callable[[], Profile]) -> Profile:
    """The profile of this name in the user's cache, made first if it is not there; several processes make it once.

    What `make` raises is passed on, and nothing is kept.
    """

    def write(folder: Path) -> None:
        (folder / "profile.json").write_text(make().model_dump_json(indent=1))

    folder = made_once(cache_folder() / "profiles" / name, write)
    return Profile.model_validate_json((folder / "profile.json").read_text())


def _compared(saving: float) -> str:
    return f"{abs(saving):.1%} {'less' if saving >= 0 else 'more'}"
