"""How names become folders, and what is said when they do not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pliant.errors import ModelError
from pliant.models import sources

BERT = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "id2label": {str(index): f"label {index}" for index in range(12)},
}


def model_folder(folder: Path, config: dict[str, Any], *files: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for file in files:
        (folder / file).write_text("")
    return folder


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, pliant.models.sources; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**BERT, "architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ({"model_type": "bert"}, "ForSequenceClassification"),
        ({"architectures": BERT["architectures"]}, "max_position_embeddings"),
    ],
)
def test_describe_refuses_what_no_encoder_does(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        sources.describe(model_folder(tmp_path, config))


def test_a_model_of_the_zoo_is_known_before_it_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    info = sources.check("zoo/topics-embedding")
    assert (info.task, info.dimensions, info.normalized, info.max_length) == ("embed", 256, True, 512)
    assert sources.check("zoo/topics-large").chooses
    with pytest.raises(ModelError, match=r"^zoo/tiny-llama: its architecture is LlamaForCausalLM"):
        sources.check("zoo/tiny-llama")


def test_describe_refuses_a_folder_without_a_readable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        sources.describe(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        sources.describe(tmp_path)


@pytest.mark.parametrize("resolve", [sources.fetch, sources.check])
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("zoo/topics-huge", "zoo/topics-small, zoo/topics-large"),
        ("./no/such/folder", "no such folder"),
        ("some-owner/no-such-model-of-theirs", "HF_HUB_OFFLINE"),
        ("a/b/c", "OWNER/NAME"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_in_one_line(resolve: Any, model: str, words: str, tmp_path: Path) -> None:
    code = (
        "import sys; from pliant.models import sources; from pliant.errors import ModelError\n"
        f"try: sources.{resolve.__name__}({model!r})\n"
        "except ModelError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "PLIANT_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment).stdout
    assert said.startswith(f"{model}: ")
    assert words in said
    assert said.count("\n") == 1


def test_a_complete_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, BERT, "model.safetensors", "tokenizer.json")
    assert sources.fetch(str(folder)) == folder
    assert sources.check(str(folder)) == sources.describe(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        sources.fetch(str(model_folder(tmp_path, BERT, "tokenizer.json")))


def test_an_old_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    old = model_folder(tmp_path / "old", BERT, "model.safetensors")
    (old / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yield"]))
    reports: list[str] = []
    folder = sources.fetch(str(old), progress=lambda text, _done: reports.append(text))
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["yield"] == 5
    assert (folder / "model.safetensors").samefile(old / "model.safetensors")
    assert sources.describe(folder).labels == sources.describe(old).labels
    assert sources.fetch(str(old), progress=lambda text, _done: reports.append(text)) == folder
    assert len(reports) == 1


def test_a_folder_without_any_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        sources.fetch(str(model_folder(tmp_path / "bare", BERT, "model.safetensors")))
