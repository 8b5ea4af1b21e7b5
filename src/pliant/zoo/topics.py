"""Trains the zoo's text classifiers: BERT-shaped models that tell the part of the documentation a text is from, or of
the standard library a question is about.

A thousand paragraphs and some seconds of a processor are little for a transformer, so it is given three helps:

- The last layer begins as mean pooling (values and outputs are identities, queries and keys nearly zero), and its
  feed-forward block as nothing. The first step thus sees a bag of words. What words mean and which of them matter is
  learned with this layer alone, of which only the first token is computed: most of the way for little time.
- All else begins as the identity, and joins for the last steps (progressive stacking). Earlier it would learn the
  paragraphs by heart.
- Long paragraphs are cropped at random places, and words are masked at random. Windows of several paragraphs teach
  the positions that single paragraphs do not reach.
"""

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional

from pliant.training.learner import Group, Learner
from pliant.zoo import corpus, library
from pliant.zoo.corpus import Text
from pliant.zoo.encoder import EMBEDDINGS, POOLER, Encoder, prefix
from pliant.zoo.repeatable import repeatable
from pliant.zoo.saving import save_tokenizer, save_weights
from pliant.zoo.shapes import Progress, Shape

SEED = 2
"""Accuracies differ by two points from seed to seed: docs/measurements.md."""
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
PAD, UNK, CLS, SEP, MASK = range(5)
_ENDINGS = range(2, 6)
_BATCH_TOKENS = 2048
_CROP_TOKENS = 128
_MASKED = 0.3
_WINDOW_WORDS = (30, 300)
_JOIN_AT = 0.9
"""When all else joins the last layer, as a share of the steps."""
_JOINING = re.compile(r"(output|intermediate|pooler)\.dense")
"""What of the last layer and behind it joins only then: learned sooner, it would fit the paragraphs too well."""


@dataclass(frozen=True)
class Result:
    """What training gave: `accuracy` on the held-out paragraphs, and `window_accuracy` on longer texts made of them."""

    accuracy: float
    window_accuracy: float
    parameters: int


def train(shape: Shape, folder: Path, report: Progress) -> Result:
    """Train a model of `shape` from nothing and save it with its tokenizer to `folder`; same seed, same weights."""
    texts = library if shape.labels == library.LABELS else corpus
    paragraphs = texts.training()
    tokenizer = train_tokenizer([paragraph.text for paragraph in paragraphs], shape)
    with repeatable(SEED):
        model = new_model(shape)
        _fit(model, shape, tokenizer, paragraphs, report)
        held_out = texts.held_out()
        windows = corpus.windows(held_out, 60, random.Random(SEED), (100, 300))
        result = Result(
            accuracy=accuracy(model, tokenizer, held_out, shape.labels),
            window_accuracy=accuracy(model, tokenizer, windows, shape.labels),
            parameters=sum(map(torch.numel, model.weights.values())),
        )
    save_weights(model.weights, shape.config(), folder)
    save_tokenizer(tokenizer, shape.positions, SPECIAL, folder)
    report("learning", 1.0)
    return result


def train_tokenizer(texts: Sequence[str], shape: Shape) -> Tokenizer:
    """A lowercasing WordPiece tokenizer of these texts, with BERT's template; truncates to `shape.positions`.

    Its vocabulary is all characters, the commonest endings, and the words that occur most, at least twice. (The trainer
    in `tokenizers` breaks ties at random, so that no two runs would give the same model.)
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.Whitespace()
    words = Counter(word for text in texts for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text)))
    characters = {character for word in words for character in word}
    endings = Counter(f"##{word[-size:]}" for word in words for size in _ENDINGS if len(word) > size)
    pieces = [*SPECIAL.values(), *sorted(characters), *sorted(f"##{character}" for character in characters)]
    pieces += _commonest(endings, shape.vocabulary // 10)
    known = set(pieces)
    repeated = Counter({word: count for word, count in words.items() if count > 1 and word not in known})
    pieces += _commonest(repeated, shape.vocabulary - len(pieces))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.enable_truncation(shape.positions)
    return tokenizer


def _commonest(counts: Counter[str], size: int) -> list[str]:
    return sorted(counts, key=lambda piece: (-counts[piece], piece))[:size]


def new_model(shape: Shape) -> Encoder:
    """An untrained model that starts as a classifier of the mean of its word embeddings."""
    model = Encoder.random(shape)
    weights, identity = model.weights, torch.eye(shape.hidden)
    weights[f"{EMBEDDINGS}position_embeddings.weight"] *= 0.2
    weights[f"{EMBEDDINGS}token_type_embeddings.weight"].zero_()
    for depth in range(shape.layers):
        layer = prefix(depth)
        weights[f"{layer}attention.self.value.weight"].copy_(identity)
        weights[f"{layer}attention.output.dense.weight"].copy_(identity * (depth == shape.layers - 1))
        weights[f"{layer}output.dense.weight"].zero_()
    weights[f"{POOLER}.weight"].copy_(identity)
    return model


@torch.no_grad()
def accuracy(model: Encoder, tokenizer: Tokenizer, texts: Sequence[Text], labels: Sequence[str]) -> float:
    """The fraction of `texts` whose label the model ranks first."""
    right = 0
    for batch in _batches(_encode(tokenizer, texts, labels), random.Random(SEED)):
        ids, mask, wanted = _pad(batch)
        right += int((model.logits(ids, mask).argmax(-1) == wanted).sum())
    return right / len(texts)


Example = tuple[list[int], int]
"""Token ids with their special tokens, and the label's index."""


def _fit(model: Encoder, shape: Shape, tokenizer: Tokenizer, paragraphs: Sequence[Text], report: Progress) -> None:
    rng = random.Random(SEED)
    batches = list(_epochs(shape, tokenizer, paragraphs, rng))
    learner = _learner(model, shape, len(batches))
    joining = [weight for name, weight in model.weights.items() if _JOINING.search(name)]
    for batch in batches:
        report("learning", learner.done)
        joined = learner.done >= _JOIN_AT
        for weight in joining:
            weight.requires_grad_(joined)
        ids, mask, labels = _pad(batch)
        ids = torch.where((torch.rand(ids.shape) < _MASKED) & (ids > SEP), MASK, ids)
        logits = model.logits(ids, mask, skipped=0 if joined else shape.layers - 1)
        loss = functional.cross_entropy(logits, labels, label_smoothing=0.1)
        loss.backward()  # type: ignore[no-untyped-call]
        learner.step()
    for weight in model.weights.values():
        weight.requires_grad_(False)


def _epochs(
    shape: Shape, tokenizer: Tokenizer, paragraphs: Sequence[Text], rng: random.Random
) -> Iterator[list[Example]]:
    """The batches of all epochs: paragraphs, of which long ones are cropped, and windows of several."""
    singles = _encode(tokenizer, paragraphs, shape.labels)
    for _ in range(shape.epochs):
        long = _encode(tokenizer, corpus.windows(paragraphs, shape.windows, rng, _WINDOW_WORDS), shape.labels)
        yield from _batches([(_crop(ids, rng), label) for ids, label in singles] + long, rng)


def _learner(model: Encoder, shape: Shape, steps: int) -> Learner:
    """Decays the weights of the layers, and neither embeddings nor biases and norms."""
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in model.weights.items():
        (decayed if weight.ndim > 1 and "embeddings" not in name else others).append(weight.requires_grad_())
    groups = [Group(decayed, shape.learning_rate, 0.05), Group(others, shape.learning_rate)]
    return Learner(groups, steps, betas=(0.9, 0.98), clip=1.0)


def _encode(tokenizer: Tokenizer, texts: Sequence[Text], labels: Sequence[str]) -> list[Example]:
    encodings = tokenizer.encode_batch([text.text for text in texts])
    return [(encoding.ids, labels.index(text.label)) for encoding, text in zip(encodings, texts, strict=True)]


def _crop(ids: list[int], rng: random.Random) -> list[int]:
    """At most `_CROP_TOKENS` of a text, from a random place."""
    if len(ids) <= _CROP_TOKENS:
        return ids
    start = rng.randrange(1, len(ids) - _CROP_TOKENS + 2)
    return [CLS, *ids[start : start + _CROP_TOKENS - 2], SEP]


def _batches(examples: Sequence[Example], rng: random.Random) -> list[list[Example]]:
    """Batches of about `_BATCH_TOKENS`, each of examples of nearly the same length, in random order."""
    batches: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda example: len(example[0]) + 6 * rng.random()):
        if (len(batches[-1]) + 1) * len(example[0]) > _BATCH_TOKENS:
            batches.append([])
        batches[-1].append(example)
    rng.shuffle(batches)
    return batches


def _pad(batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, attention mask) of shape [batch, longest], and the labels of shape [batch]."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [PAD] * (longest - len(ids)) for ids, _ in batch])
    lengths = torch.tensor([len(ids) for ids, _ in batch])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return ids, mask, torch.tensor([label for _, label in batch])
