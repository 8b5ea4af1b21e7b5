"""The fuzz campaign's short form: whatever a stranger sends is answered, and as the OpenAPI document says."""

from __future__ import annotations

import asyncio
import base64
import random
from pathlib import Path

import httpx
from hypothesis import strategies as st
from PIL import Image
from support.images import encoded

from pliant.bench.fuzz.bodies import BODIES, MOST_BYTES, PAGES, Request, dump
from pliant.bench.fuzz.campaign import Campaign
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


def test_no_request_with_images_takes_more_than_64_mb(tmp_path: Path) -> None:
    """One with the largest image that is read, a quick one beside it, and as many bytes as a body may have."""
    large, quick = (encoded(Image.new("RGB", (side, side), "teal")) for side in (3200, 1440))
    noise = encoded(Image.frombytes("RGB", (960, 960), random.Random(0).randbytes(960 * 960 * 3)), compress_level=0)
    data = [base64.b64encode(each).decode() for each in (large, quick, noise)]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(data)], "data": data}
    body = dump({"inputs": [tensor], "parameters": {"task": "model", "slo_ms": 600_000}})
    assert 0.8 * MOST_BYTES < len(body) < MOST_BYTES
    address = "/v2/models/digits/infer"
    with asyncio.Runner() as runner:
        campaign = Campaign(runner.run(House(tmp_path).gateway()), tmp_path, runner)
        found = campaign.block(st.just(Request("POST", address, address, body)), 2, 0)
    assert found.statuses == {200: 1}
    assert found.peak_mb < 64
