"""PEFT folders: what is understood of those that PEFT writes, and the one line that is said of all others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file
from support import decoders

from pliant.formats.adapter_info import CONFIG, WEIGHTS, AdapterError, AdapterInfo, bytes_of, read_adapter
from pliant.models import decoder_info
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import MODULES, LoraLayout
from pliant.torchvision_ops import declare

VARIANTS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "target_modules": list(MODULES)},
    "attention": {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]},
    "rank-stabilised": {"r": 9, "lora_alpha": 6, "use_rslora": True, "target_modules": "all-linear"},
    "some layers": {"r": 2, "target_modules": ["down_proj", "k_proj"], "layers_to_transform": [0, 2]},
    "by expression": {"r": 2, "target_modules": r".*\.1\.(self_attn\.o_proj|mlp\.up_proj)"},
    "excluding": {"r": 2, "target_modules": ["q_proj", "o_proj"], "exclude_modules": ["q_proj"]},
    "patterns": {
        "r": 4,
        "target_modules": list(MODULES),
        "rank_pattern": {"q_proj": 2, "^model.layers.1.mlp.up_proj": 5, r"layers\.[02]\.mlp\.up_proj": 6},
        "alpha_pattern": {"2.self_attn.q_proj": 32, "self_attn.q_proj": 3, "mlp.gate_proj|down_proj": 1.5},
        "use_rslora": True,
    },
    "orthogonal": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "mica": {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "mica"},
}
"""What PEFT trains that is plain LoRA in the end."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "is DoRA"),
    "biases": ({"bias": "all"}, "bias: 'all'"),
    "biases of B": ({"lora_bias": True}, "lora_bias"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "head": ({"target_modules": ["lm_head"]}, "adapts the output head"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, "adapts the embeddings"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "replication": ({"layer_replication": [(0, 2), (1, 3)]}, "repeats layers"),
    "activated": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
    "OLoRA": ({"init_lora_weights": "olora"}, "path_initial_model_for_weight_conversion"),
    "too large": ({"r": 40}, "has rank 40 in model.layers.0.self_attn.q_proj; at most 32"),
}
"""What PEFT trains that is not served, and why."""


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> DecoderShape:
    folder = tmp_path_factory.mktemp("model")
    decoders.save("llama3", folder)
    return decoder_info.read(folder).shape


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of all modules, not to be changed."""
    return peft_folder(tmp_path_factory.mktemp("adapter"), {"r": 4, "target_modules": list(MODULES)})[0]


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    copy = tmp_path / "adapter"
    copy.mkdir()
    for name in (CONFIG, WEIGHTS):
        (copy / name).write_bytes((saved / name).read_bytes())
    return copy


def peft_folder(folder: Path, config: dict[str, Any], **how: Any) -> tuple[Path, Any]:
    declare()
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(decoders.make("llama3"), LoraConfig(**{"target_modules": ["q_proj"], **config}))
    model.save_pretrained(str(folder), **how)
    return folder, model


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, **changes}))


def change_tensors(folder: Path, rename: Any = lambda name: name, **changes: np.ndarray[Any, Any]) -> None:
    tensors = {rename(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file({**tensors, **changes}, folder / WEIGHTS)


def refusal(folder: Path, shape: DecoderShape, most_rank: int = 32) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(folder, shape, most_rank)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 600
    return said


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_is_read_as_peft_reads_it(variant: str, shape: DecoderShape, tmp_path: Path) -> None:
    _, model = peft_folder(tmp_path, VARIANTS[variant])
    info = read_adapter(tmp_path, shape)
    expected = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    found = {
        module.a.removeprefix("base_model.model.").removesuffix(".lora_A.weight"): module for module in info.modules
    }
    assert {path: (module.rank, pytest.approx(module.scaling)) for path, module in found.items()} == expected
    tensors = load_file(info.weights)
    for path, module in found.items():
        assert path.startswith(f"model.layers.{module.layer}.")
        assert path.endswith(MODULES[module.module])
        assert tensors[module.a].shape[0] == tensors[module.b].shape[1] == module.rank
    assert 2 * len(info.modules) == len(tensors)
    for index, name in enumerate(MODULES):
        assert info.ranks[index] == max((r for path, (r, _) in expected.items() if path.endswith(name)), default=0)


def test_what_a_replica_is_told(saved: Path, shape: DecoderShape) -> None:
    info = read_adapter(saved, shape)
    ref = info.ref("tenant")
    assert (ref.name, ref.folder, ref.ranks, ref.rank) == ("tenant", str(saved), (4,) * 7, 4)
    assert ref.key == f"tenant@{info.revision}"
    assert bytes_of(ref.ranks, shape, 2) == 2 * LoraLayout(shape, ref.ranks).values


def test_neither_torch_nor_peft_is_imported() -> None:
    code = "import sys, pliant.formats.adapter_info; print([m for m in ('torch', 'peft', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("base_model.model.", ""),
        ("base_model.model.model.", ""),
        (".weight", ".default.weight"),
        (".weight", ".my_adapter.weight"),
    ],
)
def test_names_of_other_tools_are_understood(
    old: str, new: str, folder: Path, saved: Path, shape: DecoderShape
) -> None:
    change_config(folder, alpha_pattern={"up_proj": 3})
    before = read_adapter(folder, shape)
    change_tensors(folder, lambda name: name.replace(old, new))
    after = read_adapter(folder, shape)
    assert [each[:2] + each[4:] for each in after.modules] == [each[:2] + each[4:] for each in before.modules]
    assert after.modules[0].a == before.modules[0].a.replace(old, new)


def test_the_revision_follows_config_and_weights(folder: Path, shape: DecoderShape) -> None:
    revisions = [read_adapter(folder, shape).revision]
    assert revisions == [read_adapter(folder, shape).revision]
    change_config(folder, lora_alpha=5)
    revisions.append(read_adapter(folder, shape).revision)
    weights = bytearray((folder / WEIGHTS).read_bytes())
    weights[-1] ^= 1
    (folder / WEIGHTS).write_bytes(weights)
    revisions.append(read_adapter(folder, shape).revision)
    assert len(set(revisions)) == 3


def test_a_copy_has_the_revision_of_its_original(folder: Path, shape: DecoderShape, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert read_adapter(copied, shape).revision == read_adapter(folder, shape).revision


def test_the_base_is_told_but_not_compared(folder: Path, shape: DecoderShape) -> None:
    for written, told in (("some/model", "some/model"), ("", None), (7, None)):
        change_config(folder, base_model_name_or_path=written)
        assert read_adapter(folder, shape).base == told


@pytest.mark.parametrize("variant", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_more_than_plain_lora_is_refused(variant: str, shape: DecoderShape, tmp_path: Path) -> None:
    config, words = REFUSED[variant]
    peft_folder(tmp_path, config, save_embedding_layers=False)
    assert words in refusal(tmp_path, shape)


def test_another_method_is_refused(shape: DecoderShape, tmp_path: Path) -> None:
    declare()
    from peft import IA3Config, get_peft_model

    model = get_peft_model(decoders.make("llama3"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    model.save_pretrained(str(tmp_path))
    assert "peft_type is 'IA3'; only LORA" in refusal(tmp_path, shape)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": None}, "peft_type is None"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"target_parameters": ["mlp.gate"]}, "target_parameters"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"monteclora_config": {"x": 1}}, "monteclora_config"),
        ({"r": 0}, "its rank is 0 for model.layers.0.self_attn.q_proj"),
        ({"r": 2.5}, "its rank is 2.5"),
        ({"r": "8"}, "its r is '8'"),
        ({"r": True}, "its r is True"),
        ({"r": None}, "its r is None"),
        ({"r": 10**40}, "at most 1,000,000"),
        ({"lora_alpha": [8]}, "its lora_alpha is [8]"),
        ({"rank_pattern": [1]}, "its rank_pattern is [1]"),
        ({"rank_pattern": {"q_proj": -1}}, "its rank is -1 for"),
        ({"alpha_pattern": {"q_proj": "x" * 999}}, "its alpha_pattern is 'xxx"),
        ({"alpha_pattern": {"(": 1}}, "is no regular expression"),
        ({"alpha_pattern": {r"(\w+)+!": 1}}, "too hard to match"),
        ({"alpha_pattern": {".*.*.*.*.*!": 1}}, "too hard to match"),
        ({"alpha_pattern": {f"{index}.*": 1 for index in range(9)}}, "with 9 regular expressions"),
        ({"alpha_pattern": {str(index): 1 for index in range(22)}}, "22 entries; this model has 21 modules"),
        ({"r": 8}, "has A of 4 x 48 and B of 96 x 4 in model.layers.0.self_attn.q_proj, where rank 8"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(
    changes: dict[str, Any], words: str, folder: Path, shape: DecoderShape
) -> None:
    change_config(folder, **changes)
    assert words in refusal(folder, shape)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8 (byte 0)"),
        (b"[]", "holds no JSON object"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"r": NaN}', "holds NaN"),
        (b'{"r": -Infinity}', "holds -Infinity"),
        (b'{"peft_type": "LORA", "r": 1e999}', "its r is inf"),
        (b'{"r": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b" " * (2**21 + 1), "has 2,097,153 bytes; at most 2,097,152"),
    ],
)
def test_a_config_that_is_none_is_refused(content: bytes, words: str, folder: Path, shape: DecoderShape) -> None:
    (folder / CONFIG).write_bytes(content)
    assert words in refusal(folder, shape)


def test_an_incomplete_folder_is_refused(folder: Path, shape: DecoderShape, tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nowhere", shape)
    assert "there is no such folder" in refusal(folder / CONFIG, shape)
    assert "null byte" in refusal(Path("a\0b"), shape)
    assert "has no adapter_config.json" in refusal(tmp_path, shape)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "adapter_model.bin, being pickled, is not read" in refusal(folder, shape)
    (folder / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors; save" in refusal(folder, shape)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_only_plain_files_are_read(name: str, folder: Path, shape: DecoderShape) -> None:
    (folder / name).rename(folder / "moved")
    (folder / name).symlink_to(folder / "moved")
    assert f"its {name} is a link" in refusal(folder, shape)
    (folder / name).unlink()
    (folder / name).symlink_to(folder / name)
    assert f"its {name} is a link" in refusal(folder, shape)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert f"its {name} is no plain file" in refusal(folder, shape)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert f"its {name} is no plain file" in refusal(folder, shape)


def test_a_folder_may_be_a_link_but_not_a_loop(saved: Path, shape: DecoderShape, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved)
    assert read_adapter(tmp_path / "link", shape).folder == str(saved)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refusal(tmp_path / "loop", shape)


QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        (QUERY, np.zeros((4, 32), np.float32), "has A of 4 x 32 and B of 96 x 4"),
        (QUERY, np.zeros((192,), np.float32), "has A of 192 and"),
        (QUERY, np.zeros((), np.float32), "has A of one number and"),
        (QUERY, np.zeros((4, 48), np.int8), "as 'I8'; choose one of F64, F32"),
        (QUERY.replace(".0.", ".7."), np.zeros((4, 48), np.float32), "adapts layer 7, this model has 3"),
        (QUERY.replace(".0.", ".x."), np.zeros((4, 48), np.float32), "is unknown; only lora_A and lora_B of q_proj"),
        (QUERY.replace("q_proj", "up_proj"), np.zeros((4, 48), np.float32), "is unknown"),
        (QUERY.replace(".weight", ".bias"), np.zeros((4,), np.float32), "is a bias"),
        (QUERY.replace("_A.weight", "_magnitude_vector"), np.zeros((4,), np.float32), "belongs to DoRA"),
        (QUERY.replace("weight", "second.weight"), np.zeros((4, 48), np.float32), "has lora_A for"),
        ("line\n" + "x" * 500, np.zeros((4,), np.float32), "line\\nxxx"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, array: np.ndarray[Any, Any], words: str, folder: Path, shape: DecoderShape
) -> None:
    change_config(folder, base_model_name_or_path="some/model")
    change_tensors(folder, **{name: array})
    assert words in refusal(folder, shape)


def test_an_adapter_of_another_model_names_that(folder: Path, shape: DecoderShape) -> None:
    change_config(folder, base_model_name_or_path="some\nmodel")
    change_tensors(folder, **{QUERY: np.zeros((4, 32), np.float32)})
    assert r"choose an adapter trained on this model (it names 'some\nmodel')" in refusal(folder, shape)


def test_an_adapter_with_half_a_matrix_or_none_is_refused(folder: Path, shape: DecoderShape) -> None:
    tensors = load_file(folder / WEIGHTS)
    del tensors[QUERY]
    save_file(tensors, folder / WEIGHTS)
    assert "has no lora_A for model.layers.0.self_attn.q_proj" in refusal(folder, shape)
    save_file({}, folder / WEIGHTS)
    assert "adapts nothing" in refusal(folder, shape)


def header(entries: object, data: bytes = b"") -> bytes:
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is cut off: 0 bytes"),
        (b"\x01", "is cut off"),
        (header(b"{}")[:-1], "is cut off"),
        (b"\xff" * 8 + b"{}", "is cut off: 10 bytes"),
        (header(b"{}" + b" " * 2**21), "has a header of 2,097,154 bytes"),
        (header(b"\xff{}"), "is not UTF-8"),
        (header([]), "holds no JSON object"),
        (header({"__metadata__": {"format": 1}}), "has a __metadata__ that is not all text"),
        (header({"x": 1}), "does not say dtype, shape and data_offsets of 'x'"),
        (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}), "does not say"),
        (header({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}), "what is no size of a matrix"),
        (
            header({"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"),
            "what is no size of a matrix",
        ),
        (header({"x": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "as ['F32']"),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "keeps 4 bytes for 'x'"),
        (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"), "at byte 4 of its data"),
        (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"123"), "has 3 bytes of data, but"),
        (header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"12345"), "has 5 bytes of data"),
    ],
)
def test_weights_that_are_no_safetensors_are_refused(
    content: bytes, words: str, folder: Path, shape: DecoderShape
) -> None:
    (folder / WEIGHTS).write_bytes(content)
    assert words in refusal(folder, shape)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def understood(folder: Path, shape: DecoderShape) -> AdapterInfo | None:
    try:
        return read_adapter(folder, shape)
    except AdapterError:
        return None


@settings(max_examples=200)
@given(st.data())
def test_a_mangled_header_is_refused_or_means_what_safetensors_reads(
    folder: Path, saved: Path, shape: DecoderShape, data: st.DataObject
) -> None:
    content = bytearray((saved / WEIGHTS).read_bytes())
    length = int.from_bytes(content[:8], "little")
    if data.draw(st.booleans(), "as JSON"):
        entries = json.loads(content[8 : 8 + length])
        name = data.draw(st.sampled_from(sorted(entries)), "tensor")
        key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", None]), "key")
        value = data.draw(JSON, "value")
        if key is None or name == "__metadata__":
            entries[name] = value
        else:
            entries[name][key] = value
        content = bytearray(header(entries, bytes(content[8 + length :])))
    else:
        for _ in range(data.draw(st.integers(1, 4), "changes")):
            content[data.draw(st.integers(0, 7 + length), "at")] = data.draw(st.integers(0, 255), "byte")
        del content[data.draw(st.integers(0, len(content)) | st.just(len(content)), "cut at") :]
    (folder / WEIGHTS).write_bytes(content)
    (folder / CONFIG).write_bytes((saved / CONFIG).read_bytes())
    if info := understood(folder, shape):
        try:
            with safe_open(info.weights, framework="numpy") as file:
                for module in info.modules:
                    assert file.get_slice(module.a).get_shape()[0] == module.rank
        except SafetensorError as error:
            pytest.fail(f"understood here, but not by safetensors: {error}")


@settings(max_examples=200)
@given(st.data())
def test_a_mangled_config_is_refused_or_understood(
    folder: Path, saved: Path, shape: DecoderShape, data: st.DataObject
) -> None:
    config = json.loads((saved / CONFIG).read_text())
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3), "keys"):
        config[key] = data.draw(JSON, key)
    (folder / CONFIG).write_text(json.dumps(config))
    understood(folder, shape)
