"""The bench of a GPU's first day, on a CPU: its stages run where little is installed, and what fails is on record."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.caches import with_libraries
from support.waiting import PROCESS_HANGS_AFTER_S

from pliant.bench.gpu import bare, bundle, compare, decoder_check, decoders, profiles
from pliant.bench.gpu.compare import LIMITS_S
from pliant.bench.gpu.record import Record
from pliant.errors import PliantError
from pliant.simulation.llm.hardware import LLAMA_7B, Costs, Gpu

FIGURES = {
    "probe": {"bytes_per_s", "flops", "linear_layers_ours_int8_speedup_b16"},
    "decode": {"roofline_fraction_8B_b1", "latency_inflation_3", "adapters_2_of_rank_16"},
    "engine": {"speedup_vs_transformers_continuous"},
    "encoders": {
        "half_leave_half_way_vs_none_BERT-base_2",
        "static_vs_dynamic_BERT-base_16",
        "texts_per_s_packed_vs_one_BERT-base",
    },
    "vision": {"merging_3_speedup_eager_b2"},
}
"""By stage, some of what it must measure. The cases of `correctness` have tests of their own."""


@pytest.fixture(autouse=True, scope="module")
def _kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where stages keep what they compile if they are not told a cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("gpu")))
        patch.delenv("PLIANT_CACHE", raising=False)
        with_libraries(Path(tempfile.gettempdir(), "pliant-bench-gpu"))
        yield


def load(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.mark.parametrize("stage", FIGURES)
def test_a_stage_runs_on_what_a_bare_image_has(stage: str, tmp_path: Path) -> None:
    assert compare.run(stage, tmp_path, True, PROCESS_HANGS_AFTER_S)
    found = load(tmp_path / f"{stage}.json")
    assert FIGURES[stage] <= found["figures"].keys()
    assert all(value > 0 for value in found["figures"].values())
    assert found["skipped"] == found["errors"] == {}
    assert found["stage"] == stage
    assert {"python", "torch", "transformers", "numpy"} <= found["versions"].keys()
    assert {"commit", "device", "command"} <= found.keys()


def test_a_stage_that_is_not_done_in_time_is_ended_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS_S, "engine", 0.01)
    monkeypatch.setitem(LIMITS_S, "vision", PROCESS_HANGS_AFTER_S)
    assert compare.main(["--dry", "--stages", "engine", "vision", "--out", str(tmp_path)]) == 1
    assert "not done within" in load(tmp_path / "engine.json")["errors"]["stage"]
    assert not load(tmp_path / "vision.json")["errors"]
    assert profiles.measured_vision(tmp_path).per_s() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_a_stage_says_so(tmp_path: Path) -> None:
    assert not compare.run("probe", tmp_path, False, PROCESS_HANGS_AFTER_S)
    assert "status" in load(tmp_path / "probe.json")["errors"]["stage"]


def test_a_part_that_fails_or_lacks_a_package_leaves_the_others_to_run(tmp_path: Path) -> None:
    record = Record(tmp_path / "it.json", "it", "me", {})
    with record.part("lacks"):
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    with record.part("fails"):
        raise ValueError("wrong numbers")
    with record.part("is ours"):
        raise ModuleNotFoundError("No module named 'pliant.x'", name="pliant.x")
    with record.part("works"):
        record.figures["one"] = 1.0
    found = load(tmp_path / "it.json")
    assert found["skipped"] == {"lacks": "ray is not installed"}
    assert found["errors"].keys() == {"fails", "is ours"}
    assert "ValueError: wrong numbers" in found["errors"]["fails"]
    assert found["figures"] == {"one": 1.0}


def test_without_the_wheels_the_engine_is_skipped_and_says_why() -> None:
    code = (
        "import importlib.util\n"
        "from pliant.bench.gpu import bare\n"
        "bare.hide((*bare.LACKS, *bare.CARRIED))\n"
        "assert importlib.util.find_spec('ray') is None\n"
        "import pliant.bench.gpu.engine as engine, torch\n"
        "from pliant.bench.gpu.scale import Scale\n"
        "try: engine._ours(Scale(torch.device('cpu'), True), 2, 64)\n"
        "except ModuleNotFoundError as error: print(error.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["pydantic"], done.stderr


def test_without_ray_serving_is_skipped_and_says_why(tmp_path: Path) -> None:
    assert compare.run("serving", tmp_path, True, PROCESS_HANGS_AFTER_S)
    assert load(tmp_path / "serving.json")["skipped"] == {"serving": "ray is not installed"}


def test_what_is_brought_along_is_what_an_image_lacks() -> None:
    needed = bundle.needed("pliant", "3.12")
    assert {"ray", "fastapi", "grpcio-reflection", "uvicorn", "httptools", "timm", "pydantic-core"} <= {*needed}
    assert not {"torch", "numpy", "transformers", "sympy", "pytest", "onnxruntime", "colorama"} & {*needed}


def test_what_was_imported_cannot_be_hidden() -> None:
    with pytest.raises(RuntimeError, match="torch"):
        bare.hide(("torch",))


def test_the_probe_gives_simulations_a_gpu(tmp_path: Path) -> None:
    record = Record(tmp_path / "probe.json", "probe", "me", {"name": "a GPU", "memory_bytes": 80 * 2**30})
    record.figures.update(bytes_per_s=2e12, flops=5e14)
    record.save()
    profiles.write(tmp_path)
    measured = profiles.measured_gpu(tmp_path)
    assert measured == Gpu("a GPU", 80 * 2**30, 2e12, 5e14)
    assert Costs(measured, LLAMA_7B).decode_s(1, 100, 0) > 0
    with pytest.raises(PliantError, match=r"profile-vision.json is not there; .* --stages vision"):
        profiles.measured_vision(tmp_path)


def test_classifiers_that_were_measured_whole_are_given_to_simulations(tmp_path: Path) -> None:
    record = Record(tmp_path / "encoders.json", "encoders", "me", {"name": "a GPU"})
    table = {"static_s": {"64": 0.001}, "dynamic_s": {"64": 0.004}, "packed_s": {"64": 0.002}}
    record.tables["BERT-base"] = table
    record.save()
    profiles.write(tmp_path)
    with pytest.raises(PliantError, match=r"profile-encoders.json is not there; .* --stages encoders"):
        profiles.measured_encoder(tmp_path)
    record.tables["BERT-base"] = table | {"packed_s_by_texts": {"1": 0.002, "8": 0.003}}
    record.save()
    profiles.write(tmp_path)
    measured = profiles.measured_encoder(tmp_path)
    assert (measured.name, measured.static_s(64), measured.dynamic_s(64)) == ("a GPU", 0.001, 0.004)
    assert measured.batch_s(8, 64) == pytest.approx(0.002)


def test_kernels_here_compute_what_the_readable_ones_do() -> None:
    errors = decoder_check.check(decoders.shape("8B", dry=True), torch.device("cpu"))
    assert errors["float32"] < 1e-4
