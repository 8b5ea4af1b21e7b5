"""Trains the zoo's language model: a Llama-shaped decoder that goes on with Python's documentation, and answers on it.

A minute of a processor is once or twice through the texts in small steps, which is little for a transformer, so it is
given five helps:

- It begins as a bigram model: embeddings and head are factors of the logarithms of how often one token follows another,
  and the layers add nothing yet. Training starts where it would else have spent most of its time to get to.
- The heads of the first layer begin by attending to the last token, the one before that, and so on, so that what is
  learned first is to go on from the last few tokens together.
- The upper half of the layers joins, adding nothing at first, when the lower one has learned for a while (progressive
  stacking).
- Most rows are short, which is cheap. Some have all the positions of the model, so that it knows them.
- What it is asked for most it reads most: every answer comes several times, to questions that differ, and its beginning
  still more often, which is cheap, and is where answers are mixed up. Questions are read, but not learned.

What it learns is to repeat the answers in well-formed sentences, which is what a demonstration needs. Texts that it has
not seen surprise it: its perplexity on those is no better for more training.
"""

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

from pliant.training.learner import Group, Learner
from pliant.zoo import documents, forms
from pliant.zoo.decoder import EMBEDDING, HEAD, Decoder, Linear, prefix
from pliant.zoo.documents import Conversation
from pliant.zoo.forms import Dialogue, Turn
from pliant.zoo.repeatable import repeatable
from pliant.zoo.saving import save_json, save_tokenizer, save_weights
from pliant.zoo.shapes import ASSISTANT, BEGIN, END, SYSTEM, USER, LlamaShape, Progress

SEED = 0
SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""By id, see `shapes`."""
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "{{ '<|system|>Tools: ' + tools | map(attribute='function.name') | join(', ') + eos_token }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|' + ('system' if message.role == 'tool' else message.role) + '|>' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '\\n</tool_call>' }}"
    "{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""As `forms` has it, too."""
_GENERATION = {"bos_token_id": BEGIN, "eos_token_id": END, "do_sample": True, "temperature": 0.7, "top_p": 0.9}
_SYSTEMS = ("You are a helpful assistant.", "You answer questions about Python.")
_ROW_TOKENS = (*[128] * 11, *[256] * 3, 512, 1024)
"""Lengths of rows, of which every step draws one."""
_BATCH_TOKENS = 512
_SMOOTHING = 4.0
"""How many times a token counts as followed by any token, in proportion to how common that is."""
_EMBEDDING_SCALE = 0.5
"""Root mean square of an embedding; the smaller, the sooner the layers matter."""
_LOOKING_PAIRS = 8
"""How many of a head's fastest pairs of dimensions tell positions apart."""
_LOOKING_STRENGTH = 5.5
"""What these pairs are in keys and queries: so large that the token sought gets nearly all of the attention."""
_PIECE_TOKENS = 128
"""Of a document, which comes in pieces."""
_READ = 0.5
"""The share of all pieces that come."""
_ASKED, _BEGUN = 10, 8
"""How often an answer comes meanwhile: the whole of it, and its beginning alone."""
_FORMED, _FORM_BEGUN = 20, 30
"""The same of each dialogue of `forms`."""
_FORM_TOKENS = 40
"""Of a first answer that begins: it has named what it is about."""
_TOOLS_SHARE = 0.2
"""Of questions, those that are asked where there are tools, and answered without."""
_BEGINNING_TOKENS = 12
_GROWN_AT = 0.4
"""When the upper half of the layers joins, as a share of the steps."""
_WARM_UP = 0.05


@dataclass(frozen=True)
class Result:
    """What training gave: `perplexity` of a token in the documents held out."""

    perplexity: float
    parameters: int


def train(shape: LlamaShape, folder: Path, report: Progress) -> Result:
    """Train a model of `shape` from nothing and save it with its tokenizer to `folder`; same seed, same weights."""
    tokenizer = train_tokenizer(shape)
    with repeatable(SEED):
        model = new_model(shape, tokenizer)
        _fit(model, shape, tokenizer, report)
        measured = perplexity(model, tokenizer, documents.held_out())
    save_weights(model.weights, shape.config(), folder)
    save_json(_GENERATION, folder / "generation_config.json")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    named = {"bos_token": SPECIAL[BEGIN], "eos_token": SPECIAL[END], "extra_special_tokens": SPECIAL[SYSTEM:]}
    save_tokenizer(tokenizer, shape.positions, named, folder)
    report("learning", 1.0)
    return Result(measured, sum(map(torch.numel, model.weights.values())))


def train_tokenizer(shape: LlamaShape) -> Tokenizer:
    """A byte-level BPE tokenizer of the documents, which begins every text with `BEGIN`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents.documents(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BEGIN]} $A", special_tokens=[(SPECIAL[BEGIN], BEGIN)]
    )
    return tokenizer


def new_model(shape: LlamaShape, tokenizer: Tokenizer) -> Decoder:
    """An untrained model that starts as a bigram model of the documents."""
    model = Decoder.random(shape)
    model.weights[EMBEDDING], model.weights[HEAD] = _bigram_factors(shape, tokenizer)
    for layer in range(shape.layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.weights[f"{prefix(layer)}{name}.weight"].zero_()
    _look_back(model)
    return model


def _look_back(model: Decoder) -> None:
    """Make the heads of the first layer attend to the token before, the one before that, and so on.

    Every embedding has the same first dimension, so keys and queries that are read from it depend on the position
    alone; a query that is turned back by n positions meets the key of the n-th token before at its height.
    """
    hidden, pairs = model.shape.hidden, model.turning()
    keys, queries = (
        model.weights[f"{prefix(0)}self_attn.{each}_proj.weight"].view(-1, 2, len(pairs), hidden) for each in "kq"
    )
    angles = pairs[:_LOOKING_PAIRS]
    strength = _LOOKING_STRENGTH * 2 / hidden**0.5
    keys[:, 0, :_LOOKING_PAIRS, 0] = strength
    for head, query in enumerate(queries):
        query[0, :_LOOKING_PAIRS, 0] = strength * ((head + 1) * angles).cos()
        query[1, :_LOOKING_PAIRS, 0] = -strength * ((head + 1) * angles).sin()


def _bigram_factors(shape: LlamaShape, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Embedding and head, [vocabulary, hidden] each: normalised rows of the one times the other are log probabilities.

    The first dimension carries how common a token is, the last brings all embeddings to the same norm, which RMSNorm
    would else take from them, and those between are of the best approximation, weighted by how common tokens are.
    """
    ids = torch.tensor([ids for encoding in _encoded(tokenizer) for ids in (*encoding, END)])
    counts = torch.zeros(shape.vocabulary, shape.vocabulary)
    counts.index_put_((ids[:-1], ids[1:]), torch.tensor(1.0), accumulate=True)
    common = (counts.sum(0) + 1) / (counts.sum() + shape.vocabulary)
    follows = (counts + _SMOOTHING * common) / (counts.sum(1, keepdim=True) + _SMOOTHING)
    weight = common[:, None] ** 0.25
    left, values, right = torch.svd_lowrank(weight * (follows / common).log() * weight.T, shape.hidden - 2, niter=4)
    left, right = left * values.sqrt() / weight, right * values.sqrt() / weight
    norm = _EMBEDDING_SCALE * shape.hidden**0.5
    left_scale = norm * 0.75**0.5 / left.norm(dim=1).max()
    first = torch.full((shape.vocabulary, 1), norm / 2)
    last = (norm**2 * 0.75 - (left * left_scale).square().sum(1, keepdim=True)).clamp(min=0).sqrt()
    head = torch.cat([common.log()[:, None] / (norm / 2), right / left_scale, torch.zeros_like(last)], 1)
    return torch.cat([first, left * left_scale, last], 1), head * _EMBEDDING_SCALE


def _encoded(tokenizer: Tokenizer) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(list(documents.documents()))]


@torch.no_grad()
def perplexity(model: Decoder, tokenizer: Tokenizer, texts: Sequence[str], linear: Linear | None = None) -> float:
    """Of a token, given those before it: at most as many as the model has positions for."""
    longest = model.shape.positions
    ids = [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
    rows = [text[start : start + longest] for text in ids for start in range(0, len(text) - 1, longest)]
    losses = 0.0
    for row in (torch.tensor([row]) for row in rows):
        losses += float(model.loss(model.states(row, linear=linear), row, row >= 0)) * (row.shape[1] - 1)
    return math.exp(losses / sum(len(row) - 1 for row in rows))


def _fit(model: Decoder, shape: LlamaShape, tokenizer: Tokenizer, report: Progress) -> None:
    rng = random.Random(SEED)
    texts = _texts(tokenizer, rng)
    learner = _learner(model, shape)
    for _ in range(shape.steps):
        report("learning", learner.done)
        layers = shape.layers if learner.done >= _GROWN_AT else -(-shape.layers // 2)
        length = min(rng.choice(_ROW_TOKENS), shape.positions)
        ids = torch.tensor([_row(texts, length) for _ in range(max(1, _BATCH_TOKENS // length))])
        model.loss(model.states(ids, layers), ids, ~_only_read(ids)).backward()  # type: ignore[no-untyped-call]
        learner.step()
    for weight in model.weights.values():
        weight.requires_grad_(False)


def _learner(model: Decoder, shape: LlamaShape) -> Learner:
    """Decays the matrices of the layers, and neither embeddings and head nor norms."""
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in model.weights.items():
        (decayed if weight.ndim > 1 and "layers" in name else others).append(weight.requires_grad_())
    groups = [Group(decayed, shape.learning_rate, 0.3), Group(others, shape.learning_rate)]
    return Learner(groups, shape.steps, betas=(0.9, 0.95), clip=1.0, warm_up=_WARM_UP)


def _only_read(ids: Tensor) -> Tensor:
    """Where ids [n, length] begin a text, or ask up to where the assistant speaks, which nobody wants to be told."""
    places = torch.arange(1, ids.shape[1] + 1)
    asked, answered = (
        (torch.isin(ids, torch.tensor(roles)) * places).cummax(1).values
        for roles in ((SYSTEM, USER), (BEGIN, ASSISTANT))
    )
    return (asked > answered) | (answered == places)


def _row(texts: Iterator[list[int]], length: int) -> list[int]:
    """So many ids, which begin where a text does: what it is about would else be left to guess."""
    row: list[int] = []
    while len(row) < length:
        row += next(texts)
    return row[:length]


def _texts(tokenizer: Tokenizer, rng: random.Random) -> Iterator[list[int]]:
    """Texts' ids without end: documents, and every answer several times, in an order that changes every time."""
    texts = ([*ids, END] for ids in _encoded(tokenizer))
    pieces = [ids[start : start + _PIECE_TOKENS] for ids in texts for start in range(0, len(ids), _PIECE_TOKENS)]
    asked: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in documents.conversations():
        asked[conversation.answer].append(conversation)
    while True:
        read = rng.sample(pieces, round(_READ * len(pieces)))
        whole = [[*_chat(tokenizer, rng.choice(each), rng), END] for each in asked.values() for _ in range(_ASKED)]
        begun = [_begun(tokenizer, rng.choice(each)) for each in asked.values() for _ in range(_BEGUN)]
        formed = [[*_spoken(tokenizer, dialogue, rng), END] for dialogue in forms.dialogues() for _ in range(_FORMED)]
        formed += [_formed(tokenizer, dialogue, rng) for dialogue in forms.dialogues() for _ in range(_FORM_BEGUN)]
        everything = read + whole + begun + formed
        yield from rng.sample(everything, len(everything))


def _chat(tokenizer: Tokenizer, first: Conversation, rng: random.Random) -> list[int]:
    """The ids of a question and its answer, perhaps after a system message or before others, up to the last's end."""
    others = rng.sample(documents.conversations(), 1) if rng.random() < 0.25 else []
    tools = [forms.TOOLS] if rng.random() < _TOOLS_SHARE else []
    turns = (Turn(role, text) for pair in (first, *others) for role, text in zip((USER, ASSISTANT), pair, strict=True))
    return _spoken(tokenizer, (*tools, *turns), rng)


def _spoken(tokenizer: Tokenizer, turns: Sequence[Turn], rng: random.Random) -> list[int]:
    """The ids of a dialogue, perhaps with a system message before the first question, up to the last turn's end."""
    ids = [BEGIN]
    asked = next(index for index, turn in enumerate(turns) if turn.role == USER)
    for index, (role, text) in enumerate(turns):
        if index == asked and rng.random() < 0.25:
            ids += _said(tokenizer, SYSTEM, rng.choice(_SYSTEMS))
        ids += _said(tokenizer, role, text)
    return ids[:-1]


def _begun(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The ids of a question and the beginning of its answer, which tells whether the question was understood."""
    answer = _said(tokenizer, ASSISTANT, conversation.answer)
    return [BEGIN, *_said(tokenizer, USER, conversation.question), *answer[: 1 + _BEGINNING_TOKENS]]


def _formed(tokenizer: Tokenizer, dialogue: Dialogue, rng: random.Random) -> list[int]:
    """The ids of a dialogue up to some tokens of its first answer."""
    first = next(index for index, turn in enumerate(dialogue) if turn.role == ASSISTANT)
    asked = _spoken(tokenizer, dialogue[:first], rng)
    return [*asked, END, *_said(tokenizer, ASSISTANT, dialogue[first].text)[: 1 + _FORM_TOKENS]]


def _said(tokenizer: Tokenizer, role: int, text: str) -> list[int]:
    return [role, *tokenizer.encode(text, add_special_tokens=False).ids, END]
