"""Forms with a file in them (multipart/form-data), as the `openai` client uploads files."""

from __future__ import annotations

from email.message import Message
from email.parser import BytesHeaderParser
from typing import NamedTuple

from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

_MOST_PARTS = 16
_MOST_HEAD = 4_096
"""Bytes of the headers of a part."""


class Field(NamedTuple):
    """One part of a form."""

    content: bytes
    filename: str | None


def fields(content_type: str, body: bytes) -> dict[str, Field]:
    """The parts of a form by name; of several with a name, the last. Raises RequestError if `body` is no form."""
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_param("boundary")
    if head.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        reason = f"content-type: got {content_type[:100] or 'none'}; a file is sent as multipart/form-data"
        raise RequestError(Outcome.REJECTED, reason, fault=Fault.MEDIA_TYPE)
    found = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary.encode(), _MOST_PARTS)[1:]:
        headers, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if len(headers) > _MOST_HEAD:
            raise RequestError(Outcome.REJECTED, f"body: a part's headers have more than {_MOST_HEAD} bytes")
        of = BytesHeaderParser().parsebytes(headers)
        name = of.get_param("name", header="content-disposition")
        if isinstance(name, str):
            found[name] = Field(content, of.get_filename())
    if not found:
        raise RequestError(Outcome.REJECTED, "body: has no parts; a file is sent as multipart/form-data")
    return found
