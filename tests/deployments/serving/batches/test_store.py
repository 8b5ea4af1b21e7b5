"""What of files and batches stays in the storage, and what goes."""

from __future__ import annotations

import errno
from itertools import count
from pathlib import Path

import pytest

from pliant.deployments.serving.batches.store import BatchStore
from pliant.deployments.serving.outcome import RequestError
from pliant.deployments.serving.state.storage import FolderStorage

BATCHES = 128
"""Of a tenant, at most."""


class Disk(FolderStorage):
    """May be full for small files that are no content."""

    full = False

    def create(self, path: str, content: bytes) -> None:
        if self.full and not path.endswith(".content"):
            raise OSError(errno.ENOSPC, "full")
        super().create(path, content)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path, make=True)


@pytest.fixture
def store(disk: Disk) -> BatchStore:
    seconds = count(10**9)
    return BatchStore(disk, lambda: float(next(seconds)))


def test_a_file_that_cannot_be_kept_leaves_nothing(store: BatchStore, disk: Disk) -> None:
    disk.full = True
    with pytest.raises(OSError, match="full"):
        store.add_file("a", "f", "batch", b"{}")
    assert disk.names("batches/files") == []


def test_what_a_batch_wrote_goes_with_it_even_if_a_gateway_died_over_it(store: BatchStore, disk: Disk) -> None:
    first = store.add_batch("a", "/v1/embeddings", "file", 1, None).batch
    store.add_part(first, 0, ['{"response":{"status_code":200}}'], 0)
    disk.full = True
    with pytest.raises(OSError, match="full"):
        store.finish(first, "completed")
    disk.full = False
    store.add_file("a", f"{first.id}_output.jsonl", "batch_output", b"by a gateway that died")
    mine = store.add_file("a", f"{first.id}_output.jsonl", "batch", b"a client's")
    store.finish(first, "completed")
    assert len(store.files("a")) == 3
    for _ in range(BATCHES):
        store.add_batch("a", "/v1/embeddings", "file", 1, None)
    with pytest.raises(RequestError, match="there is no batch"):
        store.batch("a", first.id)
    assert store.files("a") == [mine]
