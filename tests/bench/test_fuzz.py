"""The fuzz campaign's short form: whatever a stranger sends is answered, and as the OpenAPI document says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from pliant.bench.fuzz.bodies import BODIES, PAGES, dump
from pliant.bench.fuzz.compare import campaign
from pliant.bench.fuzz.house import House


def test_the_campaign_s_right_requests_are_right(tmp_path: Path) -> None:
    """Else it would test little but the first check of each route."""

    async def statuses() -> set[tuple[str, int]]:
        app = await House(tmp_path).gateway()
        fuzzed = {route for route, _, _ in BODIES} | {*PAGES}
        assert {*app.openapi()["paths"]} - fuzzed == set()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://pliant") as http:
            sent = [(route, await http.post(route.format(**fill), content=dump(body))) for route, fill, body in BODIES]
        return {(route, answer.status_code) for route, answer in sent}

    found = asyncio.run(statuses())
    loading = {route for route, _, _ in BODIES if "load" in route}
    assert found == {(route, 404 if route in loading else 200) for route, _, _ in BODIES}


def test_nothing_that_is_sent_breaks_the_gateway() -> None:
    found, _ = campaign(blocks=2, count=100)
    assert [told for each in found for told in (*each.server_errors, *each.undocumented, *each.leaks)] == []
    assert sum(each.requests for each in found) == 200
    assert {200, 400, 404} <= set().union(*[each.statuses for each in found])
