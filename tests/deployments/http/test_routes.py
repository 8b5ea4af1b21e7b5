"""Endpoints that need nothing of FastAPI's search for arguments are called without it; others are called as ever."""

from __future__ import annotations

import pytest
from fastapi import APIRouter, FastAPI, Request, Response, routing
from fastapi.dependencies import utils as dependencies
from fastapi.testclient import TestClient

from pliant.deployments.http.routes import DirectRoute


@pytest.fixture
def client() -> TestClient:
    api = APIRouter(route_class=DirectRoute)

    @api.get("/direct/{name}/{part}")
    async def direct(request: Request, name: str, part: str) -> Response:
        return Response(f"{name} {part} {request.query_params.get('more', '')}")

    @api.get("/number/{number}")
    async def number(request: Request, number: int) -> Response:
        return Response(str(number + 1))

    @api.get("/query")
    async def query(request: Request, wanted: str = "none") -> Response:
        return Response(wanted)

    @api.get("/object")
    async def found(request: Request) -> dict[str, str]:
        return {"path": request.url.path}

    app = FastAPI()
    app.router.routes.extend(api.routes)
    return TestClient(app)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/direct/a/b?more=c", "a b c"),
        ("/direct/a%20b/c", "a b c "),
        ("/number/3", "4"),
        ("/query?wanted=x", "x"),
        ("/object", '{"path":"/object"}'),
    ],
)
def test_each_gets_what_it_asks_for(client: TestClient, path: str, answer: str) -> None:
    assert client.get(path).text == answer


def test_what_is_no_number_is_refused(client: TestClient) -> None:
    assert client.get("/number/x").status_code == 422


def test_only_what_needs_no_search_is_called_without(monkeypatch: pytest.MonkeyPatch, client: TestClient) -> None:
    searched: list[str] = []
    solve = dependencies.solve_dependencies

    async def noted(**given: object) -> object:
        searched.append(given["request"].url.path)  # type: ignore[attr-defined]
        return await solve(**given)  # type: ignore[arg-type]

    monkeypatch.setattr(routing, "solve_dependencies", noted)
    for path in ("/direct/a/b", "/number/3", "/query", "/object"):
        client.get(path)
    assert searched == ["/number/3", "/query", "/object"]
