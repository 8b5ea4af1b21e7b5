"""Blobs hold what PEFT's files hold: scaled, in place, and zeros for what an adapter leaves out."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.decoders import save
from support.lora_adapters import KINDS, adapt

from pliant.formats.adapter_info import AdapterError, AdapterInfo, bytes_of, read_adapter
from pliant.kernels.decoder.adapter_weights import stage
from pliant.kernels.decoder.weights import read_shape
from pliant.models.adapter_files import TensorFile
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import MODULES, SITES, LoraLayout, module_size

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> DecoderShape:
    folder = tmp_path_factory.mktemp("base")
    save("llama3", folder)
    return read_shape(folder)


def saved(kind: str, folder: Path, shape: DecoderShape) -> AdapterInfo:
    adapt("llama3", kind, folder)
    return read_adapter(folder, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_peft(kind: str, shape: DecoderShape, tmp_path: Path) -> None:
    model = adapt("llama3", kind, tmp_path)
    info = read_adapter(tmp_path, shape)
    with ThreadPoolExecutor() as threads:
        blob = threads.submit(stage, info, shape, torch.float32, CPU).result()
    assert blob.nbytes == bytes_of(info.ranks, shape, 4)
    layout, seen = LoraLayout(shape, info.ranks), torch.zeros_like(blob)
    for layer, (name, indices) in ((layer, site) for layer in range(shape.layers) for site in SITES.items()):
        site, skipped = layout.sites[name], 0
        for index, module in zip(indices, site.modules, strict=True):
            inputs, out = module_size(shape, index)
            a_at = layer * layout.block + site.a + skipped * inputs
            b_at = layer * layout.block + module.b
            skipped += module.rank
            a, b = blob[a_at:][: module.rank * inputs], blob[b_at:][: module.rank * out]
            seen[a_at:][: module.rank * inputs] += 1
            seen[b_at:][: module.rank * out] += 1
            place = "mlp" if index > 3 else "self_attn"
            theirs = model.get_submodule(f"base_model.model.model.layers.{layer}.{place}.{MODULES[index]}")
            expected = theirs.get_delta_weight("default") if hasattr(theirs, "lora_A") else torch.zeros(out, inputs)
            torch.testing.assert_close(b.view(-1, out).T @ a.view(-1, inputs), expected)
    assert float(seen.max()) == 1
    assert not bool(blob[seen == 0].any())


def test_scaling_is_rounded_once(shape: DecoderShape, tmp_path: Path) -> None:
    info = saved("rank-3-mlp", tmp_path, shape)
    exact, rounded = (stage(info, shape, dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(exact.bfloat16(), rounded)


def test_files_that_changed_meanwhile_are_refused(shape: DecoderShape, tmp_path: Path) -> None:
    info = saved("rank-8", tmp_path, shape)
    tensors = load_file(info.weights)
    name = info.modules[0].b
    save_file({**tensors, name: tensors[name][:, :4].contiguous()}, info.weights)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_B\.weight as \[96, 4\] instead of \[96, 8\]; load it again"):
        stage(info, shape, torch.float32, CPU)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, info.weights)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors has no .*lora_B.*; load it again"):
        stage(info, shape, torch.float32, CPU)
    save_file({**tensors, name: tensors[name] * torch.nan}, info.weights)
    with pytest.raises(AdapterError, match=r"not all finite in torch\.bfloat16"):
        stage(info, shape, torch.bfloat16, CPU)
    with pytest.raises(AdapterError, match="none cannot be opened: No such file or directory"):
        stage(replace(info, weights=tmp_path / "none"), shape, torch.float32, CPU)


def test_links_are_not_followed(shape: DecoderShape, tmp_path: Path) -> None:
    info = saved("rank-8", tmp_path, shape)
    moved = info.weights.rename(tmp_path / "moved")
    info.weights.symlink_to(moved)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is a link"):
        stage(info, shape, torch.float32, CPU)


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(
    shape: DecoderShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the end of the process, as it would be if the file were mapped."""
    info = saved("rank-8", tmp_path, shape)
    read = TensorFile.read

    def cut_off(file: TensorFile, name: str) -> bytearray:
        os.truncate(info.weights, 2**13)
        return read(file, name)

    monkeypatch.setattr(TensorFile, "read", cut_off)
    with pytest.raises(AdapterError, match=r"was cut off at byte 8,192 while it was read; load it again"):
        stage(info, shape, torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_whatever_tensors_are_stored_as(dtype: torch.dtype, shape: DecoderShape, tmp_path: Path) -> None:
    info = saved("rank-8", tmp_path, shape)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(info.weights).items()}
    save_file({name: tensor.double() for name, tensor in tensors.items()}, info.weights)
    expected = stage(info, shape, torch.float32, CPU)
    save_file(tensors, info.weights)
    assert torch.equal(stage(info, shape, torch.float32, CPU), expected)
