"""Models that we can compute load without transformers, all others through it; both answer alike."""

import os
import subprocess
import sys

import pytest
import torch
from support import tiny_classifiers

from pliant.kernels.encoder.eager_classifier import EagerClassifier
from pliant.kernels.encoder.model import EncoderModel
from pliant.kernels.encoder.transformers_classifier import TransformersClassifier

OURS = ["bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "deberta-v2", "modernbert"]
THEIRS = ["albert"]
TYPES = {"distilbert": 0, "mpnet": 0, "deberta-v2": 0, "modernbert": 0}


@pytest.mark.parametrize("kind", [*OURS, *THEIRS])
@pytest.mark.parametrize("length", [1, 2, 40])
def test_answers_with_and_without_padding(classifier, kind, length) -> None:
    model = EagerClassifier(classifier(kind), device="cpu", dtype="float32")
    assert isinstance(model.model, EncoderModel if kind in OURS else TransformersClassifier)
    types = TYPES.get(kind, 2)
    assert model.facts == {"pad": tiny_classifiers.PAD, "vocabulary": tiny_classifiers.VOCABULARY, "token_types": types}
    ids = torch.arange(2, 2 + length)
    expected = tiny_classifiers.read(classifier(kind))(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(model.unpadded(ids), expected, rtol=1e-4, atol=1e-5)
    padded = torch.full((2, 1, length + 5), tiny_classifiers.PAD)
    padded[0, 0, :length], padded[1, 0] = ids, torch.arange(length + 5) < length
    torch.testing.assert_close(model(padded)[0], expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_ours_that_asks_for_more_goes_through_transformers(tmp_path) -> None:
    folder = tiny_classifiers.save(tmp_path, "bert", is_decoder=True)
    model = EagerClassifier(folder, device="cpu", dtype="float32")
    assert isinstance(model.model, TransformersClassifier)
    ids = torch.arange(2, 9)
    expected = tiny_classifiers.read(folder)(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(model.unpadded(ids), expected)


def test_no_heavy_package_is_imported_for_ours(classifier, tmp_path) -> None:
    code = """
import sys
from pathlib import Path
from pliant.kernels.encoder.compiled_classifier import load
for folder in sys.argv[1:]:
    for importance in (False, True):
        runtime = load(Path(folder), 100, importance=importance)
        runtime.run([5] * 9)
        print(runtime.backend)
heavy = "transformers", "torch._dynamo", "torch._inductor", "sympy", "timm", "torchvision"
print(*(name for name in heavy if name in sys.modules))
"""
    environment = os.environ | {"PATH": str(tmp_path), "PLIANT_CACHE": str(tmp_path), "CXX": ""}
    folders = [classifier(kind) for kind in OURS]
    done = subprocess.run([sys.executable, "-c", code, *folders], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["eager"] * 2 * len(OURS), done.stderr
