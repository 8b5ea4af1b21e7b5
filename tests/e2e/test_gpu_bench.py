"""The clients of the bench of a GPU's first day, on services of each kind."""

from __future__ import annotations

import asyncio
from pathlib import Path

from e2e.cluster import Cluster
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.serving import Services, Work, measure

NEEDS = ("topics-small", "digits", "chat")


def test_each_kind_is_measured(cluster: Cluster, tmp_path: Path) -> None:
    record = Record(tmp_path / "serving.json", "serving", "a test", {})
    work = Work(texts=16, images=16, side=8, prompt=4, answer=3, streams=(1, 2))
    services = Services("topics-small", "digits?task=digit", "chat")
    asyncio.run(measure(record, cluster.address, work, services))
    assert record.figures.keys() == {"texts_per_s", "images_per_s", "tokens_per_s"}
    assert all(value > 0 for table in record.tables.values() for value in table.values())
