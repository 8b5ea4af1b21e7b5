"""Weights are found by whatever names and in whatever files transformers would find them; what is missing is told."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_classifiers
from torch import Tensor

from pliant.errors import ModelError
from pliant.kernels.encoder.eager_classifier import EagerClassifier

TEXT = torch.tensor([5, 9, 7, 30, 8])

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_classifiers.save(tmp_path_factory.mktemp("bert"), "bert")


def changed(folder: Path, into: Path, change: Change) -> Path:
    """A copy of the model in `folder` with other weights."""
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(change(load_file(folder / "model.safetensors")), into / "model.safetensors", metadata={"format": "pt"})
    return into


def renamed(pattern: str, by: str) -> Change:
    return lambda weights: {re.sub(pattern, by, name): weight for name, weight in weights.items()}


def answer(folder: Path) -> Tensor:
    return EagerClassifier(folder, device="cpu", dtype="float32").unpadded(TEXT)


def more(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    positions = {"bert.embeddings.position_ids": torch.arange(128)[None]}
    return weights | positions | {"cls.predictions.bias": torch.ones(99), "bert.embeddings_project.bias": torch.ones(2)}


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: renamed(r"LayerNorm\.bias", "LayerNorm.beta")(
            renamed(r"LayerNorm\.weight", "LayerNorm.gamma")(weights)
        ),
        renamed(r"^bert\.", ""),
        more,
        lambda weights: {name: weight.double() for name, weight in weights.items()},
    ],
    ids=["old names", "no prefix", "more than needed", "float64"],
)
def test_other_names_and_types(bert: Path, tmp_path: Path, change: Change) -> None:
    folder = changed(bert, tmp_path, change)
    torch.testing.assert_close(answer(folder), answer(bert))
    theirs = tiny_classifiers.read(folder)(input_ids=TEXT[None]).logits[0]
    torch.testing.assert_close(answer(folder), theirs, rtol=1e-5, atol=1e-5)


def test_weights_in_several_files(bert: Path, tmp_path: Path) -> None:
    tiny_classifiers.read(bert).save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(answer(tmp_path), answer(bert))


def without(*names: str) -> Change:
    return lambda weights: {name: weight for name, weight in weights.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            without("classifier.weight", "bert.encoder.layer.1.attention.self.key.bias"),
            "is no trained encoder for its task: it has no weights for "
            r"bert\.encoder\.layer\.1\.attention\.self\.key\.bias, classifier\.weight$",
        ),
        (without("bert.embeddings.token_type_embeddings.weight"), "no weights for bert.embeddings.token_type_embedd"),
        (
            lambda weights: weights | {"classifier.weight": torch.ones(5, 32)},
            r"cannot be read as an encoder for its task: classifier\.weight is \[5, 32\] instead of \[3, 32\]",
        ),
        (
            lambda weights: weights | {"bert.encoder.layer.0.attention.self.query.bias": torch.ones(31)},
            r"query\.bias is \[31\] instead of \[32\]",
        ),
        (
            lambda weights: {name: weight.to(torch.int8) for name, weight in weights.items()},
            "is stored as I8 instead of one of F64, F32, F16, BF16",
        ),
    ],
    ids=["missing", "no types", "other labels", "other size", "integers"],
)
def test_what_does_not_fit_is_told(bert: Path, tmp_path: Path, change: Change, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        answer(changed(bert, tmp_path, change))


def test_a_model_with_fewer_layers_than_its_config_says(bert: Path, tmp_path: Path) -> None:
    folder = changed(bert, tmp_path, lambda weights: weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"no weights for bert\.encoder\.layer\.3\.attention"):
        answer(folder)


def test_files_that_are_no_safetensors(bert: Path, tmp_path: Path) -> None:
    folder = changed(bert, tmp_path, lambda weights: weights)
    (folder / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        answer(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor"):
        answer(folder)
