"""What the files of an encoder say to whoever serves it: its task, labels, limits, prompts, and what its scores mean.

Neither torch nor transformers is imported: the gateway uses this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pliant.errors import ModelError
from pliant.models.decoder_info import read_json
from pliant.models.encoder_head import Task, task_of
from pliant.models.sources import most_tokens

Scores = Literal["softmax", "sigmoid", "none"]

_SETTINGS = "config_sentence_transformers.json"
_LENGTHS = "sentence_bert_config.json"
_TOKENIZER = "tokenizer_config.json"
_UNLIMITED = 1_000_000
"""A tokenizer without a limit says a larger one."""
_ACTIVATIONS: dict[str, Scores] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
"""What sentence-transformers says of cross encoders, by the name of torch's module."""


@dataclass(frozen=True)
class EncoderInfo:
    """An encoder as its folder describes it."""

    task: Task
    labels: tuple[str, ...]
    """In the order of outputs; () of an embedding."""
    max_length: int
    """Tokens of the longest text, special ones included."""
    pairs: bool
    """Whether it tells the two texts of a pair apart by token types; others find separators between them."""
    scores: Scores
    """How logits become scores: they compete, each stands for itself, or they are the scores."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What goes before a text, by what the text is for."""
    default_prompt: str = ""
    """What goes before a text of which nothing is said."""
    similarity: str = "cosine"
    """How embeddings are compared: cosine, dot, euclidean or manhattan."""

    @property
    def scores_pairs(self) -> bool:
        """Whether it says one number of a text or a pair, as rerankers do."""
        return self.task == "classify" and len(self.labels) == 1


def read_encoder(folder: Path) -> EncoderInfo:
    """What an encoder's folder says. Raises ModelError if its task is none that is served."""
    config = read_json(folder / "config.json")
    task = task_of(folder, config)
    settings = read_json(folder / _SETTINGS)
    prompts = settings.get("prompts") or {}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{folder / _SETTINGS}: default_prompt_name is {default!r}, which is none of its prompts")
    return EncoderInfo(
        task=task,
        labels=() if task == "embed" else _labels(config),
        max_length=_max_length(folder, config),
        pairs=(config.get("type_vocab_size") or 0) > 1,
        scores=_scores(config, task),
        prompts=dict(prompts),
        default_prompt=prompts[default] if default is not None else "",
        similarity=settings.get("similarity_fn_name") or "cosine",
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label") or {index: f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
    return tuple(named[index] for index in sorted(named, key=int))


def _max_length(folder: Path, config: dict[str, Any]) -> int:
    """The least of what the model has positions for, and of what it was trained or its tokenizer saved for."""
    limits = [
        most_tokens(config),
        read_json(folder / _LENGTHS).get("max_seq_length"),
        read_json(folder / _TOKENIZER).get("model_max_length"),
    ]
    known = [int(limit) for limit in limits if limit and limit < _UNLIMITED]
    if not known:
        raise ModelError(
            f"{folder}: its config.json has no max_position_embeddings; choose a model with a longest text"
        )
    return min(known)


def _scores(config: Mapping[str, Any], task: Task) -> Scores:
    """What a cross encoder says of itself, or else as transformers' pipelines have it."""
    if task == "embed":
        return "none"
    said = (config.get("sentence_transformers") or {}).get("activation_fn") or config.get(
        "sbert_ce_default_activation_function"
    )
    if said is not None:
        found = _ACTIVATIONS.get(str(said).rpartition(".")[2])
        if found is None:
            raise ModelError(f"{said} makes its scores, which is not supported; choose {', '.join(_ACTIVATIONS)}")
        return found
    problem = config.get("problem_type")
    if task == "classify" and problem == "regression":
        return "none"
    alone = task == "classify" and (problem == "multi_label_classification" or len(_labels(config)) == 1)
    return "sigmoid" if alone else "softmax"
