"""The `parameters` object that every protocol carries."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pliant.deployments.serving.outcome import Outcome, RequestError

M = TypeVar("M", bound=BaseModel)


class ClassifyParameters(BaseModel):
    """How a classification request wants to be treated."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    slo_ms: Annotated[float, Field(gt=0, le=3_600_000)] | None = None
    """Refuse the request at once if its answer would take longer; without it, the service's own objective."""
    utility: Annotated[float, Field(ge=0, le=1)] = 1.0
    """What the answer is worth: under load, requests of low utility are refused first."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """How many labels to answer with, the likeliest first; without it, all."""
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    """What turns logits into scores; without it, what suits the model's problem type."""
    details: bool = False
    """Tell with each answer which level of a cascade gave it, how sure it is, and how many words it did not read."""


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
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(Outcome.REJECTED, explain(error, model)) from None


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    return "; ".join(_line(problem, model) for problem in error.errors(include_url=False)[:5])


def _line(problem: Any, model: type[BaseModel]) -> str:
    key = ".".join(map(str, problem["loc"])) or "body"
    if problem["type"] == "extra_forbidden":
        inner: Any = None if len(problem["loc"]) == 1 else model.model_fields[problem["loc"][0]].annotation
        allowed: type[BaseModel] = inner if isinstance(inner, type) and issubclass(inner, BaseModel) else model
        return f"{key}: unknown; allowed: {', '.join(allowed.model_fields)}"
    if problem["type"] in ("missing", "json_invalid"):
        return f"{key}: {problem['msg']}"
    given = repr(problem["input"])
    return f"{key}: got {given if len(given) <= 60 else given[:57] + '...'}; {problem['msg']}"
