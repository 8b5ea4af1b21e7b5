"""Requests that schemathesis makes of the OpenAPI document, right ones and wrong ones, are answered as that says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings

from pliant.bench.fuzz.house import House

schemathesis = pytest.importorskip("schemathesis", reason="`make install` installs it")

CASES = 5
"""Of each operation, and of right requests and wrong ones each."""
CHECKS = {
    "positive_data_acceptance": {"expected-statuses": ["2xx", "400", "404", "409", "422", "429"]},
    "negative_data_rejection": {"expected-statuses": ["400", "404", "405", "409", "413", "415", "422", "429"]},
}
"""All are on. Of these two, what may be said of a right request, as a model has limits that no schema tells, and of a
wrong one."""


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


def test_answers_are_as_documented(tmp_path: Path, runner: asyncio.Runner) -> None:
    app = runner.run(House(tmp_path).gateway())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    http = httpx.AsyncClient(transport=transport, base_url="http://pliant", timeout=None)
    config = schemathesis.Config.from_dict({"checks": CHECKS})
    document = schemathesis.openapi.from_dict(app.openapi(), config=config)
    sent: set[str] = set()

    def check(case: Any) -> None:
        request = requests.Request(**case.as_transport_kwargs(base_url="http://pliant")).prepare()
        answer = runner.run(
            http.request(request.method, request.url, headers=dict(request.headers), content=request.body)
        )
        case.validate_response(answer)
        sent.add(case.operation.label)

    for each in document.get_all_operations():
        operation = each.ok()
        for mode in schemathesis.GenerationMode:
            if mode is schemathesis.GenerationMode.POSITIVE or operation.body:
                _all(operation.as_strategy(generation_mode=mode), check)
    assert sent == {f"{method.upper()} {path}" for path, each in app.openapi()["paths"].items() for method in each}


def _all(cases: Any, check: Any) -> None:
    """The same ones in each run."""
    options = {"derandomize": True, "database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    settings(max_examples=CASES, phases=(Phase.generate,), **options)(given(cases)(check))()
