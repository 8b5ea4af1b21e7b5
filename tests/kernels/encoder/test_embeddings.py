"""Embeddings are sentence-transformers' own, for every way of pooling, also where texts are batched or packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import tiny_classifiers
from support.tiny_classifiers import VOCABULARY
from torch import Tensor
from torch.nn import functional

from pliant.errors import ModelError
from pliant.kernels.encoder.eager_classifier import load_model
from pliant.kernels.encoder.layout import Packed
from pliant.kernels.encoder.model import EncoderModel
from pliant.models.encoder_head import POOLINGS

LENGTHS = (9, 1, 30, 4)


def folder(root: Path, kind: str, pooling: str, *, dense: bool = False) -> Path:
    """A sentence-transformers folder: pooling, a Dense if that is wanted, and Normalize."""
    tiny_classifiers.save(root, kind, "embed")
    modules: list[tuple[str, dict[str, Any]]] = [("Pooling", {"pooling_mode": pooling})]
    if dense:
        settings = {"in_features": 32, "out_features": 7, "bias": True, "activation_function": "torch.nn.modules.Tanh"}
        modules.append(("Dense", settings))
    modules.append(("Normalize", {}))
    listed = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    for index, (module, settings) in enumerate(modules, 1):
        path = f"{index}_{module}"
        listed.append({"type": f"sentence_transformers.models.{module}", "path": path})
        (root / path).mkdir()
        (root / path / "config.json").write_text(json.dumps(settings))
    (root / "modules.json").write_text(json.dumps(listed))
    if dense:
        torch.manual_seed(1)
        weights = {"linear.weight": torch.randn(7, 32), "linear.bias": torch.randn(7)}
        save_file(weights, root / "2_Dense" / "model.safetensors")
    return root


def pooled(states: Tensor, how: str) -> Tensor:
    """Of one text's states [tokens, hidden], as sentence-transformers says."""
    weights = torch.arange(1.0, len(states) + 1)[:, None]
    found: dict[str, Tensor] = {
        "cls": states[0],
        "lasttoken": states[-1],
        "max": states.max(0).values,
        "mean": states.mean(0),
        "mean_sqrt_len_tokens": states.sum(0) / len(states) ** 0.5,
        "weightedmean": (states * weights).sum(0) / weights.sum(),
    }
    return found[how]


@torch.inference_mode()
def expected(root: Path, texts: list[Tensor], how: str, dense: bool) -> Tensor:
    theirs = tiny_classifiers.read(root, "embed")
    found = []
    for ids in texts:
        one = pooled(theirs(input_ids=ids[None]).last_hidden_state[0], how)
        if dense:
            torch.manual_seed(1)
            one = torch.tanh(torch.randn(7, 32) @ one + torch.randn(7))
        found.append(functional.normalize(one, dim=0))
    return torch.stack(found)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("kind", "how"), [*(("bert", how) for how in POOLINGS), ("modernbert", "mean"), ("albert", "cls")]
)
def test_embeddings_are_as_sentence_transformers_says(kind: str, how: str, dense: bool, tmp_path: Path) -> None:
    root = folder(tmp_path, kind, how, dense=dense)
    model = load_model(root, "cpu", torch.float32)
    texts = [torch.randint(4, VOCABULARY, (length,)) for length in LENGTHS]
    wanted = expected(root, texts, how, dense)
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=1)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    torch.testing.assert_close(model.padded(ids, mask), wanted, rtol=1e-5, atol=1e-5)
    for row, text in enumerate(texts):
        torch.testing.assert_close(model.padded(text[None])[0], wanted[row], rtol=1e-5, atol=1e-5)
    if isinstance(model, EncoderModel):
        torch.testing.assert_close(model(torch.cat(texts), None, Packed(LENGTHS, "cpu")), wanted, rtol=1e-5, atol=1e-5)


def test_sentence_transformers_itself_agrees(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    states = torch.randn(2, 9, 32)
    mask = torch.ones(2, 9, dtype=torch.int64)
    for how in POOLINGS:
        said = library.Pooling(32, pooling_mode=how)({"token_embeddings": states, "attention_mask": mask})
        ours = torch.stack([pooled(each, how) for each in states])
        torch.testing.assert_close(ours, said["sentence_embedding"])


def test_a_dense_without_weights_is_told(tmp_path: Path) -> None:
    root = folder(tmp_path, "bert", "mean", dense=True)
    (root / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"2_Dense: has neither model\.safetensors nor"):
        load_model(root, "cpu", torch.float32)
