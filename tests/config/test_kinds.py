"""A kind's config is added in one line, and says itself what only its kind knows."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import yaml

from pliant.config.base import (
    CatalogConfig,
    Example,
    ModelServiceConfig,
    ReplicaCount,
    ReplicaRange,
    ServiceConfig,
)
from pliant.config.cluster import AUTOSCALING_POLICY, IMPORT_PATH, Reader, ServingConfig, check_models
from pliant.config.encoder import EncoderConfig
from pliant.deployments.kinds import CONFIGS, parse
from pliant.errors import ConfigError, ModelError

CONFIG = Path(__file__).parents[2] / "src" / "pliant" / "config"
MODEL = {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}


class WordsConfig(CatalogConfig):
    registries: ClassVar[str] = "words"


class EchoConfig(ModelServiceConfig):
    """Answers what it is sent."""

    kind: Literal["echo"]
    replicas: ReplicaRange | ReplicaCount = 1
    of: str | None = None
    loud: bool = False
    words: WordsConfig = WordsConfig()

    def example(self, name: str) -> Example:
        return Example(f"echo/{name}", {"text": "hello"})

    def parts(self) -> tuple[str, ...]:
        return (self.of,) if self.of else ()

    def settings_of_parts(self) -> Mapping[str, Mapping[str, Any]]:
        return {self.of: {"truncate": True}} if self.of else {}

    def catalogs(self) -> Mapping[str, CatalogConfig]:
        return {"words": self.words}

    def conflicts(self, services: Mapping[str, ServiceConfig]) -> Iterator[str]:
        if self.of and self.of not in services:
            yield f"of: got {self.of}; there is no such service"

    def misfit(self, services: Mapping[str, ServiceConfig]) -> str | None:
        if self.model == "nothing":
            raise ModelError("nothing: there is no such voice")
        return "loud: got True; the model cannot shout" if self.loud else None


READER = Reader((*CONFIGS, EchoConfig))


def echoes(**changes: Any) -> ServingConfig:
    return READER.parse({"services": {"e": {"kind": "echo", "model": "zoo/voice", **changes}, "t": MODEL}})


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check_models(echoes(**changes))
    return error.value.problems


def test_a_sixth_kind_is_parsed() -> None:
    serving = echoes(cpus=2)
    assert serving.of(EchoConfig) == {"e": EchoConfig(kind="echo", model="zoo/voice", cpus=2)}
    assert list(serving.of(EncoderConfig)) == ["t"]
    assert pickle.loads(pickle.dumps(serving)) == serving


def test_the_kinds_that_there_are_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        parse({"services": {"e": {"kind": "echo"}, "encoder": {"model": "x"}}})
    assert error.value.problems == [
        "services.e.kind: got 'echo'; it must be one of encoder, llm, vision, cascade, route, llm-cascade",
        "services.encoder.kind: missing; it must be one of encoder, llm, vision, cascade, route, llm-cascade",
    ]
    with pytest.raises(ConfigError, match=r"got 'magic'; it must be one of .*, route, llm-cascade, echo$"):
        READER.parse({"services": {"e": {"kind": "magic"}}})


def test_its_mistakes_are_told_as_those_of_others() -> None:
    assert problems(load=True) == [
        "services.e.load: unknown key; did you mean loud? allowed: cpus, dtype, gpus, kind, loud, model, of, replicas, "
        "words"
    ]
    assert problems(words={"floder": "x"})[0].startswith("services.e.words.floder: unknown key; did you mean folder?")
    assert problems(of="x") == ["services.e.of: got x; there is no such service"]
    assert problems(model="nothing") == ["services.e.model: nothing: there is no such voice"]
    assert problems(loud=True) == ["services.e.loud: got True; the model cannot shout"]


def test_its_parts_are_checked_before_it_and_set_for_it() -> None:
    assert [service.truncate for service in echoes(of="t").of(EncoderConfig).values()] == [True]
    broken = READER.parse(
        {
            "services": {
                "e": {"kind": "echo", "model": "zoo/voice", "of": "t", "loud": True},
                "t": {**MODEL, "lengths": [4096]},
            }
        }
    )
    with pytest.raises(ConfigError) as error:
        check_models(broken)
    assert error.value.problems == ["services.t.lengths: got 4096; zoo/topics-small takes at most 512 tokens"]


def test_what_is_fetched_for_it() -> None:
    assert echoes(words="zoo/words").services["e"].fetched() == ("zoo/voice", "zoo/words")


@pytest.mark.parametrize("policy", [None, AUTOSCALING_POLICY])
def test_it_scales_only_with_the_policy(tmp_path: Path, policy: str | None) -> None:
    echo = {"kind": "echo", "model": "zoo/voice", "replicas": {"min": 1, "max": 2}}
    application = {"import_path": IMPORT_PATH, "args": {"services": {"e": echo}}}
    if policy:
        application["autoscaling_policy"] = {"policy_function": policy}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    if policy:
        assert READER.read(path).serving.services["e"].replica_range() == ReplicaRange(min=1, max=2)
    else:
        with pytest.raises(ConfigError, match=r"there are min and max replicas of e,"):
            READER.read(path)


@pytest.mark.parametrize("file", ["base", "cluster", "problems"])
def test_what_all_kinds_share_names_none(file: str) -> None:
    kinds = {config.model_fields["kind"].annotation.__args__[0] for config in CONFIGS}
    tree = ast.parse((CONFIG / f"{file}.py").read_text())
    imported = {node.module.split(".")[-1] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert not kinds & imported
    assert not kinds & texts
