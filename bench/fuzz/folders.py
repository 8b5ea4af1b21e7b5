"""Adapters and tasks whose files are damaged, and the requests that load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from safetensors.numpy import save

from pliant.bench.fuzz.bodies import Draw, Many, Request, damaged, dump
from pliant.bench.fuzz.house import House
from pliant.models.decoder_shape import DecoderShape
from pliant.models.vision_info import VisionInfo

Files = Mapping[str, bytes]

_COUNTS = st.sampled_from([0, 1, 100_000, 2**31, 2**63])
_SIZES = st.lists(st.sampled_from([0, 1, 2**31, 2**63, -1, 3]), max_size=4)


def adapter(shape: DecoderShape) -> Files:
    """A LoRA adapter of all layers' q_proj."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "rank_pattern": {}}
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {
        name.format(layer, side): np.zeros(size, np.float32)
        for layer in range(shape.layers)
        for side, size in (("A", (2, 16)), ("B", (16, 2)))
    }
    return {"adapter_config.json": json.dumps(config).encode(), "adapter_model.safetensors": save(tensors)}


def task(backbone: VisionInfo) -> Files:
    """A task of two labels, with prompts and images to profile it by."""
    told = {
        "name": "x",
        "labels": ["no", "yes"],
        "slo_ms": 500,
        "utility": 1.0,
        "gammas": {"0": 0.8, "2": 0.9},
    }
    sizes = {"head.weight": (2, backbone.hidden), "head.bias": (2,), "prompts.2": (backbone.layers, 2, backbone.hidden)}
    images = {"images": np.zeros((3, backbone.height, backbone.width, backbone.channels), np.uint8)}
    return {
        "task.json": json.dumps(told).encode(),
        "task.safetensors": save({name: np.zeros(size, np.float32) for name, size in sizes.items()}),
        "profiling.safetensors": save({**images, "labels": np.zeros(3, np.int64)}),
    }


def folder_requests(house: House) -> st.SearchStrategy[Request]:
    """Writes a damaged folder to `house`, and asks for it to be loaded."""
    adapters, tasks = adapter(house.decoder), task(house.backbone)

    @st.composite
    def requests(draw: Draw) -> Request:
        if draw(st.booleans()):
            _write(house.adapters / "x", _damaged(draw, adapters))
            body = {"lora_name": "x", "lora_path": "x", "load_inplace": True}
            return Request("POST", "/v1/load_lora_adapter", "/v1/load_lora_adapter", dump(body))
        _write(house.tasks / "x", _damaged(draw, tasks))
        route = "/v2/repository/models/{model}/tasks/{task}/load"
        body = {"parameters": {"path": "x", "replace": True}}
        return Request("POST", route, route.format(model="digits", task="x"), dump(body))

    return requests()


def _damaged(draw: Draw, files: Files) -> Files:
    """`files`, of which one is damaged: in its bytes, in a header that still parses, in its JSON, or it is gone."""
    name = draw(st.sampled_from(sorted(files)))
    how = draw(st.integers(0, 5))
    if how == 0:
        return {other: content for other, content in files.items() if other != name}
    if how < 3:
        return {**files, name: damaged(draw, files[name])}
    if name.endswith(".json"):
        told = json.loads(files[name])
        key = draw(st.sampled_from(sorted(told)))
        units: st.SearchStrategy[Any] = st.sampled_from([0, "", None, [], {}, "q_proj", "(.*){9}", 1e308, "-1", "../x"])
        value = draw(units | st.builds(Many, units, _COUNTS.map(lambda count: min(count, 100_000)), st.booleans()))
        return {**files, name: dump({**told, key: value})}
    return {**files, name: _other_header(draw, files[name])}


def _other_header(draw: Draw, content: bytes) -> bytes:
    """safetensors whose header says something else of one tensor."""
    size = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    name = draw(st.sampled_from(sorted(header)))
    key = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    value = draw(st.sampled_from(["F32", "I64", "U8", "", None])) if key == "dtype" else draw(_SIZES)
    if draw(st.booleans()):
        header[name] = {**header[name], key: value}
    else:
        header[draw(st.sampled_from(["x", "", "prompts.3", "__metadata__", name * 1_000]))] = header.pop(name)
    raw = json.dumps(header).encode()
    told = draw(_COUNTS) if draw(st.integers(0, 3)) == 0 else len(raw)
    return told.to_bytes(8, "little") + raw + content[8 + size :]


def _write(folder: Path, files: Files) -> None:
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
