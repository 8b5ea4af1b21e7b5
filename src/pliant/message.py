"""Messages between processes, of which one may run another version while a cluster is upgraded.

A message is pickled by the names of its fields. Whoever reads it ignores fields that it does not know, and takes the
default of those that the sender did not know; so a field that is added needs a default. A message of which a field
changes its meaning gets another `message_version`, which is 1 unless it says so, and is refused by whoever has another
one: then a process of the sender's version is to be asked. A `Word` that is not known is read as the nearest that is.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter
from typing import Any, Self, TypeVar

from pliant.errors import PliantError

T = TypeVar("T", bound=type[Any])


class VersionError(PliantError):
    """A message of a version that this process does not understand."""


class Word(StrEnum):
    """What messages say in one of a few words, to which later versions may add."""

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return _word, (type(self), str(self))

    @classmethod
    def unknown(cls) -> Self | None:
        """What a word stands for that a later version added."""
        return None


def _word(cls: type[Word], value: str) -> Word | None:
    known: Word | None = cls._value2member_map_.get(value)  # type: ignore[assignment]
    return known or cls.unknown()


def message(cls: T) -> T:
    """Makes a NamedTuple or dataclass a message."""
    names: tuple[str, ...] = getattr(cls, "_fields", None) or tuple(getattr(cls, "__dataclass_fields__", ()))
    values = _values(cls, names)

    def reduce(self: Any) -> tuple[Any, ...]:
        return _restored, (cls, names, values(self), version)

    version = cls.message_version = getattr(cls, "message_version", 1)
    cls.__reduce__ = reduce  # type: ignore[assignment]
    cls.sent_as = names
    return cls


def _values(cls: type[Any], names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if issubclass(cls, tuple):
        return tuple
    if len(names) == 1:
        return lambda self: (getattr(self, names[0]),)
    get: Callable[[Any], tuple[Any, ...]] = attrgetter(*names)
    return get


def _restored(cls: Any, names: tuple[str, ...], values: tuple[Any, ...], version: int) -> Any:
    """The message of `cls` whose sender had fields called `names`. Raises VersionError if one without a default is not
    among them, or the sender meant something else by them."""
    if version != cls.message_version:
        raise _misunderstood(cls, f"version {version}, and here it is {cls.message_version}")
    if names == cls.sent_as:
        return cls(*values)
    try:
        return cls(**{name: value for name, value in zip(names, values, strict=True) if name in cls.sent_as})
    except TypeError as error:
        raise _misunderstood(cls, f"the fields {', '.join(names)}: {error}") from None


def _misunderstood(cls: Any, how: str) -> VersionError:
    return VersionError(
        f"{cls.__module__}.{cls.__qualname__} was sent by another version of pliant, with {how}; have all processes "
        "of the cluster run one version"
    )
