"""A model's own head as a task: without any other, a vision transformer answers with its own labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pliant.formats.vision_task import TaskRef

NAME = "model"
_REVISION = "own head"
_MERGED_AWAY = 0.5
"""The accuracy that is assumed lost where all tokens are merged: more than it is, so that merging is for need only."""


def own_task(model: str, labels: int) -> TaskRef:
    """The head of `model`, which has so many outputs."""
    return TaskRef(NAME, model, _REVISION, labels, ())


def is_own(task: TaskRef) -> bool:
    """Whether `task` is a model's own head."""
    return task.revision == _REVISION


def assumed_accuracies(tokens: Mapping[int, Sequence[int]]) -> Mapping[int, float]:
    """By gamma, relative to gamma 0: of the model's own head, and of tasks that say nothing of merged tokens.

    `tokens` has the tokens in each layer by gamma <= 0. Merging needs no parameters, so that a task that nobody has
    measured it with can be merged as well, and does not keep others in its batch from it. The accuracy is taken to fall
    with the share of tokens that are merged away. An operator who knows better gives a task its accuracies, or images
    to measure them by; the model's own head, too, can be given as a task.
    """
    plain = sum(tokens[0])
    return {gamma: 1 - _MERGED_AWAY * (1 - sum(counts) / plain) for gamma, counts in tokens.items()}
