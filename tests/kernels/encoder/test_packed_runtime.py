"""A packed runtime answers many texts as transformers answers each alone, whatever computes it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_classifiers
from support.tiny_classifiers import HEADS, LAYERS, VOCABULARY

from pliant.kernels import c_compiler
from pliant.kernels.encoder import packed_runtime
from pliant.kernels.encoder.packed_runtime import load
from pliant.kernels.encoder.texts import Text

LENGTHS = (3, 60, 1, 1, 17)
KINDS = ["bert", "roberta", "modernbert", "deberta-v2", "albert"]


def texts(token_types: int) -> list[Text]:
    rng = np.random.default_rng(7)
    made = [Text(rng.integers(2, VOCABULARY, length), rng.integers(0, token_types, length)) for length in LENGTHS]
    made[1] = Text(made[1].ids)
    return [Text(made[0].ids.tolist(), made[0].types.tolist()), *made[1:]]


@torch.inference_mode()
def expected(model: Any, text: Text) -> Any:
    ids = torch.tensor(np.asarray(text.ids))[None]
    types = {} if text.types is None else {"token_type_ids": torch.tensor(np.asarray(text.types))[None]}
    known = getattr(model.config, "type_vocab_size", 0)
    return model(input_ids=ids, output_attentions=True, **(types if known else {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("task", ["classify", "tokens"])
def test_answers_as_transformers_answers_each_alone(encoder_backend: str, kind: str, task: str, tmp_path: Path) -> None:
    folder = tiny_classifiers.save(tmp_path, kind, task)
    runtime = load(folder, 60)
    assert runtime.backend == ("transformers" if kind == "albert" else encoder_backend)
    theirs = tiny_classifiers.read(folder, task)
    given = texts(2 if kind in ("bert", "roberta", "albert") else 1)
    for text, output in zip(given, runtime.run_all(given), strict=True):
        wanted = expected(theirs, text).logits[0]
        np.testing.assert_allclose(output.logits, wanted, atol=1e-4)
        assert output.importance is None
        np.testing.assert_allclose(runtime(text.ids, text.types), wanted, atol=1e-4)


def test_gives_importance_where_it_is_wanted(encoder_backend: str, tmp_path: Path) -> None:
    folder = tiny_classifiers.save(tmp_path, "bert")
    runtime, theirs = load(folder, 60), tiny_classifiers.read(folder)
    given = texts(2)
    for text, output in zip(given, runtime.run_all(given, importance=True), strict=True):
        output_of_theirs = expected(theirs, text)
        np.testing.assert_allclose(output.logits, output_of_theirs.logits[0], atol=1e-4)
        received = sum(layer[0].sum((0, 1)) for layer in output_of_theirs.attentions)
        assert output.importance is not None
        np.testing.assert_allclose(output.importance, received, atol=1e-4 * LAYERS * HEADS * len(text.ids))


def test_refuses_what_it_cannot_read(encoder_backend: str, tmp_path: Path) -> None:
    runtime = load(tiny_classifiers.save(tmp_path, "bert"), 60)
    good = Text([1, 2])
    for text, reason in [
        (Text([]), "got 0 token ids; this runtime takes 1 to 60"),
        (Text([1] * 61), "got 61 token ids"),
        (Text([1, VOCABULARY]), "must lie in 0 to 98"),
        (Text([1, -1]), "must lie in 0 to 98"),
        (Text([1, 2], [0, 2]), "a token type from 0 to 1 for each"),
        (Text([1, 2], [0]), "a token type from 0 to 1 for each"),
    ]:
        with pytest.raises(ValueError, match=reason):
            runtime.run_all([good, text])
    with pytest.raises(ValueError, match="got no texts"):
        runtime.run_all([])


def test_without_a_compiler_it_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(c_compiler, "compiler", lambda: None)
    packed_runtime._warn_once.cache_clear()
    folder = tiny_classifiers.save(tmp_path, "bert")
    assert [load(folder, 60).backend for _ in range(2)] == ["torch", "torch"]
    (record,) = caplog.records
    assert "no C compiler was found" in record.message
