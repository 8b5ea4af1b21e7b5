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
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional

from pliant.torchvision_ops import declare
from pliant.zoo import corpus, library
from pliant.zoo.corpus import Text
from pliant.zoo.repeatable import repeatable
from pliant.zoo.shapes import Progress, Shape

declare()
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast  # noqa: E402

SEED = 0
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
_WARM_UP = 0.1
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
            accuracy=accuracy(model, tokenizer, held_out),
            window_accuracy=accuracy(model, tokenizer, windows),
            parameters=model.num_parameters(),
        )
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, shape.positions, folder)
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


def new_model(shape: Shape) -> BertForSequenceClassification:
    """An untrained model that starts as a classifier of the mean of its word embeddings."""
    model = BertForSequenceClassification(BertConfig(**shape.config()))
    weights = {name.removesuffix(".weight"): weight for name, weight in model.named_parameters()}
    identity, nothing = torch.eye(shape.hidden), torch.tensor(0.0)
    with torch.no_grad():
        weights["bert.embeddings.position_embeddings"].mul_(0.2)
        weights["bert.embeddings.token_type_embeddings"].zero_()
        for depth in range(shape.layers):
            layer = f"bert.encoder.layer.{depth}"
            weights[f"{layer}.attention.self.value"].copy_(identity)
            weights[f"{layer}.attention.output.dense"].copy_(identity if depth == shape.layers - 1 else nothing)
            weights[f"{layer}.output.dense"].zero_()
        weights["bert.pooler.dense"].copy_(identity)
    return model


@torch.no_grad()
def accuracy(model: BertForSequenceClassification, tokenizer: Tokenizer, texts: Sequence[Text]) -> float:
    """The fraction of `texts` whose label the model ranks first."""
    model.eval()  # type: ignore[no-untyped-call]
    examples = _encode(tokenizer, texts, list((model.config.id2label or {}).values()))
    right = 0
    for batch in _batches(examples, random.Random(SEED)):
        ids, mask, labels = _pad(batch)
        right += int((model(input_ids=ids, attention_mask=mask).logits.argmax(-1) == labels).sum())
    return right / len(texts)


def save_tokenizer(tokenizer: Tokenizer, longest: int, folder: Path) -> None:
    """Saved without truncation: who serves the model wants to know of a text that is too long."""
    tokenizer.no_truncation()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, model_max_length=longest, **SPECIAL
    )
    fast.save_pretrained(folder)


Example = tuple[list[int], int]
"""Token ids with their special tokens, and the label's index."""


def _fit(
    model: BertForSequenceClassification,
    shape: Shape,
    tokenizer: Tokenizer,
    paragraphs: Sequence[Text],
    report: Progress,
) -> None:
    rng = random.Random(SEED)
    batches = list(_epochs(shape, tokenizer, paragraphs, rng))
    layers = list(model.bert.encoder.layer)
    joining = [weight for name, weight in model.named_parameters() if _JOINING.search(name)]
    optimizer = _optimizer(model)
    model.train()
    for step, batch in enumerate(batches):
        done = step / len(batches)
        report("learning", done)
        joined = done >= _JOIN_AT
        for weight in joining:
            weight.requires_grad_(joined)
        for group in optimizer.param_groups:
            group["lr"] = shape.learning_rate * min(1.0, (done + 1 / len(batches)) / _WARM_UP) * (1 - done)
        ids, mask, labels = _pad(batch)
        ids = torch.where((torch.rand(ids.shape) < _MASKED) & (ids > SEP), MASK, ids)
        logits = _logits(model, layers if joined else layers[-1:], ids, mask.bool())
        loss = functional.cross_entropy(logits, labels, label_smoothing=0.1)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _epochs(
    shape: Shape, tokenizer: Tokenizer, paragraphs: Sequence[Text], rng: random.Random
) -> Iterator[list[Example]]:
    """The batches of all epochs: paragraphs, of which long ones are cropped, and windows of several."""
    singles = _encode(tokenizer, paragraphs, shape.labels)
    for _ in range(shape.epochs):
        long = _encode(tokenizer, corpus.windows(paragraphs, shape.windows, rng, _WINDOW_WORDS), shape.labels)
        yield from _batches([(_crop(ids, rng), label) for ids, label in singles] + long, rng)


def _logits(model: BertForSequenceClassification, layers: Sequence[Any], ids: Tensor, mask: Tensor) -> Tensor:
    """What the model with these of its layers says [batch, labels] of ids and their mask [batch, length].

    Of the last layer only the first token is computed, which is all that the classifier looks at.
    """
    bert: Any = model.bert
    x, seen = bert.embeddings(input_ids=ids), mask[:, None, None]
    *before, last = layers
    for layer in before:
        x = layer(x, seen)
    attention, first = last.attention.self, x[:, :1]
    query, key, value = (
        linear(given).unflatten(-1, (attention.num_attention_heads, -1)).transpose(1, 2)
        for linear, given in ((attention.query, first), (attention.key, x), (attention.value, x))
    )
    found = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    attended = last.attention.output(found.transpose(1, 2).flatten(2), first)
    logits: Tensor = model.classifier(bert.pooler(last.output(last.intermediate(attended), attended)))
    return logits


def _optimizer(model: BertForSequenceClassification) -> torch.optim.Optimizer:
    """AdamW that decays the weights of the layers, and neither embeddings nor biases and norms."""
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (decayed if parameter.ndim > 1 and "embeddings" not in name else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


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
