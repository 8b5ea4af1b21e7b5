"""Trains the zoo's model of pairs: how likely two texts are of one topic of the documentation, as rerankers say it.

To compare two texts is more than a transformer learns from nothing in seconds, so it begins as what compares bags of
words, and learns from there:

- Words mean what they mean to a text classifier of the zoo.
- One head of the only layer attends to the first text, and one to the second. Their values are the same few directions
  in which words differ the most, so that the first token gets both texts' means side by side.
- The feed-forward block begins with the sums and the differences of the two, in each direction and with either sign;
  texts that are alike have large sums and small differences.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from pliant.training.learner import Group, Learner
from pliant.zoo import corpus
from pliant.zoo.corpus import Text
from pliant.zoo.encoder import EMBEDDINGS, Encoder, prefix
from pliant.zoo.repeatable import repeatable
from pliant.zoo.saving import save_tokenizer, save_weights
from pliant.zoo.shapes import PairShape, Progress
from pliant.zoo.topics import CLS, MASK, PAD, SPECIAL

SEED = 0
_PAIRS = 24
"""Of a batch that suit each other; there are as many that do not."""
_SPLIT = 0.7
"""How many of the pairs are halves of one paragraph; the others are paragraphs of one topic."""
_QUERY_WORDS = (4, 16)
_DOCUMENT_WORDS = 60
_MASKED = 0.15
_HELD_OUT_PAIRS = 200
_TYPES = 5.0
"""How far apart token types are, in standard deviations of word embeddings."""

Example = tuple[str, str, bool]
"""A query, a text, and whether they suit each other."""


@dataclass(frozen=True)
class Result:
    """What training gave: `accuracy` is of pairs of held-out paragraphs, half of which suit each other."""

    accuracy: float
    parameters: int


def train(shape: PairShape, base: Path, folder: Path, report: Progress) -> Result:
    """Train a model of `shape` on the words of the classifier in `base`, and save it to `folder`; same seed, same
    weights."""
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.enable_truncation(shape.positions)
    with repeatable(SEED):
        model = new_model(shape, load_file(base / "model.safetensors"))
        _fit(model, shape, tokenizer, report)
        accuracy = _accuracy(model, tokenizer, pairs(corpus.held_out(), random.Random(SEED), _HELD_OUT_PAIRS))
    save_weights(model.weights, shape.config(), folder)
    save_tokenizer(tokenizer, shape.positions, SPECIAL, folder)
    report("learning", 1.0)
    return Result(accuracy, sum(map(torch.numel, model.weights.values())))


def pairs(paragraphs: Sequence[Text], rng: random.Random, count: int) -> list[Example]:
    """`count` pairs that suit each other, and as many that do not: the query with a paragraph of another topic."""
    by_topic: dict[str, list[Text]] = {}
    for paragraph in paragraphs:
        by_topic.setdefault(paragraph.topic, []).append(paragraph)
    made: list[Example] = []
    while len(made) < 2 * count:
        first, other = rng.choice(paragraphs), rng.choice(paragraphs)
        words = first.text.split()
        if rng.random() < _SPLIT and len(words) >= 12:
            cut = rng.randrange(4, len(words) - 4)
            query, document = rng.sample([words[:cut], words[cut:]], 2)
        else:
            query, document = words, rng.choice(by_topic[first.topic]).text.split()
        if document is words or document == words or other.topic == first.topic:
            continue
        size = rng.randint(*_QUERY_WORDS)
        start = rng.randrange(max(1, len(query) - size + 1))
        asked = " ".join(query[start : start + size])
        made.append((asked, " ".join(document[:_DOCUMENT_WORDS]), True))
        made.append((asked, " ".join(other.text.split()[:_DOCUMENT_WORDS]), False))
    return made


def new_model(shape: PairShape, base: dict[str, Tensor]) -> Encoder:
    """An untrained model that starts as the docstring above says; `base` has the tensors of the classifier."""
    model = Encoder.random(shape)
    weights = model.weights
    embeddings, layer = EMBEDDINGS, prefix(0)
    half, flag = shape.hidden // 2, shape.hidden - 1
    for name in ("word_embeddings.weight", "LayerNorm.weight", "LayerNorm.bias"):
        weights[f"{embeddings}{name}"].copy_(base[f"{embeddings}{name}"])
    words = weights[f"{embeddings}word_embeddings.weight"]
    main = _main_directions(words[MASK + 1 :], half, flag)
    apart = _TYPES * words.std()
    words[:, flag] = 0
    words[CLS] = 0
    types = weights[f"{embeddings}token_type_embeddings.weight"].zero_()
    types[0, flag], types[1, flag] = -apart, apart
    weights[f"{embeddings}position_embeddings.weight"].mul_(0.1)

    query = weights[f"{layer}attention.self.query.bias"]
    weights[f"{layer}attention.self.query.weight"].zero_()
    key = weights[f"{layer}attention.self.key.weight"].zero_()
    for head, sign in enumerate((-1, 1)):
        key[head * half, flag] = 2.5
        query[head * half] = sign * 2.5
    weights[f"{layer}attention.self.value.weight"].copy_(torch.cat([main, main]))
    weights[f"{layer}attention.output.dense.weight"].copy_(4 * torch.eye(shape.hidden))

    one = torch.eye(half)
    either = [torch.cat([sign * one, sign * other * one], 1) for other in (1, -1) for sign in (1, -1)]
    weights[f"{layer}intermediate.dense.weight"][: 4 * half].copy_(torch.cat(either))
    alike = torch.cat([torch.full((2 * half,), 4 / half), torch.full((2 * half,), -4 / half)])
    down = weights[f"{layer}output.dense.weight"].mul_(0.2)
    down[0, : 4 * half] = alike
    weights["bert.pooler.dense.weight"].copy_(torch.eye(shape.hidden))
    weights["classifier.weight"].mul_(0.2)
    weights["classifier.weight"][0, 0] = 1
    return model


def _main_directions(words: Tensor, count: int, flag: int) -> Tensor:
    """The directions [count, hidden] in which words differ the most, but for the one that tells texts apart."""
    normed = functional.layer_norm(words, words.shape[1:])
    centred = normed - normed.mean(0)
    centred[:, flag] = 0
    found: Tensor = torch.linalg.svd(centred, full_matrices=False)[2][:count].clone()
    return found


def _fit(model: Encoder, shape: PairShape, tokenizer: Tokenizer, report: Progress) -> None:
    rng, paragraphs = random.Random(SEED), corpus.training()
    learned = [weight.requires_grad_() for weight in model.weights.values()]
    learner = Learner([Group(learned, shape.learning_rate, 0.01)], shape.steps, betas=(0.9, 0.98), clip=1.0)
    for _ in range(shape.steps):
        report("learning", learner.done)
        examples = pairs(paragraphs, rng, _PAIRS)
        wanted = torch.tensor([0.95 if suits else 0.05 for *_, suits in examples])
        loss = functional.binary_cross_entropy_with_logits(_logits(model, tokenizer, examples, _MASKED), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        learner.step()
    for weight in learned:
        weight.requires_grad_(False)


def _logits(model: Encoder, tokenizer: Tokenizer, examples: Sequence[Example], masked: float = 0.0) -> Tensor:
    """[examples]; a share of the words is masked."""
    encodings = tokenizer.encode_batch([(query, text) for query, text, _ in examples])
    longest = max(map(len, encodings))

    def padded(rows: Sequence[Sequence[int]], value: int = 0) -> Tensor:
        return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])

    ids = padded([encoding.ids for encoding in encodings], PAD)
    mask = padded([encoding.attention_mask for encoding in encodings])
    types = padded([encoding.type_ids for encoding in encodings])
    if masked:
        ids = torch.where((torch.rand(ids.shape) < masked) & (ids > MASK), MASK, ids)
    return model.logits(ids, mask, types)[:, 0]


@torch.no_grad()
def _accuracy(model: Encoder, tokenizer: Tokenizer, examples: Sequence[Example]) -> float:
    suits = torch.tensor([suits for *_, suits in examples])
    return float(((_logits(model, tokenizer, examples) > 0) == suits).double().mean())
