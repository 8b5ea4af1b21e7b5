"""Reads the classifiers that `model` computes from what transformers saved."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from pliant.errors import ModelError
from pliant.kernels.encoder.model import EncoderClassifier
from pliant.kernels.saved_tensors import SavedTensors, Size
from pliant.models.encoder_shape import EncoderShape

_EMBEDDINGS = {
    "words": "embeddings.word_embeddings.weight",
    "positions": "embeddings.position_embeddings.weight",
    "norm.weight": "embeddings.LayerNorm.weight",
    "norm.bias": "embeddings.LayerNorm.bias",
    "projection.weight": "embeddings_project.weight",
    "projection.bias": "embeddings_project.bias",
}
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_BERT_LAYER: dict[str, tuple[str, ...]] = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "output": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "up": ("intermediate.dense",),
    "down": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}
_DISTILBERT_LAYER: dict[str, tuple[str, ...]] = {
    "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "output": ("attention.out_lin",),
    "attention_norm": ("sa_layer_norm",),
    "up": ("ffn.lin1",),
    "down": ("ffn.lin2",),
    "mlp_norm": ("output_layer_norm",),
}
_HEADS = {
    "bert": {"dense": "bert.pooler.dense", "out": "classifier"},
    "roberta": {"dense": "classifier.dense", "out": "classifier.out_proj"},
    "electra": {"dense": "classifier.dense", "out": "classifier.out_proj"},
    "distilbert": {"dense": "pre_classifier", "out": "classifier"},
}
_OLD = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
"""What checkpoints that began in TensorFlow call the weights of norms."""


def load(
    folder: Path, shape: EncoderShape, *, device: str, dtype: torch.dtype, importance: bool = False
) -> EncoderClassifier:
    """The classifier of that shape in `folder`, ready to compute; `importance` as `EncoderClassifier` says.

    Raises ModelError if weights are missing or do not fit.
    """
    with torch.device("meta"):
        model = EncoderClassifier(shape, importance=importance)
    sizes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    parts = {name: _parts(name, shape) for name in sizes}
    types = f"{shape.family}.{_TOKEN_TYPES}"
    wanted: dict[str, Size] = {types: (shape.token_types, shape.embedding)} if shape.token_types else {}
    for name, (rows, *columns) in sizes.items():
        wanted |= dict.fromkeys(parts[name], (rows // len(parts[name]), *columns))
    saved = _Saved(folder, shape.family, wanted)
    state = {name: saved.read(*of) for name, of in parts.items()}
    if shape.token_types:
        state["encoder.positions"] = state["encoder.positions"] + saved.read(types)[0]
    model.load_state_dict({name: tensor.to(device, dtype) for name, tensor in state.items()}, assign=True)
    return model.eval().requires_grad_(False)


class _Saved:
    """The tensors in a folder, by the names that transformers has for those of a classifier of that family.

    Raises ModelError unless those `wanted` are there, in the sizes wanted.
    """

    def __init__(self, folder: Path, family: str, wanted: Mapping[str, Size]) -> None:
        self._tensors = SavedTensors(folder)
        self._names: dict[str, str] = {}
        for name in self._tensors.names:
            known = name
            for old, new in _OLD.items():
                known = known.replace(old, new)
            self._names |= {known: name, f"{family}.{known}": name}
        if missing := sorted(wanted.keys() - self._names.keys()):
            raise ModelError(f"{folder} is no trained sequence classifier: it has no weights for {', '.join(missing)}")
        problems = (self._tensors.problem(self._names[name], size) for name, size in wanted.items())
        if problem := next(filter(None, problems), None):
            raise ModelError(f"{folder} cannot be read as a sequence classifier: {problem}")

    def read(self, *names: str) -> Tensor:
        """The tensors of those names, one below the other."""
        found = [self._tensors[self._names[name]] for name in names]
        return found[0] if len(found) == 1 else torch.cat(found)


def _parts(name: str, shape: EncoderShape) -> list[str]:
    """The tensors that make up a parameter of `EncoderClassifier`, one below the other, by transformers' names."""
    part, _, rest = name.partition(".")
    if part == "head":
        module, _, kind = rest.partition(".")
        return [f"{_HEADS[shape.family][module]}.{kind}"]
    if rest in _EMBEDDINGS:
        return [f"{shape.family}.{_EMBEDDINGS[rest]}"]
    _, depth, module, kind = rest.split(".")
    distilbert = shape.family == "distilbert"
    layer, layers = (_DISTILBERT_LAYER, "transformer.layer") if distilbert else (_BERT_LAYER, "encoder.layer")
    return [f"{shape.family}.{layers}.{depth}.{theirs}.{kind}" for theirs in layer[module]]
