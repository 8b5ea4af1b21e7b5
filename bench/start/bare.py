"""The least that Ray Serve can serve: an ingress that answers all requests with the same text."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

_api = FastAPI()


@serve.ingress(_api)
class Constant:
    """Answers GET /."""

    @_api.get("/")
    async def answer(self) -> str:
        return "ok"


def build(args: dict[str, Any]) -> Application:
    """The application for a Serve config's `args`: `replicas`, and the `cpus` that each reserves."""
    deployment: serve.Deployment = serve.deployment(  # type: ignore[assignment]
        Constant, name="constant", num_replicas=args["replicas"], ray_actor_options={"num_cpus": args["cpus"]}
    )
    return deployment.bind()
