"""Forms as clients send them, and as those do who mean harm."""

from __future__ import annotations

from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.deployments.http.form import Field, fields
from pliant.deployments.serving.outcome import Fault, RequestError

FORM = "multipart/form-data; boundary=B"


def part(disposition: str) -> bytes:
    return f"--B\r\nContent-Disposition: form-data; {disposition}\r\n\r\nx\r\n--B--".encode()


@given(content=st.binary(max_size=200), filename=st.text("aä. '\\;=", min_size=1, max_size=9))
def test_forms_bring_files_as_they_are(content: bytes, filename: str) -> None:
    request = httpx.Request("POST", "http://x", files={"file": (filename, content)}, data={"purpose": "batch"})
    found = fields(request.headers["content-type"], request.read())
    assert found["file"] == (content, filename)
    assert found["purpose"].content == b"batch"


@pytest.mark.parametrize(
    ("disposition", "filename"),
    [
        ('name="file"', None),
        ("name=file; filename=a", "a"),
        ('name="file"; filename="a \\"b\\" ;c"', 'a "b" ;c'),
        ("""name="file"; filename="plain"; filename*=UTF-8'en'%C3%A4""", "ä"),
        ("""name="file"; filename="plain"; filename*=idna''abc""", "plain"),
        ("""name="file"; filename*=unicode_escape''%5Cud800""", None),
        ("""name="file"; filename*=utf-8''%ED%A0%80""", "\ufffd" * 3),
    ],
)
def test_names_of_files(disposition: str, filename: str | None) -> None:
    assert fields(FORM, part(disposition)) == {"file": Field(b"x", filename)}


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "multipart/form-data", "multipart/form-data; boundary=", "x; boundary=B"]
)
def test_what_is_no_form_is_told(content_type: str) -> None:
    with pytest.raises(RequestError, match="sent as multipart/form-data") as refused:
        fields(content_type, part("name=file"))
    assert refused.value.fault is Fault.MEDIA_TYPE


def test_a_content_type_is_bounded() -> None:
    with pytest.raises(RequestError, match="content-type: has 4041 characters; send at most 512") as refused:
        fields(f'{FORM}; other="{";" * 4000}"', part("name=file"))
    assert refused.value.fault is None


@given(
    content_type=st.text(st.sampled_from('abound ry*0=;"\\'), max_size=400),
    disposition=st.text(st.sampled_from("name fil*=;\"\\%'"), max_size=400),
)
def test_what_is_sent_is_a_form_or_refused(content_type: str, disposition: str) -> None:
    for sent in (f"multipart/form-data;{content_type}", FORM, f"multipart/form-data; boundary*{'9' * 400}=x"):
        with suppress(RequestError):
            fields(sent, part(disposition))
