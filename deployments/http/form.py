"""Forms with a file in them (multipart/form-data), as the `openai` client uploads files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from pliant.deployments.serving.outcome import Fault, Outcome, RequestError

_MOST_PARTS = 16
_MOST_HEAD = 4_096
"""Bytes of the headers of a part."""
_MOST_CONTENT_TYPE = 512
_PARAMETER = re.compile(r';\s*([^\s;="]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_ESCAPED = re.compile(r'\\(["\\])')


class Field(NamedTuple):
    """One part of a form."""

    content: bytes
    filename: str | None


def fields(content_type: str, body: bytes) -> dict[str, Field]:
    """The parts of a form by name; of several with a name, the last. Raises RequestError if `body` is no form."""
    if len(content_type) > _MOST_CONTENT_TYPE:
        reason = f"content-type: has {len(content_type)} characters; send at most {_MOST_CONTENT_TYPE}"
        raise RequestError(Outcome.REJECTED, reason)
    media, parameters = _header(content_type)
    boundary = parameters.get("boundary")
    if media != "multipart/form-data" or not boundary:
        reason = f"content-type: got {content_type[:100] or 'none'}; a file is sent as multipart/form-data"
        raise RequestError(Outcome.REJECTED, reason, fault=Fault.MEDIA_TYPE)
    found = {}
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), _MOST_PARTS)[1:]:
        head, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        if len(head) > _MOST_HEAD:
            raise RequestError(Outcome.REJECTED, f"body: a part's headers have more than {_MOST_HEAD} bytes")
        for line in head.decode(errors="replace").split("\r\n"):
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                _, parameters = _header(value)
                if "name" in parameters:
                    found[parameters["name"]] = Field(content, _filename(parameters))
    if not found:
        raise RequestError(Outcome.REJECTED, "body: has no parts; a file is sent as multipart/form-data")
    return found


def _header(text: str) -> tuple[str, dict[str, str]]:
    """What a header says, and its parameters by name; of several with a name, the first. Takes linear time."""
    parameters: dict[str, str] = {}
    for name, quoted, plain in _PARAMETER.findall(text):
        parameters.setdefault(name.lower(), _ESCAPED.sub(r"\1", quoted) or plain)
    return text.partition(";")[0].strip().lower(), parameters


def _filename(parameters: Mapping[str, str]) -> str | None:
    """As plain text, or in UTF-8 as RFC 5987 has it."""
    charset, _, encoded = parameters.get("filename*", "").partition("'")
    if charset.lower() == "utf-8":
        return unquote(encoded.partition("'")[2], errors="replace")
    return parameters.get("filename")
