"""The `parameters` object that every protocol carries."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pliant.deployments.http.body import LARGE, check_json
from pliant.deployments.serving.outcome import Outcome, RequestError

M = TypeVar("M", bound=BaseModel)

_MOST_PROBLEMS = 100
"""That pydantic is asked about: it makes an object of each."""


class TextParameters(BaseModel):
    """How a request of texts wants to be treated, whatever is made of them."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    """Refuse the request at once if its answer would take longer; without it, the service's own objective."""
    utility: Annotated[float, Field(ge=0, le=1)] = 1.0
    """What the answer is worth: under load, requests of low utility are refused first."""


class ClassifyParameters(TextParameters):
    """Of a classifier of texts."""

    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many labels to answer with, the likeliest first; without it, all."""
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    """What turns logits into scores; without it, what suits the model's problem type."""
    details: bool = False
    """Tell with each answer which level of a cascade gave it, how sure it is, and how many words it did not read."""
    candidate_labels: Annotated[list[str], Field(min_length=1, max_length=1_000, fail_fast=True)] | None = None
    """Label texts with these, which a model of natural language inference need not have seen before."""
    hypothesis_template: Annotated[str, Field(pattern=r"\{\}", max_length=1_000)] = "This example is {}."
    """What such a model is asked about each label, which takes the place of {}."""
    multi_label: bool = False
    """Whether several of these labels may be true of a text, so that each stands for itself."""


class EmbedParameters(TextParameters):
    """Of a model that makes a vector of each text."""

    normalize: bool | None = None
    """Whether to give vectors the length 1; without it, as the model says."""
    prompt_name: str | None = None
    """Which of the model's prompts goes before each text; without it, the model's default, if it has one."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """How many numbers of each vector to answer with, the first ones; without it, all."""
    truncate: bool | None = None
    """Whether to cut a text that is too long; without it, as the service is configured."""


class TagParameters(TextParameters):
    """Of a model that labels the tokens of a text, as transformers' pipeline has them."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "none"
    """What puts tokens together."""
    ignore_labels: Annotated[list[str], Field(max_length=1_000, fail_fast=True)] = ["O"]
    """Labels to leave out."""


class VisionParameters(BaseModel):
    """How an image classification request wants to be treated."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    task: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """What the images are classified for; without it, the service's only task, or else the model's own."""
    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    """By when an answer is worth something; without it, the service's objective, or else the task's."""
    utility: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """What a right answer until then is worth, compared with others; without it, as above."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many labels to answer with, the likeliest first; without it, all."""
    function_to_apply: Literal["softmax", "sigmoid", "none"] = "softmax"
    """What turns logits into scores."""


def validated(model: type[M], content: Any) -> M:
    """`content` as a `model`. Raises RequestError that names each wrong key, what was given and what is allowed."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise RequestError(Outcome.REJECTED, explain(error, model)) from None


def validated_json(model: type[M], body: bytes) -> M:
    """The JSON `body` as a `model`. Raises RequestError."""
    check_json(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(Outcome.REJECTED, explain(error, model, len(body))) from None


def problems(error: ValidationError, size: int = 0) -> list[ErrorDetails]:
    """What is wrong in a body of `size` bytes, without what was given if that is much; none if there is too much."""
    if error.error_count() > _MOST_PROBLEMS:
        return []
    return error.errors(include_url=False, include_context=False, include_input=size <= LARGE)


def too_many(error: ValidationError, model: type[BaseModel]) -> str:
    """What to say where `problems` are too many; the keys that must be there come first."""
    known = sorted(model.model_fields, key=lambda name: not model.model_fields[name].is_required())
    return f"body: {error.error_count()} of its keys and values are wrong; known keys: {', '.join(known)}"


def given(problem: ErrorDetails) -> str:
    """What to say of the value that is a `problem`."""
    if "input" not in problem:
        return ""
    text = repr(problem["input"])
    return f"got {text if len(text) <= 60 else text[:57] + '...'}; "


def explain(error: ValidationError, model: type[BaseModel], size: int = 0) -> str:
    """What is wrong with a body of `size` bytes that was to be a `model`."""
    found = problems(error, size)
    return "; ".join(_line(problem, model) for problem in found[:5]) or too_many(error, model)


def _line(problem: ErrorDetails, model: type[BaseModel]) -> str:
    key = ".".join(map(str, problem["loc"])) or "body"
    if problem["type"] == "extra_forbidden":
        inner: Any = None if len(problem["loc"]) == 1 else model.model_fields[str(problem["loc"][0])].annotation
        allowed: type[BaseModel] = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else model
        return f"{key}: unknown; allowed: {', '.join(allowed.model_fields)}"
    if problem["type"] in ("missing", "json_invalid"):
        return f"{key}: {problem['msg']}"
    return f"{key}: {given(problem)}{problem['msg']}"
