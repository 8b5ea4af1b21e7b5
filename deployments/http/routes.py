"""Routes whose endpoints need nothing of FastAPI's search for their arguments."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute


class DirectRoute(APIRoute):
    """An endpoint that takes the request and parts of its path as texts, and returns a Response, is called with these.

    FastAPI's search for arguments, and its look at what is returned, are an eighth of a gateway's work for a text.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        hints = get_type_hints(endpoint)
        returned, taken = hints.pop("return", None), hints.pop("request", None)
        in_path = all(name in self.param_convertors and hint is str for name, hint in hints.items())
        if (returned, taken) != (Response, Request) or not in_path:
            return super().get_route_handler()

        async def answer(request: Request) -> Response:
            response: Response = await endpoint(request=request, **request.path_params)
            return response

        return answer
