"""One way to read texts for an encoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from pliant.models.encoder_info import EncoderInfo
from pliant.models.encoder_tokenizer import encoder_tokenizer

INFO = EncoderInfo("embed", (), 8, pairs=False, scores="none", vocabulary=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a tokenizer that pads and cuts by itself, and has a normalizer of its own."""
    made = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "A": 3}, "?"))
    made.normalizer = normalizers.Replace("-", " ")  # type: ignore[assignment]
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.enable_padding(length=6)
    made.enable_truncation(2)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(("longest", "ids"), [(None, [3, 2, 1, 0]), (3, [3, 2, 1])])
def test_it_pads_nothing_and_cuts_where_it_is_to(folder: Path, longest: int | None, ids: list[int]) -> None:
    assert encoder_tokenizer(folder, INFO, longest).encode("A-b a c").ids == ids


def test_texts_are_made_lower_case_before_the_tokenizer_s_own_normalizer(folder: Path) -> None:
    assert encoder_tokenizer(folder, replace(INFO, lowercase=True)).encode("A-B a c").ids == [1, 2, 1, 0]
