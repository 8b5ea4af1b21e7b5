"""Bodies of OpenAI's text endpoints: what is understood, what is accepted without effect, and what is refused.

A parameter that would change the answer and is not implemented is refused by name, unless it has the value that means
"without"; an unknown one is refused, too.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from pliant.deployments.http.body import check_json
from pliant.deployments.http.openai_body import FIELDS, VLLM, Body, Neutral, VllmParameters
from pliant.deployments.http.openai_messages import Message, ToolRequest
from pliant.deployments.http.openai_structured import BoundRequest
from pliant.deployments.http.parameters import given, problems, too_many
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.sampling import MOST_LOGPROBS, MOST_PENALTY

M = TypeVar("M", bound=Body)

_MOST_CHOICES = 16
MOST_MESSAGES = 4_096
_MOST_STOPS = 16
_MOST_STOP_CHARACTERS = 256
_MOST_BIASES = 1_024
_MOST_BAD_WORDS = 256
_INT64 = 2**63


Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
Lists = Annotated[list[Ids], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1, max_length=_MOST_STOP_CHARACTERS)]
Penalty = Annotated[float, Field(ge=-MOST_PENALTY, le=MOST_PENALTY)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MOST_BIASES)]


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Padding of chunks against traffic analysis: accepted, without effect."""


class GenerationRequest(BoundRequest, VllmParameters):
    """What both endpoints take. What is not of OpenAI is of vLLM, and called and meant as there."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Sample from the likeliest tokens only; 0 and -1 mean all. Not of OpenAI, but of most servers."""
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    """The same seed gives the same answer; the i-th choice is sampled with seed + i."""
    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] | None = None
    stop: Annotated[list[Stop], Field(max_length=_MOST_STOPS, fail_fast=True)] | Stop | None = None
    ignore_eos: bool = False
    """Go on to max_tokens. Not of OpenAI, but of most servers; for load tests."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    presence_penalty: Penalty | None = None
    """Taken from the logits of tokens that the answer has."""
    frequency_penalty: Penalty | None = None
    """The same, for each time."""
    repetition_penalty: Annotated[float, Field(gt=0, le=1e4)] | None = None
    """Makes tokens of prompt and answer so many times less likely."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from tokens that have at least this share of the likeliest one's probability."""
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sample from the tokens of most typical information that together have this probability. Of transformers."""
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=_MOST_BIASES)] | None
    ) = None
    """By token id: what is added to its logit."""
    stop_token_ids: Annotated[list[Token], Field(max_length=_MOST_STOPS, fail_fast=True)] | None = None
    """The answer ends with the first of these, whose text is left out."""
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """The answer does not end before, but for `max_tokens` or its grammar."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Log-probabilities of the prompt's tokens, and of so many of the likeliest alternatives."""
    bad_words: Annotated[list[Stop], Field(max_length=_MOST_BAD_WORDS, fail_fast=True)] | None = None
    """Texts whose tokens the answer does not have one after another."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> GenerationRequest:
        if self.stream_options and not self.stream:
            raise RequestError(
                Outcome.REJECTED, "stream_options: only allowed with stream: true", param="stream_options"
            )
        if self.stream and self.prompt_logprobs is not None:
            reason = "prompt_logprobs: not with stream: true; leave one of them out"
            raise RequestError(Outcome.REJECTED, reason, param="prompt_logprobs")
        return self

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Raises RequestError for what is no token id."""
        try:
            return tuple((int(token), value) for token, value in (self.logit_bias or {}).items())
        except ValueError as error:
            reason = f"logit_bias: {error}; its keys are token ids"
            raise RequestError(Outcome.REJECTED, reason, param="logit_bias") from None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def prompt_alternatives(self) -> int | None:
        """How many alternatives to each token of a prompt are to be computed; None for no log-probabilities of it."""
        return self.prompt_logprobs

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 asks for the prompt alone."""
    prompt: str | Ids | Texts | Lists
    """A text, its token ids, or a list of either."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Log-probabilities of the tokens, and of so many of the likeliest alternatives."""
    echo: bool | None = None
    """Answer with the prompt in front, with `logprobs` with those of its tokens, too."""
    suffix: Annotated[Any, Neutral(("",))] = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _possible(self) -> CompletionRequest:
        if self.best_of not in (None, self.choices):
            raise RequestError(
                Outcome.REJECTED, f"best_of: got {self.best_of}; only n, {self.choices}, is supported", param="best_of"
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            reason = "max_tokens: got 0, and nothing is asked of the prompt; send echo or prompt_logprobs, or 1 or more"
            raise RequestError(Outcome.REJECTED, reason, param="max_tokens")
        return self

    @property
    def prompt_alternatives(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def question(self) -> str:
        """By which a route chooses who answers. Raises RequestError."""
        match self.prompt:
            case str(text) | [str(text)]:
                return text
        reason = "prompt: a route takes one text a request; send that, or name the model that is to answer"
        raise RequestError(Outcome.REJECTED, reason, param="prompt")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class ChatRequest(GenerationRequest, ToolRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    prediction: Any = None
    """Of the hosted service, for speed: accepted, without effect."""
    modalities: Annotated[Any, Neutral((["text"],))] = None
    functions: Annotated[Any, Neutral(([],))] = None
    function_call: Annotated[
        Any,
        Neutral(
            (
                "none",
                "auto",
            )
        ),
    ] = None
    audio: Annotated[Any, Neutral()] = None
    web_search_options: Annotated[Any, Neutral()] = None
    reasoning_effort: Annotated[Any, Neutral()] = None
    verbosity: Annotated[Any, Neutral()] = None

    chat_template_kwargs: dict[str, Any] | None = None
    """What the model's chat template is given beside the conversation, such as enable_thinking. Of vLLM."""

    @model_validator(mode="after")
    def _possible(self) -> ChatRequest:
        if self.bound and self.must_call:
            reason = f"tool_choice: binds the answer to calls, and {self.bound} to something else; send one"
            raise RequestError(Outcome.REJECTED, reason, param="tool_choice")
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(Outcome.REJECTED, "top_logprobs: only allowed with logprobs: true", param="top_logprobs")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            reason = (
                f"max_tokens: got {self.max_tokens}, and max_completion_tokens {self.max_completion_tokens}; send one"
            )
            raise RequestError(Outcome.REJECTED, reason, param="max_tokens")
        return self

    @property
    def question(self) -> str:
        """By which a route chooses who answers: what the user said last."""
        said = [message.text for message in self.messages if message.role == "user"]
        return said[-1] if said else self.messages[-1].text

    @property
    def alternatives(self) -> int | None:
        """How many alternatives to each token are asked for; None for no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Body):
    """Body of POST /tokenize, of vLLM: a prompt or a conversation."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
                {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
            ]
        }
    )

    model: str | None = None
    """Needed only if there are several."""
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    """Of a prompt: with those that the tokenizer adds."""
    add_generation_prompt: Annotated[Any, Neutral((True,), VLLM)] = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _possible(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError(Outcome.REJECTED, "prompt: send a prompt or messages, one of them", param="prompt")
        return self


class DetokenizeRequest(Body):
    """Body of POST /detokenize, of vLLM."""

    model: str | None = None
    """Needed only if there are several."""
    tokens: Annotated[list[Token], Field(max_length=2**20, fail_fast=True)]


class LoadAdapterRequest(Body):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False
    """Replace the adapter of this name, if there is one."""
    base_model_name: str | None = None
    """The language model to adapt; needed only if the adapter fits several."""


class UnloadAdapterRequest(Body):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Of vLLM: accepted, without effect."""


_WANTED = {
    "input": "must be a text or a list of items, of which there is at least one",
    "content": "must be a text, or a list of parts {type: text, text: ...}",
    "tool_choice": "must be none, auto, required, or {type: function, function: {name: ...}}",
    "stop": f"must be a text, or a list of at most {_MOST_STOPS}, each of 1 to {_MOST_STOP_CHARACTERS} characters",
}
"""What is said of parameters that may be of several types."""
_TEXTS = "must be a text, its token ids, or a list of either; none may be empty"


def parsed(model: type[M], body: bytes) -> M:
    """The JSON `body` as a `model`. Raises RequestError that names the parameter that is wrong."""
    check_json(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        found = problems(error, len(body))
        if not found:
            raise RequestError(Outcome.REJECTED, too_many(error, model)) from None
        raise _refusal(max(found, key=lambda problem: len(problem["loc"])), model) from None


def _refusal(problem: ErrorDetails, model: type[Body]) -> RequestError:
    if not problem["loc"]:
        return RequestError(Outcome.REJECTED, f"body: {problem['msg']}")
    extra = problem["type"] == "extra_forbidden"
    # Pydantic puts the type that was tried beside the fields.
    loc = [part for part in problem["loc"] if extra or isinstance(part, int) or part in FIELDS]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    if extra:
        allowed = f"; known: {', '.join(model.model_fields)}" if len(loc) == 1 else ""
        return RequestError(
            Outcome.REJECTED, f"{param}: unknown parameter{allowed}", fault=Fault.UNKNOWN_PARAMETER, param=param
        )
    if problem["type"] == "missing":
        return RequestError(
            Outcome.REJECTED, f"{param}: missing; it must be given", fault=Fault.MISSING_PARAMETER, param=param
        )
    if loc[0] in model.plain:
        return RequestError(Outcome.REJECTED, f"{loc[0]}: {given(problem)}{_TEXTS}", param=str(loc[0]))
    wanted = _WANTED.get(str(loc[-1]), problem["msg"].removeprefix("Value error, "))
    return RequestError(Outcome.REJECTED, f"{param}: {given(problem)}{wanted}", param=param)
