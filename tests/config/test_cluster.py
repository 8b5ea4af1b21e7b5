"""cluster.yaml: what is accepted, and that each mistake is told in one line with its key and what is allowed."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema
from typer.testing import CliRunner

from pliant.cache import cache_folder
from pliant.cli import command
from pliant.config import cluster as config
from pliant.errors import ConfigError

ROOT = Path(__file__).parents[2]
SERVICE = {"kind": "encoder", "model": "zoo/topics-small", "lengths": [32, 64], "replicas": 2}


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        config.parse({"services": {"topics": {**SERVICE, **changes}}})
    return error.value.problems


def write(folder: Path, **changes: Any) -> Path:
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["applications"][0]["args"]["services"]["topics"] |= changes
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.gpu.yaml"])
def test_the_files_we_ship_are_valid(name: str) -> None:
    assert config.read(ROOT / name).serving.services


def test_the_default_cluster_needs_no_network() -> None:
    config.check_models(config.read(ROOT / "cluster.yaml").serving)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "magic"}, "services.topics.kind: got 'magic'; it must be one of encoder, llm"),
        ({"slo_ms": "fast"}, "services.topics.slo_ms: got 'fast'; input should be a valid number"),
        ({"slo_ms": 0}, "services.topics.slo_ms: got 0; input should be greater than 0"),
        ({"lenghts": [1]}, "services.topics.lenghts: unknown key; did you mean lengths? allowed: cpus, demand"),
        ({"lengths": []}, "services.topics.lengths: got []"),
        ({"lengths": [64, 32]}, "services.topics.lengths: got [64, 32]; lengths must rise, each once"),
        ({"lengths": "some"}, "services.topics.lengths: got 'some'; must be auto, or a list of lengths"),
        ({"replicas": 0}, "services.topics.replicas: got 0; must be a number of at least 1, or {min: 1, max: 4}"),
        (
            {"replicas": {"min": 3, "max": 2}},
            "services.topics.replicas: got {'min': 3, 'max': 2}; max must be at least",
        ),
        ({"replicas": {"min": 3, "mx": 4, "max": 5}}, "services.topics.replicas.mx: unknown key; did you mean max?"),
        ({"demand_quantile": 1}, "services.topics.demand_quantile: got 1; input should be less than 1"),
        ({"dtype": "int8"}, "services.topics.dtype: got 'int8'; input should be 'float32' or 'bfloat16'"),
    ],
)
def test_each_mistake_is_one_line(changes: dict[str, Any], line: str) -> None:
    [problem] = problems(**changes)
    assert problem.startswith(line)
    assert "\n" not in problem


def test_all_mistakes_are_told_at_once() -> None:
    assert len(problems(dtype="int8", slo_ms=-1, extra=1)) == 3


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "services: missing; it must be given"),
        ({"services": {}}, "services: got {}"),
        ({"services": {"gateway": SERVICE}}, "services.gateway: the gateway itself has this name"),
        ({"services": {"planner": SERVICE}}, "services.planner: the planner itself has this name"),
        ({"services": {"a b": SERVICE}}, "services.a b: got 'a b'; string should match pattern"),
        ({"services": {"a": SERVICE}, "gatway": {}}, "gatway: unknown key; did you mean gateway?"),
        (
            {"services": {"a": SERVICE}, "gateway": {"max_text": 3}},
            "gateway.max_text: unknown key; did you mean max_texts?",
        ),
    ],
)
def test_mistakes_outside_a_service(args: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.parse(args)
    assert error.value.problems[0].startswith(line)


def test_models_are_checked(tmp_path: Path) -> None:
    for changes, line in (
        ({"model": "zoo/nothing"}, "services.topics.model:"),
        ({"model": str(tmp_path / "nothing")}, "services.topics.model:"),
        ({"lengths": [64, 1024]}, "services.topics.lengths: got 1024; zoo/topics-large takes at most 512 tokens"),
    ):
        with pytest.raises(ConfigError) as error:
            config.check_models(config.read(write(tmp_path, **changes)).serving)
        assert error.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("- 1", "the file: got [1]"),
        ("a: [", "is not YAML"),
        ("applications: []", "applications: got []"),
        ("applications: [{import_path: 'x:y', route_prefix: x}]", "applications.0.route_prefix: got 'x'"),
        (
            "{http_options: {prot: 1}, applications: [{import_path: 'x:y'}]}",
            "http_options.prot: unknown key; did you mean",
        ),
        ("{http_options: {port: abc}, applications: [{import_path: 'x:y'}]}", "http_options.port: got 'abc'"),
        ("applications: [{import_path: x:y}]", "applications: got import_path x:y; exactly one must be pliant"),
        ("application: []", "applications: missing"),
        (
            "applications: [{import_path: 'pliant.deployments.app:build', args: {services: {t: {kind: encoder}}}}]",
            "applications.0.args.services.t.model: missing",
        ),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, content: str, line: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        config.read(path)
    assert line in error.value.problems[0]


def test_lengths_may_be_left_to_the_profile() -> None:
    for lengths in ({}, {"lengths": "auto"}):
        service = {**{key: value for key, value in SERVICE.items() if key != "lengths"}, **lengths}
        topics = config.parse({"services": {"topics": service}}).services["topics"]
        assert topics.lengths is None
        assert topics.longest(model_takes=512) == 512


def test_replicas_are_a_number_or_a_range() -> None:
    fixed, scaled = (
        config.parse({"services": {"t": {**SERVICE, "replicas": replicas}}}).services["t"].replicas
        for replicas in (3, {"min": 1, "max": 4})
    )
    assert (fixed.min, fixed.max, fixed.fixed) == (3, 3, True)
    assert (scaled.min, scaled.max, scaled.fixed) == (1, 4, False)


def test_a_range_of_replicas_needs_the_autoscaling_policy(tmp_path: Path) -> None:
    path = write(tmp_path, replicas={"min": 1, "max": 4})
    content = yaml.safe_load(path.read_text())
    content["applications"][0].pop("autoscaling_policy", None)
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"\.autoscaling_policy: got policy_function None; topics scales"):
        config.read(path)
    content["applications"][0]["autoscaling_policy"] = {"policy_function": config.AUTOSCALING_POLICY}
    path.write_text(yaml.safe_dump(content))
    assert config.read(path)


def test_the_check_command(tmp_path: Path) -> None:
    good = CliRunner().invoke(command.app, ["check", str(ROOT / "cluster.yaml")])
    assert good.exit_code == 0
    assert "fine; serves topics (encoder)" in good.output
    bad = CliRunner().invoke(command.app, ["check", str(write(tmp_path, slo_ms=-1))])
    assert bad.exit_code == 1
    assert bad.output.count("\n") == 1
    assert "applications.0.args.services.topics.slo_ms: got -1" in bad.output
    missing = CliRunner().invoke(command.app, ["check", str(tmp_path / "nothing.yaml")])
    assert "cannot be read: No such file" in missing.output


def test_every_key_of_serve_is_known() -> None:
    """Serve accepts unknown keys in silence; we do not, so we must know all of its own."""
    assert set(config.CLUSTER_KEYS) == set(ServeDeploySchema.model_fields)
    assert set(config.HTTP_KEYS) == set(HTTPOptionsSchema.model_fields)
    assert set(config.APPLICATION_KEYS) == set(ServeApplicationSchema.model_fields) - {"host", "port"}


@pytest.mark.parametrize("folder", ["zoo/others", "/nowhere"])
def test_adapters_that_cannot_be_are_named(folder: str) -> None:
    parsed = config.parse({"services": {"chat": {"kind": "llm", "model": "zoo/tiny-llama", "adapters": folder}}})
    with pytest.raises(ConfigError, match=f"services.chat.adapters.folder: {folder}: "):
        config.check_models(parsed)


def test_adapters_need_a_place_to_come_from() -> None:
    with pytest.raises(ConfigError, match=r"services\.chat\.adapters: .*roots from which they may be loaded"):
        config.parse({"services": {"chat": {"kind": "llm", "model": "zoo/tiny-llama", "adapters": {"cache": "lru"}}}})


def test_each_registry_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    def llm(registry: str | None) -> dict[str, Any]:
        return {"kind": "llm", "model": "zoo/tiny-llama", "adapters": {"folder": "zoo/adapters", "registry": registry}}

    def services(*registries: str | None) -> dict[str, Any]:
        return {"services": {f"chat-{index}": llm(registry) for index, registry in enumerate(registries)}}

    assert config.parse(services(None, None, str(tmp_path / "a"), str(tmp_path / "b")))
    default = str(cache_folder() / "registries" / "chat-0.json")
    for first, second in ((str(tmp_path / "a"), str(tmp_path / "link" / "a")), (None, default)):
        with pytest.raises(ConfigError) as error:
            config.parse(services(first, second))
        line = f"services.chat-1.adapters.registry: got {second}; chat-0 keeps its adapters in that file"
        assert [problem.startswith(line) for problem in error.value.problems] == [True]
