"""Messages are understood by processes of other versions, in both directions: a field more, or one fewer."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import io
import pickle
from collections import Counter
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest

import pliant
from pliant.deployments.encoder import messages as encoder
from pliant.deployments.llm.request import Generation
from pliant.deployments.serving.messages import News
from pliant.deployments.serving.outcome import Fault, Outcome
from pliant.deployments.serving.parcels import Parcel, Refusal
from pliant.deployments.serving.tenants import Tenant
from pliant.deployments.vision import messages as vision
from pliant.formats.adapter_info import AdapterRef
from pliant.formats.vision_task import TaskRef
from pliant.message import VersionError, Word, _restored
from pliant.sampling import Sampling

SOURCES = Path(pliant.__file__).parent


def messages() -> Iterator[type[Any]]:
    """All classes that the sources decorate so."""
    for file in (
        sorted((SOURCES / "deployments").rglob("*.py"))
        + sorted(SOURCES.glob("*.py"))
        + sorted((SOURCES / "formats").glob("*.py"))
    ):
        for part in ast.parse(file.read_text()).body:
            if isinstance(part, ast.ClassDef) and any(ast.unparse(each) == "message" for each in part.decorator_list):
                module = importlib.import_module(".".join(("pliant", *file.relative_to(SOURCES).with_suffix("").parts)))
                yield getattr(module, part.name)


MESSAGES = list(messages())


class Newer(pickle.Pickler):
    """Of a version that adds fields to every message."""

    def reducer_override(self, message: Any) -> Any:
        if type(message) not in MESSAGES:
            return NotImplemented
        restored, (cls, names, values, version) = message.__reduce__()
        return restored, (cls, ("before", *names, "after"), ("?", *values, "?"), version)


class Older(pickle.Pickler):
    """Of a version that knows no fields but those that every message must have."""

    def reducer_override(self, message: Any) -> Any:
        if type(message) not in MESSAGES:
            return NotImplemented
        restored, (cls, names, values, version) = message.__reduce__()
        known = {name: value for name, value in zip(names, values, strict=True) if name not in defaults(cls)}
        return restored, (cls, tuple(known), tuple(known.values()), version)


def sent_by(version: type[pickle.Pickler], message: Any) -> Any:
    """`message`, as this version understands it."""
    into = io.BytesIO()
    version(into).dump(message)
    return pickle.loads(into.getvalue())


def sent(cls: Any) -> Any:
    """A message with a value of its own in each field."""
    if cls is Sampling:
        return Sampling(0.5, 9, 0.9, 3, 2, 0.1, 0.8, 1.0, -1.0, 1.5, ((5, 1.0),), 4, (7,))
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


def test_messages_are_found() -> None:
    assert {Sampling, AdapterRef, TaskRef, Tenant, Refusal, encoder.Query, vision.Query, Generation} <= {*MESSAGES}


@pytest.mark.parametrize("cls", MESSAGES, ids=lambda cls: f"{cls.__module__.split('.')[-2]}.{cls.__name__}")
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


@pytest.mark.parametrize(
    "query",
    [
        Generation("g", (1, 2), 8, Sampling(temperature=0.0, min_p=0.5), generated=(3,), tenant=Tenant("acme", 2.0)),
        encoder.Query(b"\0" * 8, 2, 0.5, 0.1, encoder.ImportanceRequest(1.5, 0.9), Tenant("acme", 2.0), b"\0\1"),
        vision.Query(b"pixels", TaskRef("digits", "/digits", "1", 10, (2,)), 0.5, 1.0, Tenant("acme", 2.0)),
    ],
    ids=lambda query: type(query).__module__.split(".")[-2],
)
def test_what_gateways_send_while_a_cluster_is_upgraded(query: Any) -> None:
    parcel = Parcel("replica", "gateway", (query,))
    assert sent_by(Newer, parcel) == parcel
    [older] = sent_by(Older, parcel).queries
    assert fields(older) == {**fields(query), **defaults(type(query)), **_understood(query)}


def _understood(query: Any) -> dict[str, Any]:
    """Messages in a `query` that it must have, as an older version sends them."""
    must = {name: getattr(query, name) for name in query.sent_as if name not in defaults(type(query))}
    return {name: sent_by(Older, value) for name, value in must.items()}


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
