"""Has all layers of a text classifier learn together with exits behind some of them (deep supervision).

Layers that learned for the last one alone leave to it what exits would have to know. Here each exit and the last layer
learn what the label says and what the model said before, of texts and of some words in a row of each, of which there
are many more than of texts (self-distillation).
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Encoding
from torch import Tensor
from torch.nn import functional

from pliant.models import hub
from pliant.models.encoder_info import EncoderInfo
from pliant.models.encoder_tokenizer import encoder_tokenizer
from pliant.texts import Text, joined, parts
from pliant.torchvision_ops import declare
from pliant.training.labelled_texts import LabelledText
from pliant.training.learner import Group, Learner

FRAGMENT_WORDS = (2, 12)
"""The least and the most words of a fragment."""
_CLIP = 1.0
_NEAR = 4
"""Tokens by which texts of a batch may well differ in length."""


@dataclass(frozen=True)
class Recipe:
    """How layers learn: for `epochs` over the texts and `fragments` of each, other ones in each epoch."""

    epochs: int
    fragments: int = 1
    learning_rate: float = 1e-4
    """Of the layers at its peak: it rises over the first tenth of the steps, and falls to nothing."""
    exit_learning_rate: float = 1e-3
    decay: float = 0.01
    """Of matrices."""
    batch: int = 32
    seed: int = 0
    device: str = "cpu"


def train(
    folder: Path,
    info: EncoderInfo,
    after: Sequence[int],
    texts: Sequence[LabelledText],
    recipe: Recipe,
    out: Path,
    report: Callable[[float], object],
) -> None:
    """Write the text classifier in `folder` to `out`, as its layers are when they have learned from `texts` with exits
    behind `after` so many of them; without these exits. Same seed and threads, same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model, before = _load(folder, recipe.device), _load(folder, recipe.device).eval().requires_grad_(False)
        reader = _Reader(folder, info, model.config.pad_token_id or 0, recipe.device)
        exits = [torch.nn.Linear(model.config.hidden_size, len(info.labels), device=recipe.device) for _ in after]
        for each in exits:
            torch.nn.init.zeros_(each.weight)
        rng = random.Random(recipe.seed)
        batches = [batch for _ in range(recipe.epochs) for batch in _batches(texts, recipe, rng)]
        learner = _learner(model, exits, recipe, len(batches))
        model.train()
        for batch in batches:
            report(learner.done)
            read = reader.read([text for text, _ in batch])
            targets = before(**read).logits.softmax(1)
            for row, (_, label) in enumerate(batch):
                if label is not None:
                    targets[row] /= 2
                    targets[row, info.labels.index(label)] += 0.5
            _loss(model(**read, output_hidden_states=True), read["attention_mask"], after, exits, targets).backward()  # type: ignore[no-untyped-call]
            learner.step()
    model.save_pretrained(out)
    weights = {*hub.weight_files(folder), folder / hub.INDEX}
    for file in {file for pattern in hub.FILES for file in folder.glob(pattern)} - weights:
        copy = out / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _loss(output: Any, mask: Tensor, after: Sequence[int], exits: Sequence[torch.nn.Linear], targets: Tensor) -> Tensor:
    """The mean cross entropy of what all exits and the last layer say, [texts, labels] each."""
    shares = (mask / mask.sum(1, keepdim=True))[:, None].to(output.logits.dtype)
    said = [output.logits]
    for behind, exit_ in zip(after, exits, strict=True):
        mean = (shares @ output.hidden_states[behind]).squeeze(1)
        said.append(exit_(functional.layer_norm(mean, mean.shape[1:])))
    return torch.stack([functional.cross_entropy(each, targets) for each in said]).mean()


def _load(folder: Path, device: str) -> Any:
    declare()
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).to(device)


def _learner(model: Any, exits: Sequence[torch.nn.Linear], recipe: Recipe, steps: int) -> Learner:
    weights = [*model.parameters()]
    matrices, others = [[one for one in weights if (one.ndim > 1) == wanted] for wanted in (True, False)]
    heads = [weight for each in exits for weight in each.parameters()]
    return Learner(
        [
            Group(matrices, recipe.learning_rate, recipe.decay),
            Group(others, recipe.learning_rate),
            Group(heads, recipe.exit_learning_rate),
        ],
        steps,
        clip=_CLIP,
    )


def _batches(
    texts: Sequence[LabelledText], recipe: Recipe, rng: random.Random
) -> Iterator[list[tuple[Text, str | None]]]:
    """All texts with their labels, and fragments without one, those of nearly the same length together, in random
    order."""
    given: list[tuple[Text, str | None]] = [(text.text, text.label) for text in texts]
    given += [(fragment(text.text, rng), None) for text in texts for _ in range(recipe.fragments)]
    length = [sum(len(part.split()) for part in parts(text)) + _NEAR * rng.random() for text, _ in given]
    near = sorted(range(len(given)), key=length.__getitem__)
    starts = [*range(0, len(near), recipe.batch)]
    for start in rng.sample(starts, len(starts)):
        yield [given[place] for place in near[start : start + recipe.batch]]


def fragment(text: Text, rng: random.Random) -> Text:
    """A few words in a row, of each part."""

    def of(part: str) -> str:
        words = part.split()
        length = min(len(words), rng.randint(*FRAGMENT_WORDS))
        start = rng.randrange(len(words) - length + 1)
        return " ".join(words[start : start + length])

    return joined(tuple(map(of, parts(text))))


class _Reader:
    """Texts as a model of transformers takes them."""

    def __init__(self, folder: Path, info: EncoderInfo, pad: int, device: str) -> None:
        self._tokenizer = encoder_tokenizer(folder, info, info.max_length)
        self._pairs, self._pad, self._device = info.pairs, pad, device

    def read(self, texts: Sequence[Text]) -> dict[str, Tensor]:
        """[texts, tokens of the longest] each."""
        encodings = self._tokenizer.encode_batch(list(texts))
        longest = max(map(len, encodings))

        def padded(of: Callable[[Encoding], Sequence[int]], pad: int) -> Tensor:
            rows = [[*of(each), *[pad] * (longest - len(each))] for each in encodings]
            return torch.tensor(rows, device=self._device)

        read = {
            "input_ids": padded(lambda each: each.ids, self._pad),
            "attention_mask": padded(lambda each: each.attention_mask, 0),
        }
        if self._pairs:
            read["token_type_ids"] = padded(lambda each: each.type_ids, 0)
        return read
