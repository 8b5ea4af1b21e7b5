"""What a JSON schema demands of one value at once: work for who follows it that llguidance does not count.

Schemas combine: what `allOf`, a reference and the part itself say of a value holds together, and so does what each says
of the same property or item; of `anyOf` and `oneOf` the worst counts. Patterns that hold together multiply, and a
number of which a value is a multiple makes an automaton of as many states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from typing import Any, NamedTuple

MOST_PATTERNS = 12
"""Patterns that one value is to match; each doubles the work."""
MOST_STATES = 10_000
"""Of a number, without its point, of which a value is to be a multiple; powers of ten, however large, make none."""
MOST_STATES_TOGETHER = 50_000
_MOST_PARTS = 20_000
_OTHERS = None
"""The place of properties, or items, that have none of their own."""

Place = tuple[str, str | int | None]


class Demands(NamedTuple):
    """Of one value, and of what is inside it; `worst_patterns` and `worst_states` are the most of any of them."""

    patterns: int
    multiple: Fraction | None
    inside: Mapping[Place, Demands]
    worst_patterns: int
    worst_states: int


def check(schema: Any) -> None:
    """Raise ValueError if `schema` makes too much work."""
    reader = _Reader(schema)
    found = reader.demands(schema)
    check_patterns(found.worst_patterns)
    if found.worst_states > MOST_STATES or reader.states > MOST_STATES_TOGETHER:
        raise ValueError(
            f"its multiples take too much work: multipleOf that hold together may come to {MOST_STATES:,} (their least "
            f"common multiple, without the point), all to {MOST_STATES_TOGETHER:,}; powers of ten are free"
        )


def check_patterns(count: int) -> None:
    """Raise ValueError if so many patterns for the same text are too many."""
    if count > MOST_PATTERNS:
        raise ValueError(f"it has {count} patterns for the same text; {MOST_PATTERNS} at most")


class _Reader:
    """Reads the parts of one schema."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._known: dict[str, Demands] = {}
        self._left = _MOST_PARTS
        self.states = 0
        """What all numbers in it take."""

    def demands(self, part: Any) -> Demands:
        """Raises ValueError if there are too many parts, or too many ways in which they combine."""
        self._count()
        if not isinstance(part, dict):
            return _NONE
        found = [self._own(part)]
        if isinstance(name := part.get("$ref"), str):
            found.append(self._of_reference(name))
        for key, combined in (("allOf", self._all), ("anyOf", self._any), ("oneOf", self._any)):
            if isinstance(parts := part.get(key), list):
                found.append(combined(map(self.demands, parts)))
        return self._all(found)

    def _own(self, part: dict[str, Any]) -> Demands:
        """What a part says without others."""
        patterns = sum(isinstance(part.get(key), str) for key in ("pattern", "format"))
        multiple = _fraction(part.get("multipleOf"))
        self.states += _states(multiple)
        inside: dict[Place, Demands] = {}
        if isinstance(named := part.get("properties"), dict):
            inside.update({("property", name): self.demands(inner) for name, inner in named.items()})
        if isinstance(listed := part.get("prefixItems"), list):
            inside.update({("item", index): self.demands(inner) for index, inner in enumerate(listed)})
        by_pattern = part.get("patternProperties")
        others = [*by_pattern.values()] if isinstance(by_pattern, dict) else []
        inside["property", _OTHERS] = self._any(map(self.demands, (*others, part.get("additionalProperties"))))
        inside["item", _OTHERS] = self.demands(part.get("items"))
        return _demands(patterns, multiple, {place: each for place, each in inside.items() if each is not _NONE})

    def _of_reference(self, name: str) -> Demands:
        if name not in self._known:
            self._known[name] = _NONE  # a reference to itself adds nothing
            part = self._schema
            for key in name.removeprefix("#").strip("/").split("/") if name != "#" else ():
                part = part.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
            self._known[name] = self.demands(part)
        return self._known[name]

    def _all(self, parts: Iterable[Demands]) -> Demands:
        return reduce(lambda one, other: self._merged(one, other, _sum, _least_common_multiple), parts, _NONE)

    def _any(self, parts: Iterable[Demands]) -> Demands:
        return reduce(lambda one, other: self._merged(one, other, max, _worse), parts, _NONE)

    def _merged(
        self,
        one: Demands,
        other: Demands,
        patterns: Callable[[int, int], int],
        multiple: Callable[[Fraction, Fraction], Fraction],
    ) -> Demands:
        if one is _NONE or other is _NONE:
            return other if one is _NONE else one
        self._count()
        inside = {}
        for place in one.inside.keys() | other.inside.keys():
            its, others = _inside(one, place), _inside(other, place)
            inside[place] = self._merged(its, others, patterns, multiple)
        both = one.multiple and other.multiple and multiple(one.multiple, other.multiple)
        return _demands(patterns(one.patterns, other.patterns), both or one.multiple or other.multiple, inside)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError("it has too many parts, or combines them in too many ways")


def _demands(patterns: int, multiple: Fraction | None, inside: Mapping[Place, Demands]) -> Demands:
    if not (patterns or multiple or inside):
        return _NONE
    worst_patterns = max([patterns, *(each.worst_patterns for each in inside.values())])
    worst_states = max([_states(multiple), *(each.worst_states for each in inside.values())])
    return Demands(patterns, multiple, inside, worst_patterns, worst_states)


_NONE = Demands(0, None, {}, 0, 0)


def _inside(whole: Demands, place: Place) -> Demands:
    return whole.inside.get(place) or whole.inside.get((place[0], _OTHERS), _NONE)


def _sum(one: int, other: int) -> int:
    return one + other


def _least_common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))


def _worse(one: Fraction, other: Fraction) -> Fraction:
    return max(one, other, key=_states)


def _fraction(value: Any) -> Fraction | None:
    """What is no positive number, nobody is a multiple of: llguidance says so."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        return None
    return Fraction(Decimal(str(value)))


def _states(multiple: Fraction | None) -> int:
    """Its digits as a whole number; 0 if that is a power of ten."""
    if multiple is None:
        return 0
    while multiple.denominator != 1:
        multiple *= 10
    return 0 if str(multiple.numerator).rstrip("0") == "1" else multiple.numerator
