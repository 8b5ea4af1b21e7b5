"""Messages are understood by processes of other versions, in both directions: a field more, or one fewer."""

from __future__ import annotations

import dataclasses
import pickle
from collections import Counter
from collections.abc import Iterator
from copy import copy
from typing import Any

import pytest

from pliant.deployments.cascade.choice import Choice
from pliant.deployments.cascade.messages import CascadeEntry
from pliant.deployments.encoder import messages as encoder
from pliant.deployments.llm.messages import Registered
from pliant.deployments.llm.request import Generation, Piece, TokenLogprobs
from pliant.deployments.serving.messages import CatalogNews, Guidance, News, Rejected, Step
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Alive, Parcel, Refusal
from pliant.deployments.vision import messages as vision
from pliant.formats.adapter_info import AdapterRef
from pliant.formats.vision_task import TaskRef
from pliant.message import VersionError, Word, _restored

NAMED: list[type[Any]] = [
    *(encoder.Assignment, encoder.ImportanceRequest, encoder.Query, encoder.Answer),
    *(vision.Query, vision.Answer, vision.RegisteredTask, TaskRef),
    *(Registered, AdapterRef, Generation, TokenLogprobs, Piece),
    *(CascadeEntry, Choice),
    *(News, Step, Guidance, Rejected, CatalogNews, Refusal, Parcel, Alive),
]


def sent(cls: Any) -> Any:
    """A message with a value of its own in each field."""
    return cls(*range(len(cls.sent_as)))


def fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.sent_as}


def defaults(cls: Any) -> dict[str, Any]:
    """Of fields that have one."""
    if issubclass(cls, tuple):
        return dict(cls._field_defaults)
    made: Iterator[tuple[str, Any]] = (
        (field.name, field.default if field.default is not dataclasses.MISSING else field.default_factory())
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    )
    return dict(made)


@pytest.mark.parametrize("cls", NAMED, ids=lambda cls: f"{cls.__module__.split('.')[-2]}.{cls.__name__}")
def test_a_sender_with_a_field_more_and_one_with_a_field_fewer(cls: Any) -> None:
    message = sent(cls)
    assert fields(pickle.loads(pickle.dumps(message))) == fields(copy(message)) == fields(message)
    restored, (same, names, values, version) = message.__reduce__()
    assert (restored, same, names) == (_restored, cls, cls.sent_as)
    newer = _restored(cls, ("before", *names, "after"), ("?", *values, "?"), version)
    assert type(newer) is cls
    assert fields(newer) == fields(message)
    for name, default in defaults(cls).items():
        kept = {other: value for other, value in fields(message).items() if other != name}
        older = _restored(cls, tuple(kept), tuple(kept.values()), version)
        assert fields(older) == {**fields(message), name: default}


def test_what_a_message_cannot_do_without_is_named() -> None:
    with pytest.raises(VersionError, match=r"messages.Query was sent by another version of pliant, .*'length'"):
        _restored(encoder.Query, ("ids", "budget_s", "slack_share"), (b"", 1.0, 0.5), 1)


def test_what_means_something_else_is_refused() -> None:
    _, (cls, names, values, version) = Refusal("busy", "full").__reduce__()  # type: ignore[misc]
    with pytest.raises(VersionError, match=r"with version 2, and here it is 1; have all processes"):
        _restored(cls, names, values, version + 1)


def test_words_of_later_versions() -> None:
    class Newer(Word):
        ODD = "odd"
        BUSY = "busy"

    for word in (Outcome.SHED, Fault.EVICTED):
        assert pickle.loads(pickle.dumps(word)) is copy(word) is word
    restored, (_, value) = Newer.ODD.__reduce_ex__(5)
    assert restored(Fault, value) is None
    assert restored(Outcome, value) is Outcome.UNAVAILABLE
    assert restored(Newer, "busy") is Newer.BUSY


def test_messages_in_messages_and_other_values() -> None:
    query = encoder.Query(b"\0" * 8, 2, 0.5, 0.1, encoder.ImportanceRequest(1.5, 0.9))
    parcel = Parcel("replica", "gateway", (query, query._replace(length=1)))
    assert pickle.loads(pickle.dumps(parcel)) == parcel
    assert pickle.loads(pickle.dumps(News(Counter({3: 4}), shed=2))) == News(Counter({3: 4}), shed=2)
    refusal = Refusal("busy", "full", 1.0, Outcome.SHED, None, {"version": 3})
    assert pickle.loads(pickle.dumps(refusal)) == refusal
