"""The decoder says what transformers says, for every family, however prompts are cut and slots filled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.decoders import FAMILIES, load, logits, make, save
from torch import Tensor

from pliant.errors import ModelError
from pliant.kernels.decoder.kernels import TorchKernels
from pliant.kernels.decoder.kv_pages import PAGE, KVPages
from pliant.kernels.decoder.model import Decoder
from pliant.kernels.decoder.ragged import Span, ragged
from pliant.kernels.decoder.weights import RandomWeights, SavedWeights, read_shape

CPU = torch.device("cpu")
STEPS = 3


def decoder(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    weights, kernels = SavedWeights(folder, dtype, CPU), TorchKernels()
    return Decoder(weights, kernels, KVPages(weights.shape, 6, 96, dtype, CPU, kernels))


def texts() -> list[NDArray[np.int32]]:
    """As a model of `decoders` takes them; some longer than its sliding window and its original length."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 97, length, dtype=np.int32) for length in (33, 4, 18, 60)]


@torch.inference_mode()
def run(
    ours: Decoder, texts: list[NDArray[np.int32]], rows: dict[int, int], chunks: dict[int, tuple[int, int]]
) -> Tensor:
    """The logits of a pass: of text i that of token rows[i], and those of the tokens in the range chunks[i]."""
    tables = np.array([[9 - i, 2 + i] for i in range(len(texts))], np.int32)
    spans = [(Span(start, stop - start), tables[i]) for i, (start, stop) in chunks.items()]
    tokens = [texts[i][at : at + 1] for i, at in rows.items()] + [texts[i][slice(*cut)] for i, cut in chunks.items()]
    batch = ragged(np.array([*rows.values()], np.int32), tables[[*rows]].reshape(-1, 2), spans, PAGE, CPU)
    return ours.run(torch.from_numpy(np.concatenate(tokens)), batch)


def pairs(ours: Decoder, theirs: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Our logits and theirs, of texts that are computed in passes of chunks, of tokens, and of both."""
    known = texts()
    ends = [len(text) - STEPS for text in known]
    cuts = [end // 3 for end in ends]
    passes: list[tuple[dict[int, int], dict[int, tuple[int, int]]]] = [
        ({}, {i: (0, cut) for i, cut in enumerate(cuts) if i != 1 and cut}),
        ({}, {0: (cuts[0], ends[0]), 1: (0, ends[1])}),
        ({0: ends[0], 1: ends[1]}, {2: (cuts[2], ends[2]), 3: (cuts[3], ends[3])}),
        ({i: end + (i < 2) for i, end in enumerate(ends)}, {}),
        ({2: ends[2] + 1, 0: ends[0] + 2}, {3: (ends[3] + 1, ends[3] + 3), 1: (ends[1] + 2, ends[1] + 3)}),
    ]
    for rows, chunks in passes:
        places = [(i, at) for i, at in rows.items()] + [(i, at) for i, cut in chunks.items() for at in range(*cut)]
        found = run(ours, known, rows, chunks).clone()
        yield from ((found[row], theirs[i][at]) for row, (i, at) in enumerate(places))


def largest_difference(ours: Decoder, theirs: list[Tensor]) -> float:
    return max(float((mine - yours).abs().max()) for mine, yours in pairs(ours, theirs))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    assert largest_difference(decoder(tmp_path), [logits(model, text.tolist()) for text in texts()]) < 1e-4


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    exact, rounded = (
        [logits(load(tmp_path, dtype), text.tolist()).float() for text in texts()]
        for dtype in (torch.float32, torch.bfloat16)
    )
    theirs = max(float((a - b).abs().max()) for a, b in zip(rounded, exact, strict=True))
    assert largest_difference(decoder(tmp_path, torch.bfloat16), exact) < 1.5 * theirs


def test_shards_and_float16_are_read(tmp_path: Path) -> None:
    make("qwen3").half().save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = [logits(load(tmp_path), text.tolist()) for text in texts()]
    assert largest_difference(decoder(tmp_path), expected) < 1e-4


def test_the_name_of_what_is_wrong_with_weights_is_told(tmp_path: Path) -> None:
    save("qwen2", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    at = "model.layers.1.self_attn.q_proj"

    bias = tensors.pop(f"{at}.bias")
    save_file(tensors, file)
    with pytest.raises(ModelError, match=rf"{at}\.bias is missing; save the model again"):
        decoder(tmp_path)

    save_file({**tensors, f"{at}.bias": bias[:-1]}, file)
    with pytest.raises(ModelError, match=rf"{at}\.bias is \[47\] instead of \[48\]"):
        decoder(tmp_path)

    save_file({**tensors, f"{at}.bias": bias.int()}, file)
    with pytest.raises(ModelError, match=rf"{at}\.bias is stored as I32"):
        decoder(tmp_path)

    save_file({}, file)
    with pytest.raises(ModelError, match=r"\(and \d+ more\)"):
        decoder(tmp_path)

    file.write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        decoder(tmp_path)

    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        decoder(tmp_path)


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    save("llama2", tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        decoder(tmp_path)


def test_what_is_no_config_or_not_supported_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_shape(tmp_path)
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        read_shape(tmp_path)
    config.write_text("[]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_shape(tmp_path)
    config.write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ModelError, match="its architecture is GPT2LMHeadModel; choose one of LlamaForCausalLM"):
        read_shape(tmp_path)


def test_random_weights_give_finite_logits(tmp_path: Path) -> None:
    save("qwen3-window-biased", tmp_path)
    shape, kernels = read_shape(tmp_path), TorchKernels()
    weights = RandomWeights(shape, torch.float32, CPU)
    ours = Decoder(weights, kernels, KVPages(shape, 1, 96, torch.float32, CPU, kernels))
    batch = ragged(np.empty(0, np.int32), np.empty((0, 0), np.int32), [(Span(0, 33), np.ones(1, np.int32))], PAGE, CPU)
    with torch.inference_mode():
        assert ours.run(torch.from_numpy(texts()[0]), batch).isfinite().all()
