"""Folders on object storage: what was pinned is what every node has, within bounds, or an error says why not."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pliant.models import remote

NAMES = ("config", "weights")


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    made = f"memory://bucket/{tmp_path.name}/sql"
    for name in NAMES:
        put(made, name, b"first")
    return made


def put(url: str, name: str, content: bytes) -> None:
    files, path = fsspec.core.url_to_fs(f"{url}/{name}")
    files.pipe(path, content)


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in NAMES]


def test_only_what_is_named_is_fetched_and_only_once(url: str) -> None:
    put(url, "optimizer.pt", b"large")
    pinned = remote.pinned(url, NAMES)
    local = remote.fetched(pinned, NAMES, 100)
    assert content(local) == [b"first", b"first"]
    assert sorted(file.name for file in local.iterdir() if not file.name.startswith(".")) == list(NAMES)
    fsspec.core.url_to_fs(url)[0].rm(url, recursive=True)
    assert remote.fetched(pinned, NAMES, 100) == local


def test_another_state_is_another_folder(url: str) -> None:
    first = remote.pinned(url, NAMES)
    old = remote.fetched(first, NAMES, 100)
    assert remote.pinned(first, NAMES) == first
    put(url, "weights", b"second")
    second = remote.pinned(first, NAMES)
    assert second != first
    assert remote.unpinned(second) == remote.unpinned(first) == url
    assert content(remote.fetched(second, NAMES, 100)) == [b"first", b"second"]
    assert content(old) == [b"first", b"first"]


def test_another_node_fetches_for_itself(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pinned = remote.pinned(url, NAMES)
    here = remote.fetched(pinned, NAMES, 100)
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "other"))
    there = remote.fetched(pinned, NAMES, 100)
    assert here != there
    assert content(here) == content(there)


def test_what_is_too_large_is_not_fetched(url: str) -> None:
    put(url, "weights", bytes(3 * 2**20))
    with pytest.raises(ValueError, match=r"has 3\.0 MB; at most 1\.0"):
        remote.fetched(remote.pinned(url, NAMES), NAMES, 2**20)


def test_what_is_missing_is_said(url: str) -> None:
    fsspec.core.url_to_fs(url)[0].rm(f"{url}/weights")
    with pytest.raises(ValueError, match="has not all files"):
        remote.pinned(url, NAMES)
    with pytest.raises(ValueError, match="has not all files"):
        remote.fetched(f"{url}#0", NAMES, 100)


@pytest.mark.parametrize("wrong", ["nosuch://bucket/a", "http://127.0.0.1:1/a"])
def test_a_storage_that_cannot_be_read_is_said(url: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be fetched \(|has not all files"):
        remote.pinned(wrong, NAMES)


@pytest.mark.parametrize("below", ["s3://b/adapters/sql", "s3://b/adapters/team/sql", "s3://b/adapters/sql#12"])
@pytest.mark.parametrize("root", ["s3://b/adapters", "s3://b/adapters/"])
def test_a_folder_below_a_root(below: str, root: str) -> None:
    assert remote.is_below(below, root)


parts = st.sampled_from(["", ".", "..", "adapters", "sql", "b", "#", "s3:", "x::zip"])


@given(st.lists(parts, max_size=6).map("/".join))
def test_nothing_leads_out_of_a_root(rest: str) -> None:
    url = f"s3://b/adapters/{rest}"
    plain = all(part not in ("", ".", "..", "x::zip") for part in rest.partition("#")[0].split("/"))
    assert remote.is_below(url, "s3://b/adapters") == plain
    assert not remote.is_below(url, "s3://b/other")
    assert not remote.is_below(f"s3://b/adapters-of-others/{rest}", "s3://b/adapters")


@pytest.mark.parametrize(
    "rest", ["%2e%2e/x", ".%2E/x", "..%2fx", "%2E/x", "a/.\t./x", "a?b", "a%3fb", "..\\x", "a%5c..%5cx"]
)
def test_nothing_leads_out_of_a_root_in_disguise(rest: str) -> None:
    assert not remote.is_below(f"https://h/adapters/{rest}", "https://h/adapters")


def test_a_folder_may_have_percents_in_its_name() -> None:
    assert remote.is_below("https://h/adapters/my%20own/a..b", "https://h/adapters")
