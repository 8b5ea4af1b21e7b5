"""A language model of 8 billion parameters on one GPU: how near a decode step is to what memory allows, and what
company costs a request (Flover §VI-B).

    PYTHONPATH=src python -m pliant.bench.llm.gpu --out results

needs neither Ray nor a checkpoint: weights are random, in the shape of Llama 3 8B and in bfloat16. The kernels are
checked against the readable ones first, on texts drawn anew each time. Writes llm_gpu.json, and for each batch which
kernels a step's time goes to.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from pliant.bench.llm.gpu_check import GREEDY, check, decode_step, parts, random_texts
from pliant.bench.llm.our_kernels import tables_of
from pliant.kernels.decoder.cuda_executor import CudaExecutor
from pliant.kernels.decoder.cuda_kernels import CudaKernels
from pliant.kernels.decoder.decode_step import Launched, Prefill, Step
from pliant.kernels.decoder.executor import Executor
from pliant.models.decoder_shape import DecoderShape

LLAMA_3_8B = DecoderShape.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
)
_PAPER_PACE = 500 / 5800
"""Between two arrivals, over what one request takes (Flover §VI-B, Fig. 5)."""
_COPIED_BYTES = 2**32


@dataclass(frozen=True)
class Scale:
    """What is measured. Lengths are in tokens."""

    batches: tuple[int, ...] = (1, 8, 32)
    max_length: int = 2048
    context: int = 512
    """Mean length of the texts of a decode step; they are half to one and a half times as long."""
    steps: int = 32
    prompt: int = 128
    answer: int = 256
    repetitions: int = 5


def bandwidth(device: torch.device) -> float:
    """Bytes that memory moves in a second: the most of a copy's, read and written, and of a maximum's, read."""
    source = torch.randn(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copied = 2 * _COPIED_BYTES / _device_s(lambda: target.copy_(source))
    return max(copied, _COPIED_BYTES / _device_s(source.amax))


def _device_s(work: Callable[[], object], repetitions: int = 20) -> float:
    """The median time on the GPU."""
    took: list[float] = []
    for _ in range(3 + repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) / 1e3)
    return statistics.median(took[3:])


def step_s(executor: Executor, lengths: NDArray[np.int32], steps: int) -> float:
    """Seconds of a step, each launched before the one before it is read, for slots from 0 on."""
    for slot in range(len(lengths)):
        executor.admit(slot, GREEDY)
    under_way = executor.launch(decode_step(executor, 0, lengths))
    start = 0.0
    for step in range(1, steps + 2):
        following = executor.launch(decode_step(executor, 0, lengths + step))
        under_way.result()
        start = start or time.perf_counter()
        under_way = following
    under_way.result()
    return (time.perf_counter() - start) / (steps + 1)


def step_bytes(shape: DecoderShape, lengths: NDArray[np.int32], steps: int) -> int:
    """What a step must read: all weights but the embedding, of which a row for each text, and all texts."""
    looked_up = 0 if shape.tied else (shape.vocab - len(lengths)) * shape.hidden
    tokens = int((lengths + (steps + 4) // 2).sum())
    return 2 * (shape.parameters() - looked_up) + shape.kv_bytes(tokens, 2)


def mean_latency_s(executor: Executor, prompts: Sequence[NDArray[np.int32]], answer: int, interval_s: float) -> float:
    """Of requests that arrive a constant time apart, and whose answers all have `answer` tokens.

    So they end as they came, and the slots in use stay a window without any being moved.
    """
    for slot in range(len(prompts)):
        executor.admit(slot, GREEDY)
    arrivals = interval_s * np.arange(len(prompts))
    sizes, tables = np.array([len(ids) for ids in prompts]), tables_of(executor)
    produced, ends = np.zeros(len(prompts), np.int64), np.zeros(len(prompts))
    done = admitted = 0
    under_way: tuple[Launched, slice] | None = None
    begin = time.perf_counter()

    def read() -> None:
        if under_way is not None:
            under_way[0].result()
            ends[under_way[1]] = time.perf_counter() - begin

    while done < len(prompts):
        arrived = int(np.searchsorted(arrivals, time.perf_counter() - begin, side="right"))
        if done == arrived:
            read()
            under_way = None
            time.sleep(max(0.0, arrivals[arrived] + begin - time.perf_counter()))
            continue
        prefills = tuple(Prefill(slot, 0, prompts[slot], True, tables[slot]) for slot in range(admitted, arrived))
        lengths = (sizes + produced - 1)[done:admitted].astype(np.int32)
        indices = produced[done:admitted].copy(), np.zeros(len(prefills), np.int64)
        step = Step(prefills, done, lengths, tables[done:admitted], *indices)
        launched = executor.launch(step)
        produced[done:arrived] += 1
        admitted = arrived
        ended = done + int((produced[done:admitted] == answer).sum())
        read()
        under_way = launched, slice(done, ended)
        done = ended
    read()
    return float((ends - arrivals).mean())


def measure(shape: DecoderShape, scale: Scale, device: torch.device, out: Path) -> dict[str, Any]:
    """All figures, as they are written."""
    errors = check(shape, device)
    moved = bandwidth(device)
    slots = max(scale.batches)
    executor = CudaExecutor(*parts(shape, CudaKernels(), torch.bfloat16, device, slots, scale.max_length, seed=0))
    figures: dict[str, float] = {}
    milliseconds: dict[str, float] = {}
    for batch in scale.batches:
        spread = np.linspace(scale.context // 2, scale.context * 3 // 2, batch + 2)[1:-1]
        lengths = spread.astype(np.int32)
        took = statistics.median(step_s(executor, lengths, scale.steps) for _ in range(scale.repetitions))
        floor = step_bytes(shape, lengths, scale.steps) / moved
        milliseconds |= {f"step_b{batch}": took * 1e3, f"floor_b{batch}": floor * 1e3}
        figures[f"roofline_fraction_b{batch}"] = floor / took
        _profile(executor, lengths, out / f"llm_gpu-kernels-b{batch}.txt")
    figures |= _inflations(executor, scale, milliseconds)
    return {
        "figures": figures,
        "config": {**asdict(scale), "parameters": shape.parameters(), "dtype": "bfloat16"},
        "machine": _machine(device) | {"bytes_per_s": moved},
        "milliseconds": milliseconds,
        "relative_errors": errors,
    }


def _inflations(executor: Executor, scale: Scale, milliseconds: dict[str, float]) -> dict[str, float]:
    """Mean latency in company over that of one request alone: all at once, and at the paper's pace."""

    def median_s(count: int, interval_s: float) -> float:
        prompts = random_texts(executor.shape, [scale.prompt] * count, seed=count)
        runs = (mean_latency_s(executor, prompts, scale.answer, interval_s) for _ in range(scale.repetitions))
        return statistics.median(runs)

    median_s(1, 0.0)
    alone = median_s(1, 0.0)
    milliseconds["alone"] = alone * 1e3
    figures = {}
    for name, interval_s in (("latency_inflation", 0.0), ("latency_inflation_paced", alone * _PAPER_PACE)):
        for count in scale.batches:
            if count > 1:
                milliseconds[f"{name}_{count}"] = (took := median_s(count, interval_s)) * 1e3
                figures[f"{name}_{count}"] = took / alone
    return figures


def _profile(executor: Executor, lengths: NDArray[np.int32], file: Path) -> None:
    """Write which kernels take a few steps' time."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step_s(executor, lengths, 4)
    file.write_text(profile.key_averages().table(sort_by="cuda_time_total", row_limit=20, max_name_column_width=90))


def _machine(device: torch.device) -> dict[str, Any]:
    gpu = torch.cuda.get_device_properties(device)
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multi_processor_count,
        "memory_bytes": gpu.total_memory,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for what is measured")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions of shorter answers")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This benchmark measures a GPU, and torch finds none that CUDA can use.")
    options.out.mkdir(parents=True, exist_ok=True)
    scale = Scale(answer=64, repetitions=3) if options.quick else Scale()
    found = measure(LLAMA_3_8B, scale, torch.device("cuda"), options.out)
    (options.out / "llm_gpu.json").write_text(json.dumps(found, indent=2) + "\n")
    for table in ("relative_errors", "milliseconds", "figures"):
        for name, value in found[table].items():
            print(f"{name:32} {value:10.4g}")
    print(f"{found['machine']['gpu']}, {found['machine']['bytes_per_s'] / 1e12:.3g} TB/s. Written to {options.out}.")


if __name__ == "__main__":
    main()
