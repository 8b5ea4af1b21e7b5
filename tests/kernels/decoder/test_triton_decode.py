"""The GPU's kernels without a GPU: in Triton's interpreter against the readable ones, and through its compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.triton_target import compile_only
from support.waiting import PROCESS_HANGS_AFTER_S
from torch import Tensor

from pliant.kernels.decoder.lora import LoraBatch, LoraGroup
from pliant.kernels.decoder.ragged import Span, ragged
from pliant.kernels.decoder.sampling import Sampler
from pliant.models.decoder_shape import DecoderShape
from pliant.models.lora_layout import LoraLayout

pytest.importorskip("triton")

from pliant.kernels.decoder.cuda_kernels import CudaKernels
from pliant.kernels.decoder.fp8 import E4M3
from pliant.kernels.decoder.triton_linear import FEW, TritonLinear

LLAMA = DecoderShape.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 8,
        "max_position_embeddings": 8,
    }
)
FILES = [
    Path(__file__).with_name(name) for name in ("triton_cases.py", "triton_linear_cases.py", "test_cuda_executor.py")
]


@pytest.mark.skipif(torch.cuda.is_available(), reason=f"run the cases on the GPU: pytest {FILES[0]}")
def test_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "support.patched_once",
        "-x",
        *map(str, FILES),
    ]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROCESS_HANGS_AFTER_S)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_launch_compiles_for_gpus(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiled = compile_only(monkeypatch, tmp_path, capability)
    kernels, places = CudaKernels(processors=132), torch.zeros(2, dtype=torch.int32)
    chunk = Span(0, 20), np.zeros(1, np.int32)
    batch = ragged(np.zeros(2, np.int32), np.zeros((2, 8), np.int32), [chunk], 64, torch.device("cpu"))
    keys, weight, rotation = zeros(4, 8, 64, 128), zeros(128), (torch.zeros(512, 128), torch.zeros(512, 128))
    kernels.add_norm(zeros(2, 4096), zeros(2, 4096), zeros(4096), 1e-5)
    kernels.rotate_and_store(zeros(2, 6144), places, places, rotation, (weight, weight), 1e-5, keys, keys)
    kernels.attention(zeros(22, 32, 128), keys, keys, batch, 256)
    kernels.gate(zeros(2, 28672))
    kernels.move(keys[None], keys[None], [(0, 1, 64)])
    layout = LoraLayout(LLAMA, [256] * 7)
    lora = LoraBatch(zeros(layout.values), [LoraGroup(np.arange(2, dtype=np.int32), 0, layout)])
    kernels.lora(lora)(zeros(2, 6144), zeros(2, 4096), 1, "qkv")
    Sampler(2, 128_256, "cpu", 8).draw(zeros(2, 128_256), places.long(), places)
    decoding = {"_add_norm", "_rotate_and_store", "_attend", "_merge", "_gate", "_move", "_shrink", "_expand"}
    assert set(compiled) == decoding | {"_survey", "_choose"}
    assert "cp.async" in compiled["_attend"].asm["ptx"]  # loads the next tile while it computes


PROGRAM_KIB = {89: 99, 90: 227, 100: 227}
"""Memory that one program may have, by capability."""


@pytest.mark.parametrize("capability", PROGRAM_KIB)
def test_every_launch_with_fp8_compiles_for_gpus_that_have_it(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = compile_only(monkeypatch, tmp_path, capability)
    kernels, places = CudaKernels(processors=132), torch.zeros(2, dtype=torch.int32)
    chunk = Span(0, 20), np.zeros(1, np.int32)
    batch = ragged(np.zeros(2, np.int32), np.zeros((2, 8), np.int32), [chunk], 64, torch.device("cpu"))
    keys, rotation = zeros(4, 8, 64, 128).to(E4M3), (torch.zeros(512, 128), torch.zeros(512, 128))
    kernels.rotate_and_store(zeros(2, 6144), places, places, rotation, None, 1e-5, keys, keys)
    kernels.attention(zeros(22, 32, 128), keys, keys, batch, 256)
    kernels.move(keys[None], keys[None], [(0, 1, 64)])
    linear = kernels.fp8_linear(zeros(256, 4096), zeros(256))
    for rows in (1, 33, 500):
        linear(zeros(rows, 4096))
        assert compiled["_linear"].metadata.shared <= PROGRAM_KIB[capability] * 1024
    assert set(compiled) == {"_rotate_and_store", "_attend", "_merge", "_move", "_linear"}
    assert compiled["_attend"].metadata.shared <= PROGRAM_KIB[capability] * 1024
    for name in ("_attend", "_linear"):
        assert "cp.async" in compiled[name].asm["ptx"]
        assert "fma.rn.bf16x2" in compiled[name].asm["ptx"]  # widens two at a time


SHARED_KIB = {80: 164, 90: 228, 100: 228}
"""Memory that the programs of a processor have together, by capability; the driver keeps one of it for each."""


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_linear_layers_compile_for_gpus(
    capability: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such that weights come while others are multiplied, by two programs at least that a processor holds together, and
    whoever arrives last sees what the others have left."""
    if (dtype, capability) == (torch.float8_e4m3fn, 80):
        pytest.skip("GPUs of capability 8.0 have no float8")
    compiled = compile_only(monkeypatch, tmp_path, capability)
    weight, bias = torch.zeros(6144, 4096, dtype=dtype), zeros(6144)
    scale = None if dtype is torch.bfloat16 else torch.zeros(6144)
    layer = TritonLinear(weight, scale, bias, 132)
    for multiply in (layer, layer.gated):
        multiply(zeros(FEW, 4096))
        found = compiled["_linear"]
        assert "cp.async" in found.asm["ptx"]
        assert "atom.global.gpu.acq_rel" in found.asm["ptx"]
        assert 2 * (found.metadata.shared + 1024) <= SHARED_KIB[capability] * 1024
    if scale is not None:
        layer.gated(zeros(100, 4096))


def zeros(*size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.bfloat16)
