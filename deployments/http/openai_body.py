"""What bodies of OpenAI's endpoints are made of: strict models, and parameters that are known and not supported."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

FIELDS: set[str] = set()
"""The names of all parameters of all bodies."""


class Body(BaseModel):
    """What all have in common."""

    plain: ClassVar[Collection[str]] = ("prompt", "input")
    """Parameters that are a text or token ids or several of either: of one that is wrong, errors say only this."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        FIELDS.update(field.alias or name for name, field in cls.model_fields.items())


@dataclass(frozen=True)
class Neutral:
    """Of a parameter that is not supported: only what means "without" is allowed, null or one of `others`."""

    others: Sequence[Any] = ()
    of: str = ""
    """Whose parameter it is, if not OpenAI's."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"enum": [None, *self.others]}

    def _check(self, value: Any) -> Any:
        if not any(type(value) is type(neutral) and value == neutral for neutral in (None, *self.others)):
            whose = f"{self.of} has it, and it is " if self.of else ""
            raise ValueError(f"{whose}not supported here; leave it out")
        return value


VLLM = "vLLM"


class VllmParameters(Body):
    """What vLLM takes beside OpenAI's parameters, and is not supported. Some clients send what means "without"."""

    use_beam_search: Annotated[Any, Neutral((False,), VLLM)] = None
    length_penalty: Annotated[Any, Neutral((1.0, 1), VLLM)] = None
    skip_special_tokens: Annotated[Any, Neutral((True,), VLLM)] = None
    spaces_between_special_tokens: Annotated[Any, Neutral((True,), VLLM)] = None
    include_stop_str_in_output: Annotated[Any, Neutral((False,), VLLM)] = None
    allowed_token_ids: Annotated[Any, Neutral(([],), VLLM)] = None
    truncate_prompt_tokens: Annotated[Any, Neutral((), VLLM)] = None
    add_special_tokens: Annotated[Any, Neutral((), VLLM)] = None
    prompt_embeds: Annotated[Any, Neutral((), VLLM)] = None
    priority: Annotated[Any, Neutral((0,), VLLM)] = None
    request_id: Annotated[Any, Neutral((), VLLM)] = None
    return_tokens_as_token_ids: Annotated[Any, Neutral((False,), VLLM)] = None
    return_token_ids: Annotated[Any, Neutral((False,), VLLM)] = None
    cache_salt: Annotated[Any, Neutral((), VLLM)] = None
    kv_transfer_params: Annotated[Any, Neutral((), VLLM)] = None
    vllm_xargs: Annotated[Any, Neutral(({},), VLLM)] = None
    logits_processors: Annotated[Any, Neutral(([],), VLLM)] = None
    guided_decoding_backend: Annotated[Any, Neutral((), VLLM)] = None
    guided_whitespace_pattern: Annotated[Any, Neutral((), VLLM)] = None
    structural_tag: Annotated[Any, Neutral((), VLLM)] = None
    add_generation_prompt: Annotated[Any, Neutral((True,), VLLM)] = None
    continue_final_message: Annotated[Any, Neutral((False,), VLLM)] = None
    documents: Annotated[Any, Neutral(([],), VLLM)] = None
    chat_template: Annotated[Any, Neutral((), VLLM)] = None
    mm_processor_kwargs: Annotated[Any, Neutral(({},), VLLM)] = None
    media_io_kwargs: Annotated[Any, Neutral(({},), VLLM)] = None
    include_reasoning: Annotated[Any, Neutral((True,), VLLM)] = None
    repetition_detection: Annotated[Any, Neutral((), VLLM)] = None
    thinking_token_budget: Annotated[Any, Neutral((), VLLM)] = None
