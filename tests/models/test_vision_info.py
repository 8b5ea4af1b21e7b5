"""Vision transformers' folders: what is understood of those that timm writes, and the line that is said of others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vision_folders import change_json, change_tensors, vision_folder, vision_model

from pliant.errors import ModelError
from pliant.models.vision_info import CONFIG, WEIGHTS, VisionInfo, merging_gammas, read_vision, vision_input

VARIANTS: dict[str, dict[str, Any]] = {
    "class token": {},
    "no class token": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 3, "no_embed_class": True},
    "grey": {"in_chans": 1},
    "wide": {"img_size": (16, 32), "patch_size": 8},
    "no head": {"num_classes": 0},
    "before and after": {"pre_norm": True, "init_values": 0.1, "qk_norm": True},
    "no positions": {"pos_embed": "none"},
    "attention pool": {"global_pool": "map", "class_token": False},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, not to be changed."""
    folder = tmp_path_factory.mktemp("model")
    vision_folder(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    return tmp_path


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_vision(folder)
    said = str(caught.value)
    assert said.isprintable()
    assert said.startswith(f"{folder}: ")
    assert len(said) < 600
    return said


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_read_as_timm_builds_it(variant: str, tmp_path: Path) -> None:
    info = vision_folder(tmp_path, vision_model(**VARIANTS[variant]))
    import timm
    from timm.data import resolve_model_data_config

    model = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    data = resolve_model_data_config(model)
    assert (info.channels, info.height, info.width) == data["input_size"]
    assert (list(info.mean), list(info.std)) == (data["mean"], data["std"])
    assert info.interpolation == data["interpolation"]
    assert (info.crop_pct, info.squash) == (data["crop_pct"], data["crop_mode"] == "squash")
    assert (info.layers, info.hidden, info.prefix) == (len(model.blocks), model.embed_dim, model.num_prefix_tokens)
    assert (info.patches, info.patch) == (model.patch_embed.num_patches, model.patch_embed.patch_size[0])
    assert info.tokens == info.prefix + info.patches
    assert info.labels == tuple(f"LABEL_{index}" for index in range(model.num_classes))
    assert info.architecture == "vit_tiny_patch16_224"


def test_the_form_of_2022_is_understood(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    names = ["a", "b", "c", "d", "e"]
    old = {"architecture": config["architecture"], **config["pretrained_cfg"], "num_classes": 5, "labels": names}
    before = read_vision(folder)
    (folder / CONFIG).write_text(json.dumps(old))
    assert read_vision(folder) == VisionInfo(**{**vars(before), "labels": tuple(names)})


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["a", "b", "c", "d", "e"], ("a", "b", "c", "d", "e")),
        ({"3": "d", "0": "a"}, ("a", "LABEL_1", "LABEL_2", "d", "LABEL_4")),
    ],
)
def test_labels_have_the_names_that_were_given(names: Any, labels: tuple[str, ...], folder: Path) -> None:
    change_json(folder / CONFIG, label_names=names)
    assert read_vision(folder).labels == labels


def test_a_config_alone_says_what_images_are_wanted(saved: Path) -> None:
    found, info = vision_input(json.loads((saved / CONFIG).read_text()), "zoo/x"), read_vision(saved)
    assert vars(found) == {key: value for key, value in vars(info).items() if hasattr(found, key)}
    with pytest.raises(ModelError, match=r"^zoo/x: its config\.json names no timm architecture; choose"):
        vision_input({"architectures": ["BertForSequenceClassification"]}, "zoo/x")


def test_weights_may_be_links_as_in_the_hubs_cache(folder: Path, saved: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        (folder / name).rename(folder / f"blob-{name}")
        (folder / name).symlink_to(f"blob-{name}")
    assert read_vision(folder) == read_vision(saved)


def test_neither_torch_nor_timm_is_imported() -> None:
    modules = "pliant.models.vision_info, pliant.formats.vision_task"
    code = f"import sys, {modules}; print([m for m in ('torch', 'timm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_what_is_merged_follows_the_tokens() -> None:
    def info(side: int, patch: int, layers: int) -> VisionInfo:
        return VisionInfo("vit", side, side, 3, (0.5,) * 3, (0.5,) * 3, "bicubic", 1.0, False, (), layers, 8, patch, 1)

    assert merging_gammas(info(224, 16, 12)) == (-20, -15, -10, -5)
    assert merging_gammas(info(32, 4, 4)) == (-20, -15, -10, -5)
    assert merging_gammas(info(384, 16, 24)) == (-29, -22, -14, -7)
    assert merging_gammas(info(4, 4, 4)) == ()
    assert merging_gammas(info(8, 4, 2)) == (-2, -1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": None}, "names no timm architecture"),
        ({"pretrained_cfg": 3}, "gives 3 as pretrained_cfg, which is no JSON object"),
        ({"model_args": [1]}, "gives [1] as model_args"),
        ({"model_args": {"in_chans": 4}}, "images of 4 channels; only 1 (grey) and 3 (RGB)"),
        ({"model_args": {"img_size": 99999}}, "wants images of (99999, 99999) pixels"),
        ({"model_args": {"img_size": [16]}}, "wants images of [16] pixels"),
        ({"model_args": {"img_size": 18}}, "do not divide images of 18 x 18"),
        ({"model_args": {"img_size": 32}}, "has a pos_embed of 1 x 17 x 24, while images of 32 x 32 make 64 patches"),
        ({"num_classes": -1}, "gives -1 as num_classes"),
        ({"num_classes": 7}, "has a head of 5 outputs, and its config.json 7 labels"),
        ({"label_names": [1, 2]}, "as label_names"),
        ({"label_names": "abcde"}, "gives 'abcde' as label_names"),
        ({"label_names": ["x"] * 6}, "names the label '5', while num_classes is 5"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused(changes: dict[str, Any], words: str, folder: Path) -> None:
    change_json(folder / CONFIG, **changes)
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_size": 224}, "gives 224 as input_size"),
        ({"input_size": [3, 16]}, "gives [3, 16] as input_size"),
        ({"mean": [0.5, 0.5]}, "gives [0.5, 0.5] as mean; it must be a number for each of 3 channels"),
        ({"mean": ["x"] * 3}, "as mean"),
        ({"std": [0.5, 0.5, 0]}, "as std; it must be above 0"),
        ({"std": [10**400] * 3}, "as std"),
        ({"interpolation": "random"}, "gives 'random' as interpolation; choose one of nearest"),
        ({"crop_pct": 1.5}, "gives 1.5 as crop_pct"),
        ({"crop_pct": True}, "gives True as crop_pct"),
        ({"crop_mode": "border"}, "gives 'border' as crop_mode"),
    ],
)
def test_images_that_cannot_be_made_are_refused(changes: dict[str, Any], words: str, folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**config, "pretrained_cfg": {**config["pretrained_cfg"], **changes}}))
    assert words in refusal(folder)


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("patch_embed.proj.weight", np.zeros((24, 48), np.float32), "has no patch_embed.proj.weight of 4 dimensions"),
        ("patch_embed.proj.weight", np.zeros((24, 3, 4, 2), np.float32), "from patches of 4 x 2 pixels"),
        ("patch_embed.proj.weight", np.zeros((24, 1, 4, 4), np.float32), "is for images of 1 channels"),
        ("blocks.0.attn.qkv.weight", np.zeros((24, 24), np.float32), "has no blocks.0.attn.qkv.weight of 72 x 24"),
        ("blocks.1.attn.qkv.weight", np.zeros((24, 24), np.float32), "has no blocks.1.attn.qkv.weight of 72 x 24"),
        ("dist_token", np.zeros((1, 1, 24), np.float32), "has a distillation token"),
        ("reg_token", np.zeros((24,), np.float32), "registers of (24,)"),
        ("pos_embed", np.zeros((1, 9, 24), np.float32), "has a pos_embed of 1 x 9 x 24"),
    ],
)
def test_other_models_are_refused(name: str, array: np.ndarray[Any, Any], words: str, folder: Path) -> None:
    change_tensors(folder / WEIGHTS, **{name: array})
    assert words in refusal(folder)


def test_an_incomplete_folder_is_refused(folder: Path) -> None:
    assert "has no config.json" in refusal(folder / "nowhere")
    (folder / WEIGHTS).write_bytes(b"no")
    assert "its model.safetensors is cut off" in refusal(folder)
    (folder / WEIGHTS).unlink()
    assert "has no model.safetensors; save" in refusal(folder)
    (folder / WEIGHTS).symlink_to(folder / WEIGHTS)
    assert "has no model.safetensors" in refusal(folder)
    (folder / CONFIG).write_bytes(b"{")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert "its config.json is not JSON" in refusal(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**1100) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150)
@given(st.data())
def test_a_mangled_config_is_refused_or_understood(folder: Path, saved: Path, data: st.DataObject) -> None:
    config = json.loads((saved / CONFIG).read_text())
    part = data.draw(st.sampled_from([config, config["pretrained_cfg"], config["model_args"]]))
    keys = st.sampled_from([*sorted(part), "label_names", "labels", "img_size", "crop_mode", "in_chans"])
    for key in data.draw(st.lists(keys, min_size=1, max_size=3), "keys"):
        part[key] = data.draw(JSON, key)
    (folder / CONFIG).write_text(json.dumps(config))
    try:
        info = read_vision(folder)
    except ModelError:
        refusal(folder)
    else:
        assert (info.tokens, info.hidden, len(info.labels)) == (17, 24, 5)
