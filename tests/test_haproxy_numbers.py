"""HAProxy's numbers go on where a process that was replaced had them, and count nothing twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fake_haproxy import Haproxy, numbers

from pliant.haproxy_numbers import Look, keep, look


@pytest.fixture
def haproxy(tmp_path: Path) -> Iterator[Haproxy]:
    with Haproxy(tmp_path / "admin.sock").listening() as haproxy:
        yield haproxy


def failed(seen: Look) -> tuple[int, int]:
    """5xx of all, and of gateways."""
    return seen.numbers.answered.get("5xx", 0), seen.numbers.by_gateways.get("5xx", 0)


def test_what_serve_answers_without_a_gateway_is_not_a_gateways(haproxy: Haproxy) -> None:
    haproxy.says = numbers(front=9, gateways=2, backup=3, running=4, redispatched=5, bad=1)
    seen = look(haproxy.path)
    assert failed(seen) == (9, 2)
    assert seen.numbers.answered["4xx"] == 1
    assert (seen.running, seen.numbers.retried) == (4, 5)


def test_a_process_that_is_replaced_is_counted_on(haproxy: Haproxy) -> None:
    haproxy.says = numbers(front=9, gateways=2)
    keep(haproxy.path)
    assert failed(look(haproxy.path)) == (9, 2), "it still answers"
    keep(haproxy.path)
    haproxy.says = numbers(front=1, gateways=1, pid=2)
    assert failed(look(haproxy.path)) == (10, 3)
    keep(haproxy.path)
    haproxy.says = numbers(front=4, gateways=0, pid=3)
    assert failed(look(haproxy.path)) == (14, 3)


def test_the_first_of_all_has_nobody_to_replace(tmp_path: Path) -> None:
    keep(tmp_path / "admin.sock")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="No such file"):
        look(tmp_path / "admin.sock")


@pytest.mark.parametrize("kept", ["", "[]", "[1, 2]", "null"])
def test_numbers_that_were_damaged_begin_again(haproxy: Haproxy, kept: str) -> None:
    haproxy.path.with_name("numbers.json").write_text(kept)
    haproxy.says = numbers(front=9, gateways=2)
    assert failed(look(haproxy.path)) == (9, 2)
