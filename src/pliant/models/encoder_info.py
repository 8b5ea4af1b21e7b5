"""What the files of an encoder say to whoever serves it: its task, labels, limits, prompts, and what its scores mean.

Neither torch nor transformers is imported: the gateway uses this module.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pliant.errors import ModelError
from pliant.models.decoder_info import read_json
from pliant.models.encoder_head import Sizes, Task, head_of, task_of
from pliant.models.encoder_shape import EncoderShape

Scores = Literal["softmax", "sigmoid", "none"]

_SETTINGS = "config_sentence_transformers.json"
_TRANSFORMER = "sentence_bert_config.json"
_TOKENIZER = "tokenizer_config.json"
_POSITIONS_START_AFTER_PADDING = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet"}
"""Model types that count positions from `pad_token_id + 1`, so that this many fewer tokens fit."""
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
    vocabulary: int
    """How many tokens it knows; ids are below."""
    dimensions: int = 0
    """Of an embedding."""
    normalized: bool = False
    """Whether an embedding has the length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What goes before a text, by what the text is for."""
    default_prompt: str = ""
    """What goes before a text of which nothing is said."""
    lowercase: bool = False
    """Whether texts are made lower case before they are tokenized, whatever the tokenizer does."""
    similarity: str = "cosine"
    """How embeddings are compared: cosine, dot, euclidean or manhattan."""

    @property
    def chooses(self) -> bool:
        """Whether it chooses one of several labels of a text, so that their scores compete."""
        return self.task == "classify" and self.scores == "softmax" and len(self.labels) > 1

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
    shape = EncoderShape.from_config(config)
    hidden = shape.hidden if shape else config.get("hidden_size") or 0
    head = head_of(folder, config, Sizes("", hidden, 0.0)) if task == "embed" else None
    if default is not None and default not in prompts:
        raise ModelError(f"{folder / _SETTINGS}: default_prompt_name is {default!r}, which is none of its prompts")
    return EncoderInfo(
        task=task,
        labels=() if task == "embed" else _labels(config),
        max_length=_max_length(folder, config),
        pairs=_has_types(folder) and (shape.token_types if shape else config.get("type_vocab_size") or 0) > 1,
        scores=_scores(config, task),
        vocabulary=(shape.vocab if shape else config.get("vocab_size")) or _UNLIMITED,
        dimensions=head.outputs if head else 0,
        normalized=bool(head and head.normalized),
        prompts=dict(prompts),
        default_prompt=prompts[default] if default is not None else "",
        lowercase=bool(read_json(folder / _TRANSFORMER).get("do_lower_case")),
        similarity=settings.get("similarity_fn_name") or "cosine",
    )


def _has_types(folder: Path) -> bool:
    """Whether the tokenizer gives token types, as far as it says."""
    names = read_json(folder / _TOKENIZER).get("model_input_names")
    return names is None or "token_type_ids" in names


def most_tokens(config: Mapping[str, Any]) -> int | None:
    """How many tokens a model with this config.json has positions for; None if it does not say."""
    positions: int | None = config.get("max_position_embeddings") or config.get("n_positions")
    if not positions or config.get("model_type") not in _POSITIONS_START_AFTER_PADDING:
        return positions
    padding: int | None = config.get("pad_token_id")
    return positions - (1 if padding is None else padding) - 1


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label") or {index: f"LABEL_{index}" for index in range(config.get("num_labels", 2))}
    return tuple(named[index] for index in sorted(named, key=int))


def _max_length(folder: Path, config: dict[str, Any]) -> int:
    """The least of what the model has positions for, and of what it was trained or its tokenizer saved for."""
    limits = [
        most_tokens(config),
        read_json(folder / _TRANSFORMER).get("max_seq_length"),
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
