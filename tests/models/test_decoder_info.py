"""What is said of language models, from the files that lie beside their weights."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from pliant.errors import ModelError
from pliant.models import sources
from pliant.sampling import Sampling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 7,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def decoder_folder(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {"config": LLAMA, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def sharded_folder(folder: Path) -> Path:
    decoder_folder(folder, tokenizer={})
    weights = {f"tensor.{index}": shard for index, shard in enumerate(SHARDS * 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    for shard in SHARDS:
        (folder / shard).write_text("")
    return folder


def test_a_bare_config_is_enough(tmp_path: Path) -> None:
    info = sources.describe_decoder(decoder_folder(tmp_path))
    assert (info.shape.layers, info.vocabulary, info.max_length) == (2, 100, 128)
    assert info.eos == (7,)
    assert info.chat_template is None
    assert info.special_tokens == {}
    assert info.sampling == Sampling()
    assert sources.check_decoder(str(tmp_path)) == info.shape


@pytest.mark.parametrize(("given", "eos"), [(9, (9,)), ([9, 8], (9, 8)), (0, (0,)), (None, (7,))])
def test_the_generation_config_knows_better_what_ends_an_answer(tmp_path: Path, given: Any, eos: Any) -> None:
    assert sources.describe_decoder(decoder_folder(tmp_path, generation_config={"eos_token_id": given})).eos == eos


def test_the_generation_config_sets_the_sampling_if_it_samples(tmp_path: Path) -> None:
    chance = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "typical_p": 0.9}
    given = {"do_sample": True, "repetition_penalty": 1.1, **chance}
    folder = decoder_folder(tmp_path, generation_config=given)
    assert sources.describe_decoder(folder).sampling == Sampling(repetition_penalty=1.1, **chance)
    decoder_folder(tmp_path, generation_config={**given, "do_sample": False})
    assert sources.describe_decoder(folder).sampling == Sampling(repetition_penalty=1.1)
    decoder_folder(tmp_path, generation_config={**given, "top_p": 7})
    with pytest.raises(ModelError, match=r"generation_config\.json.*top_p"):
        sources.describe_decoder(folder)


def test_special_tokens_are_texts_however_they_are_saved(tmp_path: Path) -> None:
    tokenizer = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "add_bos_token": True}
    folder = decoder_folder(
        tmp_path, tokenizer_config=tokenizer, special_tokens_map={"eos_token": "old", "pad_token": "<pad>"}
    )
    assert sources.describe_decoder(folder).special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }


def test_the_chat_template_may_lie_in_three_places(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "several"}]
    folder = decoder_folder(tmp_path, tokenizer_config={"chat_template": several})
    assert sources.describe_decoder(folder).chat_template == "several"
    decoder_folder(tmp_path, tokenizer_config={"chat_template": "one"})
    assert sources.describe_decoder(folder).chat_template == "one"
    (folder / "chat_template.jinja").write_text("é")
    assert sources.describe_decoder(folder).chat_template == "é"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM"),
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers"),
        ([], "no JSON object"),
    ],
)
def test_what_is_no_decoder_is_refused_by_name(tmp_path: Path, config: Any, words: str) -> None:
    folder = decoder_folder(tmp_path, config=config)
    for refuse in (lambda: sources.describe_decoder(folder), lambda: sources.check_decoder(str(folder))):
        with pytest.raises(ModelError, match=words) as raised:
            refuse()
        assert str(raised.value).startswith(f"{folder}: ")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        sources.describe_decoder(tmp_path)


def test_the_zoo_tells_a_decoder_from_a_classifier() -> None:
    with pytest.raises(ModelError, match=r"zoo/topics-small: .*BertForSequenceClassification"):
        sources.check_decoder("zoo/topics-small")


def test_weights_may_be_in_several_files_which_must_all_be_there(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path)
    assert sources.fetch(str(folder)) == folder
    (folder / SHARDS[1]).unlink()
    with pytest.raises(ModelError, match=f"has no {SHARDS[1]}"):
        sources.fetch(str(folder))
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="no index of weights"):
        sources.fetch(str(folder))


def test_a_download_asks_for_all_that_is_read_and_is_kept_once_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path / "cache"))
    asked: list[Any] = []

    def snapshot(model: str, allow_patterns: Any = None, local_files_only: bool = False) -> str:
        if not local_files_only:
            asked.append(allow_patterns)
            sharded_folder(tmp_path / "snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    decoder_folder(tmp_path / "snapshot")
    assert sources.fetch("owner/model") == tmp_path / "snapshot"
    assert {"generation_config.json", "chat_template.jinja", "model.safetensors.index.json"} <= set(asked[0])
    assert sources.fetch("owner/model") == tmp_path / "snapshot"
    assert len(asked) == 1
    (tmp_path / "snapshot" / SHARDS[0]).unlink()
    sources.fetch("owner/model")
    assert len(asked) == 2
