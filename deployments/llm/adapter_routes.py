"""Loading and unloading LoRA adapters at run time, by vLLM's endpoints: /v1/load_lora_adapter, /v1/unload_lora_adapter.

As there, success is plain text. An adapter that was loaded may be named in `model` at once, in every gateway.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from pliant.deployments.http.body import read_body
from pliant.deployments.http.openai_schemas import LoadAdapterRequest, UnloadAdapterRequest, parsed
from pliant.deployments.http.openapi import json_body
from pliant.deployments.llm.adapter_follower import AdapterFollower
from pliant.deployments.serving.outcome import Outcome, RequestError
from pliant.deployments.serving.tenants import current


def router(adapters: AdapterFollower | None, max_body: int) -> APIRouter:
    """The routes over `adapters`, None if no language model takes any. `max_body` is in bytes."""
    api = APIRouter(prefix="/v1", tags=["LoRA adapters"], default_response_class=PlainTextResponse)

    def registry() -> AdapterFollower:
        current().check("manage")
        if adapters is None:
            raise RequestError(
                Outcome.REJECTED, "no language model here takes adapters; give one `adapters` in cluster.yaml"
            )
        return adapters

    @api.post("/load_lora_adapter", openapi_extra=json_body(LoadAdapterRequest))
    async def load(request: Request) -> str:
        known = registry()
        call = parsed(LoadAdapterRequest, await read_body(request, max_body))
        await known.load(call.lora_name, call.lora_path, call.base_model_name, call.load_inplace)
        return f"Success: LoRA adapter '{call.lora_name}' added successfully."

    @api.post("/unload_lora_adapter", openapi_extra=json_body(UnloadAdapterRequest))
    async def unload(request: Request) -> str:
        known = registry()
        call = parsed(UnloadAdapterRequest, await read_body(request, max_body))
        await known.unload(call.lora_name)
        return f"Success: LoRA adapter '{call.lora_name}' removed successfully."

    return api
