"""Reads encoders from what transformers and sentence-transformers saved; imports no torch.

Tensors have the names and sizes that the `EncoderModel` of the same shape has for them.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pliant.errors import ModelError
from pliant.kernels.encoder.distances import disentangled_buckets, mpnet_buckets
from pliant.kernels.saved_tensors import SavedTensors, Size
from pliant.models.encoder_head import HeadShape, Sizes, head_of
from pliant.models.encoder_shape import EncoderShape

_EMBEDDINGS = {
    "words": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
    "projection.weight": "embeddings_project.weight",
    "projection.bias": "embeddings_project.bias",
}
_MODERNBERT_EMBEDDINGS = {
    "words": "embeddings.tok_embeddings.weight",
    "norm.weight": "embeddings.norm.weight",
    "last_norm.weight": "final_norm.weight",
}
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_Layer = Mapping[str, tuple[str, ...]]
_BERT_LAYER: _Layer = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
_DEBERTA_QKV = ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
_LAYERS: dict[str, tuple[str, _Layer]] = {
    "bert": ("encoder.layer", _BERT_LAYER),
    "roberta": ("encoder.layer", _BERT_LAYER),
    "electra": ("encoder.layer", _BERT_LAYER),
    "deberta": ("encoder.layer", {**_BERT_LAYER, "qkv": _DEBERTA_QKV}),
    "mpnet": (
        "encoder.layer",
        {
            **_BERT_LAYER,
            "qkv": ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
            "output": ("attention.attn.o",),
            "attention_norm": ("attention.LayerNorm",),
        },
    ),
    "distilbert": (
        "transformer.layer",
        {
            "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
            "output": ("attention.out_lin",),
            "attention_norm": ("sa_layer_norm",),
            "up": ("ffn.lin1",),
            "down": ("ffn.lin2",),
            "mlp_norm": ("output_layer_norm",),
        },
    ),
    "modernbert": (
        "layers",
        {
            "qkv": ("attn.Wqkv",),
            "output": ("attn.Wo",),
            "attention_norm": ("attn_norm",),
            "up": ("mlp.Wi",),
            "down": ("mlp.Wo",),
            "mlp_norm": ("mlp_norm",),
        },
    ),
}
"""By family: where layers lie, and what their parts are called."""
_PREFIXES = {"modernbert": "model"}
_CLASSIFIERS = {
    "bert": ("bert.pooler.dense", "classifier"),
    "roberta": ("classifier.dense", "classifier.out_proj"),
    "electra": ("classifier.dense", "classifier.out_proj"),
    "mpnet": ("classifier.dense", "classifier.out_proj"),
    "distilbert": ("pre_classifier", "classifier"),
    "deberta": ("pooler.dense", "classifier"),
    "modernbert": ("head.dense", "classifier"),
}
"""By family: the two linear layers of a classifier of texts; one of tokens has the last, and is always "classifier"."""
_HEAD_NORM = "head.norm"
_FAR = "encoder.rel_embeddings.weight"
_FAR_NORM = "encoder.LayerNorm"
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""What checkpoints that began in TensorFlow call the weights of norms."""


class EncoderWeights(NamedTuple):
    """An encoder and its head, as numbers."""

    shape: EncoderShape
    head: HeadShape
    tensors: dict[str, np.ndarray]
    """By name; float32, but for "encoder.rows", which is int64."""


def read(folder: Path, config: Mapping[str, Any], shape: EncoderShape) -> EncoderWeights:
    """Of the model of that shape in `folder`, whose config.json holds `config`.

    Raises ModelError if weights are missing or do not fit, or the folder describes no head.
    """
    head = head_of(folder, config, Sizes(shape.family, shape.hidden, shape.norm_eps))
    return EncoderWeights(shape, head, _Reader(folder, shape, head).read_all(_sizes(shape, head)))


def _sizes(shape: EncoderShape, head: HeadShape) -> dict[str, Size]:
    hidden, width, biased = shape.hidden, shape.embedding, shape.rotary is None
    reach = 2 * shape.max_length - 1
    found: dict[str, Size] = {"encoder.words": (shape.vocab, width), **_norm("encoder.norm", width, biased)}
    if shape.adds_positions:
        found["encoder.positions"] = (shape.positions, width)
    if shape.token_types > 1:
        found["encoder.types"] = (shape.token_types, width)
    if width != hidden:
        found |= _linear("encoder.projection", width, hidden)
    if shape.bias_buckets:
        found["encoder.distances"] = (shape.heads, reach)
    if shape.disentangled:
        found["encoder.rows"] = (reach,)
    if shape.rotary:
        found |= _norm("encoder.last_norm", hidden, False)
    for depth in range(shape.layers):
        layer = f"encoder.layers.{depth}"
        found |= _linear(f"{layer}.qkv", hidden, 3 * hidden, biased) | _linear(
            f"{layer}.output", hidden, hidden, biased
        )
        found |= _linear(f"{layer}.up", hidden, shape.intermediate * (1 if biased else 2), biased)
        found |= _linear(f"{layer}.down", shape.intermediate, hidden, biased)
        if biased or depth:
            found |= _norm(f"{layer}.attention_norm", hidden, biased)
        found |= _norm(f"{layer}.mlp_norm", hidden, biased)
        if shape.disentangled:
            far = shape.heads, hidden // shape.heads, 2 * shape.disentangled.buckets
            terms = {"c2p": "far_keys", "p2c": "far_queries"}
            found |= {f"{layer}.{terms[term]}": far for term in shape.disentangled.terms}
    for index, stage in enumerate(head.stages):
        found |= _linear(f"head.stages.{index}.linear", stage.inputs, stage.outputs, stage.bias)
        if stage.norm_eps is not None:
            found |= _norm(f"head.stages.{index}.norm", stage.outputs, False)
    return found


def _linear(name: str, ins: int, outs: int, biased: bool = True) -> dict[str, Size]:
    weight: dict[str, Size] = {f"{name}.weight": (outs, ins)}
    return weight | {f"{name}.bias": (outs,)} if biased else weight


def _norm(name: str, width: int, biased: bool) -> dict[str, Size]:
    weight: dict[str, Size] = {f"{name}.weight": (width,)}
    return weight | {f"{name}.bias": (width,)} if biased else weight


class _Reader:
    """Turns saved tensors into ours: first all are looked up, then read."""

    def __init__(self, folder: Path, shape: EncoderShape, head: HeadShape) -> None:
        self._folder, self._shape, self._head = folder, shape, head
        self._saved = _Saved(folder, _PREFIXES.get(shape.family, shape.family))
        self._layers, self._layer = _LAYERS[shape.family]

    def read_all(self, wanted: Mapping[str, Size]) -> dict[str, np.ndarray]:
        recipes = {name: self._recipe(name, size) for name, size in wanted.items()}
        self._saved.check()
        return {name: np.ascontiguousarray(recipe()) for name, recipe in recipes.items()}

    def _recipe(self, name: str, size: Size) -> Callable[[], np.ndarray]:
        """How to make the tensor `name` once all that it needs is known to be there."""
        part, _, rest = name.partition(".")
        if part == "head":
            return self._of_head(rest, size)
        match rest.split("."):
            case ["layers", depth, "far_keys" | "far_queries" as far]:
                return self._far(far, depth)
            case ["layers", depth, module, kind]:
                return self._of_layer(depth, module, kind, size)
            case ["types"]:
                types = self._saved.want(_TOKEN_TYPES, size)
                return lambda: types() - types()[0]
            case ["positions"]:
                return self._positions(size)
            case ["distances"]:
                table = self._saved.want("encoder.relative_attention_bias.weight", (self._shape.bias_buckets, size[0]))
                return lambda: table()[mpnet_buckets(size[1] // 2 + 1, self._shape.bias_buckets)].T
            case ["rows"]:
                disentangled = self._shape.disentangled
                assert disentangled
                return lambda: disentangled_buckets(size[0] // 2 + 1, disentangled)
        names = _MODERNBERT_EMBEDDINGS if self._shape.family == "modernbert" else _EMBEDDINGS
        return self._saved.want(names[rest], size)

    def _positions(self, size: Size) -> Callable[[], np.ndarray]:
        positions = self._saved.want(_EMBEDDINGS["positions"], size)
        if not self._shape.token_types:
            return positions
        types = self._saved.want(_TOKEN_TYPES, (self._shape.token_types, size[1]))
        return lambda: positions() + types()[0]

    def _of_layer(self, depth: str, module: str, kind: str, size: Size) -> Callable[[], np.ndarray]:
        theirs = self._layer[module]
        rows, *columns = size
        prefix = f"{self._layers}.{depth}"
        parts = [self._saved.want(f"{prefix}.{each}.{kind}", (rows // len(theirs), *columns)) for each in theirs]
        scale = self._query_scale if module == "qkv" else 1.0
        if len(parts) == 1:
            return parts[0]
        return lambda: np.concatenate([parts[0]() * scale, *(part() for part in parts[1:])])

    @property
    def _query_scale(self) -> float:
        """DeBERTa divides scores by more than others do, as it adds up more of them."""
        disentangled = self._shape.disentangled
        return 1 / math.sqrt(1 + len(disentangled.terms)) if disentangled else 1.0

    def _far(self, far: str, depth: str) -> Callable[[], np.ndarray]:
        """What stands for distances in a layer: their embeddings, projected as keys or as queries are."""
        shape, disentangled = self._shape, self._shape.disentangled
        assert disentangled
        embeddings = self._saved.want(_FAR, (2 * disentangled.buckets, shape.hidden))
        kind = "key" if far == "far_keys" else "query"
        module = f"{self._layers}.{depth}.attention.self.{kind if disentangled.shared else f'pos_{kind}'}_proj"
        weight = self._saved.want(f"{module}.weight", (shape.hidden, shape.hidden))
        bias = self._saved.want(f"{module}.bias", (shape.hidden,))
        normed = ("weight", "bias") if disentangled.normed else ()
        norms = [self._saved.want(f"{_FAR_NORM}.{each}", (shape.hidden,)) for each in normed]
        scale = self._query_scale if kind == "query" else 1.0

        def read() -> np.ndarray:
            x = embeddings()
            if norms:
                gain, shift = (norm() for norm in norms)
                apart = x - x.mean(1, keepdims=True)
                x = apart / np.sqrt((apart**2).mean(1, keepdims=True) + shape.norm_eps) * gain + shift
            found: np.ndarray = (x @ weight().T + bias()) * scale
            return found.reshape(len(x), shape.heads, -1).transpose(1, 2, 0)

        return read

    def _of_head(self, rest: str, size: Size) -> Callable[[], np.ndarray]:
        _, index, module, kind = rest.split(".")
        stage = self._head.stages[int(index)]
        if stage.weights:
            own = _Saved(self._folder / stage.weights, "")
            found = own.want(f"linear.{kind}", size)
            own.check()
            return found
        if module == "norm":
            return self._saved.want(f"{_HEAD_NORM}.{kind}", size, of_head=True)
        dense, out = _CLASSIFIERS[self._shape.family]
        last = int(index) == len(self._head.stages) - 1
        theirs = dense if not last else "classifier" if self._head.task == "tokens" else out
        return self._saved.want(f"{theirs}.{kind}", size, of_head=True)


class _Saved:
    """The tensors in a folder, by the names that transformers has for those of a model with a head."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._tensors = SavedTensors(folder)
        self._names: dict[str, str] = {}
        self._wanted: dict[str, Size] = {}
        for name in self._tensors.names:
            known = name
            for old, new in _OLD.items():
                known = known.replace(old, new)
            self._names |= {known: name, f"{prefix}.{known}": name}

    def want(self, name: str, size: Size, *, of_head: bool = False) -> Callable[[], np.ndarray]:
        """What reads the tensor of that name once `check` has found all. Those of encoders have a prefix before."""
        name = name if of_head or not self._prefix or name.startswith(f"{self._prefix}.") else f"{self._prefix}.{name}"
        self._wanted[name] = size
        return lambda: self._tensors.array(self._names[name])

    def check(self) -> None:
        """Raise ModelError unless all that was wanted is there, in the sizes wanted."""
        if missing := sorted(self._wanted.keys() - self._names.keys()):
            raise ModelError(
                f"{self._folder} is no trained encoder for its task: it has no weights for {', '.join(missing)}"
            )
        problems = (self._tensors.problem(self._names[name], size) for name, size in self._wanted.items())
        if problem := next(filter(None, problems), None):
            raise ModelError(f"{self._folder} cannot be read as an encoder for its task: {problem}")
