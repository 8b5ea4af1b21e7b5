"""Models of random weights, saved once: how fast they are does not depend on what they say."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pliant.cache import cache_folder, made_once
from pliant.torchvision_ops import declare

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_POSITIONS = 2048


@dataclass(frozen=True)
class Size:
    """Of a Llama model, untied, with as many key/value heads as heads."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int


SMALL = Size("15M", hidden=384, layers=6, heads=6, intermediate=1024, vocab=4096)
LARGE = Size("120M", hidden=768, layers=12, heads=12, intermediate=2048, vocab=20_000)


def checkpoint(size: Size, dtype: str) -> Path:
    """A folder as transformers saves it, with a tokenizer.json; no token of it ends an answer.

    `dtype` is float32 or bfloat16; both hold the same weights, rounded. Kept in the user's cache.
    """
    return made_once(_folder(size, dtype), lambda folder: _save(size, dtype, folder))


def gguf(size: Size, dtype: str) -> Path:
    """The same weights as llama.cpp reads them. Needs the package gguf. Kept in the user's cache."""
    folder = checkpoint(size, dtype)
    made = made_once(_folder(size, dtype, "gguf-"), lambda empty: _save_gguf(size, folder, empty / "model.gguf"))
    return made / "model.gguf"


def _folder(size: Size, dtype: str, prefix: str = "") -> Path:
    return cache_folder() / "bench" / f"{prefix}llama-{size.name}-{dtype}-v1"


def _save(size: Size, dtype: str, folder: Path) -> None:
    declare()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        intermediate_size=size.intermediate,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer(size.vocab).save(str(folder / "tokenizer.json"))


def tokenizer(vocab: int) -> Tokenizer:
    """A vocabulary of bytes and made-up words, each id a token that can be written out."""
    words = [f"Ġw{index}" for index in range(vocab - len(_BYTES))]
    made = Tokenizer(models.BPE({token: index for index, token in enumerate([*_BYTES, *words])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def _save_gguf(size: Size, folder: Path, path: Path) -> None:
    import gguf

    config: Mapping[str, Any] = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_POSITIONS)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.intermediate)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(size.hidden // size.heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(size.vocab)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, size.layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, size.heads)
        values = tensor.float().numpy()
        renamed = names.get_name(name, try_suffixes=(".weight",)) or name
        if tensor.dtype == torch.bfloat16 and tensor.dim() > 1:
            bf16 = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(renamed, gguf.quants.quantize(values, bf16), raw_dtype=bf16)
        else:
            writer.add_tensor(renamed, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A query or key matrix in llama.cpp's order, which rotates neighbours where transformers rotates halves."""
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
