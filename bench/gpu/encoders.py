"""Text classifiers by runtime: static, dynamic and packed, one text and many (Arlo §2.2, figure 2).

Weights are random, and nothing is compiled, as it is where pliant serves on a GPU.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pliant.bench.gpu import saved
from pliant.bench.gpu.record import Record
from pliant.bench.gpu.scale import Scale
from pliant.kernels.encoder import compiled_classifier, packed_runtime
from pliant.kernels.encoder.exits import Exits
from pliant.kernels.encoder.texts import Stop, Text
from pliant.models.decoder_info import read_json

_LONGEST = saved.LONGEST
_LENGTHS = tuple(range(64, _LONGEST + 1, 64))
_STATIC = (64, 512, 128, 256)
_TOGETHER = (1, 8, 32, 128)


def run(record: Record, scale: Scale) -> None:
    """Packed runtimes first, as static and dynamic ones are compared with them."""
    names = ("BERT-base",) if scale.dry else tuple(saved.CLASSIFIERS)
    lengths, static, together = ((16, 32), (16,), (1, 2)) if scale.dry else (_LENGTHS, _STATIC, _TOGETHER)
    folders = {name: saved.classifier(name, scale.dry) for name in names}
    for name, folder in folders.items():
        with record.part(f"{name}, packed"):
            _packed(record, name, folder, scale, lengths, together)
        with record.part(f"{name}, dynamic"):
            _alone(record, name, folder, scale, max(lengths), lengths, dynamic=True)
        for length in static:
            with record.part(f"{name}, static {length}"):
                _alone(record, name, folder, scale, length, (length,), dynamic=False)
                _compare(record, name, length)
        with record.part(f"{name}, batches"):
            _batched(record, name, folder, scale, min(lengths), max(together[:3]))


def _compare(record: Record, name: str, length: int) -> None:
    """A static runtime with the dynamic and the packed one."""
    table, place = record.tables[name], str(length)
    for other in ("dynamic", "packed"):
        both = table["static_s"][place] / table[f"{other}_s"][place]
        record.figures[f"static_vs_{other}_{name}_{length}"] = both


def _packed(
    record: Record, name: str, folder: Path, scale: Scale, lengths: tuple[int, ...], together: tuple[int, ...]
) -> None:
    """Seconds of one text by its length, and of several of the shortest by their number."""
    runtime = packed_runtime.load(folder, max(lengths), device=scale.device.type, dtype=scale.dtype_name)
    alone = {str(length): scale.wall_s(partial(runtime, _ids(length))) for length in lengths}
    shortest = [Text(_ids(min(lengths)), None)]
    many = {str(count): scale.wall_s(partial(runtime.run_all, shortest * count)) for count in together}
    found = {"packed": runtime.backend, "packed_s": alone, "packed_s_by_texts": many}
    record.tables.setdefault(name, {}).update(found)
    per_s = {int(count): int(count) / seconds for count, seconds in many.items()}
    record.figures[f"texts_per_s_packed_vs_one_{name}"] = max(per_s.values()) / per_s[1]
    most = max(together)
    leaving_s = scale.wall_s(partial(runtime.run_all, _every_other_leaves(runtime, folder, shortest * most)))
    record.tables[name]["packed_s_half_leave_half_way"] = leaving_s
    record.figures[f"half_leave_half_way_vs_none_{name}_{most}"] = leaving_s / many[str(most)]


def _every_other_leaves(runtime: packed_runtime.PackedRuntime, folder: Path, texts: list[Text]) -> list[Text]:
    """`texts`, of which one and not the next leaves an exit of random weights behind half of the layers."""
    assert runtime.encoder is not None
    half, config = runtime.encoder.layers // 2, read_json(folder / "config.json")
    weights = np.random.default_rng(0).normal(size=(1, 2, config["hidden_size"])).astype(np.float32)
    runtime.leave_early(Exits((half,), weights, np.zeros((1, 2), np.float32), 0.5), unasked=False)
    return [text._replace(stops=(Stop(half, 1.0, (0.0, np.inf)[place % 2]),)) for place, text in enumerate(texts)]


def _alone(
    record: Record, name: str, folder: Path, scale: Scale, longest: int, lengths: tuple[int, ...], *, dynamic: bool
) -> None:
    """Seconds of one text at each length on a runtime for up to `longest` tokens."""
    runtime = _runtime(folder, longest, scale, dynamic=dynamic)
    kind = "dynamic" if dynamic else "static"
    found: dict[str, Any] = record.tables.setdefault(name, {})
    found[kind] = runtime.backend
    seconds = found.setdefault(f"{kind}_s", {})
    for length in lengths:
        seconds[str(length)] = scale.wall_s(partial(runtime, _ids(length)))


def _batched(record: Record, name: str, folder: Path, scale: Scale, length: int, texts: int) -> None:
    """A static runtime for several texts of one length."""
    runtime = _runtime(folder, length, scale, batch=texts)
    batch = [Text(_ids(length), None)] * texts
    found = {"texts": texts, "length": length, "seconds": scale.wall_s(lambda: runtime.run_all(batch))}
    record.tables.setdefault(name, {})["static_batch"] = found | {"backend": runtime.backend}


def _runtime(folder: Path, longest: int, scale: Scale, **options: Any) -> compiled_classifier.Runtime:
    return compiled_classifier.load(
        folder, longest, device=scale.device.type, dtype=scale.dtype_name, compiling=False, **options
    )


def _ids(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(5, 400, length)
