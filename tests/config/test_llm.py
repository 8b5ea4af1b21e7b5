"""What cluster.yaml may say of a language model, and the line for each mistake."""

from __future__ import annotations

from typing import Any

import pytest

from pliant.config.base import ReplicaRange
from pliant.config.cluster import ServingConfig, check_models
from pliant.config.llm import AdaptersConfig, LlmConfig
from pliant.deployments.kinds import parse
from pliant.errors import ConfigError

SERVICE = {"kind": "llm", "model": "zoo/tiny-llama"}


def serving(**changes: Any) -> ServingConfig:
    return parse({"services": {"chat": {**SERVICE, **changes}}})


def test_a_text_means_the_folder_of_adapters() -> None:
    assert serving(adapters="zoo/adapters").of(LlmConfig)["chat"].adapters == AdaptersConfig(folder="zoo/adapters")
    assert serving(adapters=None).of(LlmConfig)["chat"].adapters is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"replicas": 0}, "services.chat.replicas: got 0; must be a number of at least 1, or {min: 1, max: 4}"),
        (
            {"replicas": {"min": 1, "max": 2}},
            "services.chat.replicas: a service of kind llm scales only within a budget; add the line `budget: {}`",
        ),
        ({"weight": 0}, "services.chat.weight: got 0; input should be greater than 0"),
        ({"adapters": {"folder": "x", "host_mb": -1}}, "services.chat.adapters.host_mb: got -1; "),
        ({"adapters": 5}, "services.chat.adapters: got 5; input should be a valid dictionary"),
        ({"adapters": {"fodler": "x"}}, "services.chat.adapters.fodler: unknown key; did you mean folder? allowed: ca"),
        (
            {"adapters": {"cache": "lru"}},
            "services.chat.adapters: got {'cache': 'lru'}; needs a folder of adapters, or",
        ),
        ({"slo_ms": 9000, "timeout_s": 5}, "services.chat: got {"),
        ({"tensor_parallel": 3}, "services.chat.tensor_parallel: got 3; "),
        ({"adapters": {"roots": ["nosuch://a"]}}, "services.chat.adapters.roots"),
        ({"quantize": "int4"}, "services.chat.quantize: got 'int4'; "),
    ],
)
def test_each_mistake_is_one_line(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        serving(**changes)
    [problem] = error.value.problems
    assert problem.startswith(line)


def test_within_a_budget_its_replicas_may_change() -> None:
    config = parse({"budget": {}, "services": {"chat": {**SERVICE, "replicas": {"min": 1, "max": 2}}}})
    assert config.of(LlmConfig)["chat"].replicas == ReplicaRange(min=1, max=2)
    assert serving(replicas=3).of(LlmConfig)["chat"].replicas == ReplicaRange(min=3, max=3)


def test_processes_that_compute_a_model_together_have_a_gpu_each() -> None:
    with pytest.raises(ConfigError, match=r"gpus must be 1, or 0 for CPUs, with tensor_parallel.*; got 0\.5"):
        serving(tensor_parallel=2, gpus=0.5)
    [service] = serving(tensor_parallel=4, gpus=1, cpus=2).services.values()
    assert service.resources() == {"num_cpus": 8, "num_gpus": 4}


def test_int8_takes_less_memory() -> None:
    narrow, wide = (serving(quantize=how).services["chat"].memory_bytes() for how in ("int8", None))
    assert narrow < wide / 2


def test_fp8_is_for_gpus_and_holds_twice_the_tokens() -> None:
    with pytest.raises(ConfigError, match="quantize: fp8 is for GPUs; set gpus, or use int8"):
        serving(quantize="fp8", dtype="bfloat16")
    with pytest.raises(ConfigError, match="quantize: fp8 goes with dtype: bfloat16"):
        serving(quantize="fp8", gpus=1)
    text = {"gpus": 1, "dtype": "bfloat16", "memory_mb": 1, "max_length": 1024}
    check_models(serving(**text, quantize="fp8"))
    with pytest.raises(ConfigError, match="a text of 1024 tokens x 2 KiB = 2 MB"):
        check_models(serving(**text))


@pytest.mark.parametrize("folder", ["zoo/others", "/nowhere"])
def test_adapters_that_cannot_be_are_named(folder: str) -> None:
    with pytest.raises(ConfigError, match=f"services.chat.adapters.folder: {folder}: "):
        check_models(serving(adapters=folder))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tensor_parallel": 8}, "services.chat.tensor_parallel: got 8; 8 ranks cannot share "),
        ({"max_length": 4096}, "services.chat.max_length: got 4096; zoo/tiny-llama takes at most "),
        ({"memory_mb": 1, "max_length": 1024}, "services.chat.memory_mb: got 1; a text of 1024 tokens x 4 KiB = 4 MB "),
    ],
)
def test_the_model_is_checked(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_models(serving(**changes))
    [problem] = error.value.problems
    assert problem.startswith(line)
