"""Messages between processes, of which one may run another version while a cluster is upgraded.

A message is pickled by the names of its fields. Whoever reads it ignores fields that it does not know, and takes the
default of those that the sender did not know; so a field that is added needs a default, and none may change its
meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T", bound=type[Any])


def message(cls: T) -> T:
    """Makes a NamedTuple or dataclass a message."""
    names: tuple[str, ...] = getattr(cls, "_fields", None) or tuple(getattr(cls, "__dataclass_fields__", ()))
    values = _values(cls, names)

    def reduce(self: Any) -> tuple[Any, ...]:
        return _restored, (cls, names, values(self))

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


def _restored(cls: Any, names: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """The message of `cls` whose sender had fields called `names`. Raises TypeError if one without a default is not
    among them."""
    if names == cls.sent_as:
        return cls(*values)
    return cls(**{name: value for name, value in zip(names, values, strict=True) if name in cls.sent_as})
