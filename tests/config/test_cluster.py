"""cluster.yaml as a whole: what is accepted, and that each mistake is told in one line with its key."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema
from typer.testing import CliRunner

from pliant.cli import command
from pliant.config import cluster as config
from pliant.config.base import ReplicaRange
from pliant.deployments.kinds import parse, read
from pliant.errors import ConfigError

ROOT = Path(__file__).parents[2]
SERVICE = {"kind": "encoder", "model": "zoo/topics-small", "lengths": [32, 64], "replicas": 2}


def write(folder: Path, **changes: Any) -> Path:
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["applications"][0]["args"]["services"]["topics"] |= changes
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_default_cluster_and_one_replica_more_of_each_service_fit_on_one_core() -> None:
    serving = read(ROOT / "cluster.yaml").serving
    sizes = [(service, service.replica_range()) for service in serving.services.values()]
    reserved = sum((size.max + 1) * service.resources()["num_cpus"] for service, size in sizes if size)
    assert reserved + 2 * serving.gateway.cpus <= 0.9  # the planner has the rest


@pytest.mark.parametrize("name", ["cluster.yaml", "cluster.gpu.yaml"])
def test_the_files_we_ship_are_valid(name: str) -> None:
    assert read(ROOT / name).serving.services


def test_the_default_cluster_needs_no_network() -> None:
    config.check_models(read(ROOT / "cluster.yaml").serving)


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
        ({"services": {"a": SERVICE | {"gpus": 2}}}, "services.a.gpus: got 2; input should be less than or equal to 1"),
        ({"services": {"a": SERVICE}, "budget": {"nodes": []}}, "budget.nodes: got []"),
        ({"services": {"a": SERVICE}, "budget": {"nodes": [{"gpus": 1}]}}, "budget.nodes.0.cpus: missing"),
        ({"services": {"a": SERVICE}, "budget": {"reserv": 1}}, "budget.reserv: unknown key; did you mean reserve?"),
        (
            {"services": {"a": SERVICE}, "budget": {"policy": "best"}},
            "budget.policy: got 'best'; must be one of joint, independent, greedy, or my_package:Policy; Module",
        ),
        (
            {"services": {"a": SERVICE}, "budget": {"policy": "collections:Countr"}},
            "budget.policy: got 'collections:Countr'; must be one of joint, independent, greedy, or my_package:Policy; "
            "AttributeError: module 'collections' has no attribute 'Countr'",
        ),
        (
            {"services": {"a": SERVICE}, "budget": {"policy": "collections:Counter"}},
            "budget.policy: got 'collections:Counter'; must name a class with a method `decide`",
        ),
        (
            {"services": {"a": SERVICE}, "budget": {"policy": "pliant.policies.cluster.control:Policy"}},
            "budget.policy: got 'pliant.policies.cluster.control:Policy'; cannot be made without arguments; "
            "TypeError: Protocols cannot be instantiated",
        ),
        (
            {"services": {"a": SERVICE | {"replicas": {"min": 0, "max": 2}}}},
            "services.a.replicas.min: a service sleeps only within a budget; add the line `budget: {}`",
        ),
    ],
)
def test_mistakes_outside_a_service(args: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(args)
    assert error.value.problems[0].startswith(line)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("- 1", "the file: got [1]"),
        ("a: [", "is not YAML"),
        ("a: 2024-99-99", "is not YAML: month must be in 1..12"),
        ("[" * 5_000, "is not YAML: maximum recursion depth exceeded"),
        ("a: {b: 1}\nc:\n  b: 2\n  d: 3\n  b: 4", "is not YAML: b is there twice, in lines 3 and 5"),
        ("a: {b: 1, b: 2}", "is not YAML: b is there twice, in lines 1 and 1"),
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
        read(path)
    assert line in error.value.problems[0]


def test_a_range_of_replicas_needs_the_autoscaling_policy(tmp_path: Path) -> None:
    path = write(tmp_path, replicas={"min": 1, "max": 4})
    content = yaml.safe_load(path.read_text())
    content["applications"][0].pop("autoscaling_policy", None)
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match=r"\.autoscaling_policy: got policy_function None; there are min and max"):
        read(path)
    content["applications"][0]["autoscaling_policy"] = {"policy_function": config.AUTOSCALING_POLICY}
    path.write_text(yaml.safe_dump(content))
    assert read(path)


def test_models_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        config.check_models(read(write(tmp_path, lengths=[64, 1024])).serving)
    assert error.value.problems == ["services.topics.lengths: got 1024; zoo/topics-large takes at most 512 tokens"]


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


@pytest.mark.parametrize("state", [None, "/shared/pliant", "~/pliant", "memory://bucket/pliant"])
def test_where_state_lies(state: str | None) -> None:
    given = {} if state is None else {"state": state}
    assert (
        parse({**given, "services": {"t": {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}}}).state
        == state
    )


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ("pliant", "state: got 'pliant'; must be an absolute folder, which every node has, or a URL such as s3://"),
        ("magic://bucket", "state: got 'magic://bucket'; magic:// cannot be used: Protocol not known: magic"),
    ],
)
def test_state_that_cannot_be_reached(state: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse({"state": state, "services": {"t": {"kind": "encoder", "model": "zoo/topics-small", "replicas": 1}}})
    [problem] = error.value.problems
    assert problem.startswith(line)


def test_what_a_cascade_is_made_of_may_sleep_within_a_budget() -> None:
    cascade = {"kind": "cascade", "levels": ["a", "b"], "accuracy_loss": 0.1, "data": "x"}
    services = {"a": SERVICE | {"replicas": {"min": 0, "max": 2}}, "b": SERVICE, "c": cascade}
    assert parse({"services": services, "budget": {}}).services["a"].replica_range() == ReplicaRange(min=0, max=2)
    with pytest.raises(ConfigError, match="a service sleeps only within a budget"):
        parse({"services": services})


def test_gateways_may_have_a_range_and_never_sleep(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = yaml.safe_load(path.read_text())
    application = content["applications"][0]
    application["args"]["gateway"] = {"replicas": {"min": 1, "max": 4}}
    application.pop("autoscaling_policy", None)
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="there are min and max replicas of gateway, for which it must be"):
        read(path)
    application["autoscaling_policy"] = {"policy_function": config.AUTOSCALING_POLICY}
    path.write_text(yaml.safe_dump(content))
    assert read(path).serving.gateway.replicas == ReplicaRange(min=1, max=4)
    application["args"]["gateway"]["replicas"]["min"] = 0
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError, match="a gateway does not sleep: min must be at least 1"):
        read(path)
