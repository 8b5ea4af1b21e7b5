"""The benchmark of several processes that compute one model: it finds equal answers, and those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.caches import with_libraries
from torch import Tensor

from pliant.bench.adapters.folders import folders
from pliant.bench.llm import ranks
from pliant.bench.llm.checkpoints import checkpoint
from pliant.formats.adapter_info import read_adapter
from pliant.kernels.decoder.kv_pages import PAGE
from pliant.kernels.decoder.ranks import Ranks
from pliant.models.sources import describe_decoder

REQUESTS = 24


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_libraries(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(cache))
    monkeypatch.setattr(ranks, "COUNTS", (2,))


def answers_equal() -> float:
    done: list[None] = []
    [figure] = ranks.answers_equal(REQUESTS, lambda: done.append(None))
    assert figure.name == "tp2_answers_equal"
    assert len(done) == 2
    return figure.value


def test_two_ranks_answer_a_mixture_as_one_does() -> None:
    assert answers_equal() == 1


def test_ranks_that_add_up_wrongly_show(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up = Ranks.add_up

    def add_half_as_much_again(self: Ranks, x: Tensor) -> None:
        add_up(self, x)
        x *= 1.5

    monkeypatch.setattr(Ranks, "add_up", add_half_as_much_again)
    assert answers_equal() < 1


def test_in_the_mixture_are_common_beginnings_and_adapters() -> None:
    folder = checkpoint(ranks.TINY, "float32")
    shape = describe_decoder(folder).shape
    adapters = [read_adapter(path, shape).ref(path.name) for path in folders(ranks.TINY, (4, 8), "float32")]
    requests = ranks.mixture(REQUESTS, adapters)
    assert {request.adapter for request in requests} == {None, *adapters}
    beginnings = [request.prompt[:PAGE] for request in requests]
    assert 1 < len(set(beginnings)) < len(beginnings) - REQUESTS // 4
