"""A model's version changes with its files, and what gateways and replicas must agree on only with that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pliant.models.encoder_info import EncoderInfo
from pliant.models.revision import interface, revision

INFO = EncoderInfo("classify", ("x", "y"), 8, pairs=False, scores="softmax", vocabulary=6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"])
def test_each_file_of_a_model_makes_another_revision(folder: Path, name: str) -> None:
    before = revision(folder)
    (folder / "notes.txt").write_text("of no model")
    assert revision(folder) == before
    (folder / name).write_text("changed")
    assert revision(folder) != before


def test_new_weights_are_read_alike(folder: Path) -> None:
    before = interface(folder, INFO)
    (folder / "model.safetensors").write_text("changed")
    assert interface(folder, INFO) == before
    changed = [
        replace(INFO, labels=("y", "x")),
        replace(INFO, pairs=True),
        replace(INFO, task="tokens"),
        replace(INFO, prompts={"query": "a"}),
        replace(INFO, lowercase=True),
    ]
    assert before not in {interface(folder, info) for info in changed}
    (folder / "tokenizer.json").write_text("changed")
    assert interface(folder, INFO) != before
