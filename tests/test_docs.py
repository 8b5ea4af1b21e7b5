"""The documents name what there is: links, keys of cluster.yaml, metrics, commands, routes and statuses, both ways."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import typer
from pydantic import BaseModel
from support.tenants import keyed

from pliant.cli import command as cli
from pliant.cli.doctor_checks import examine
from pliant.cli.doctor_facts import Facts, Node, Unknown, Wants, machine
from pliant.config.budget import BudgetConfig
from pliant.config.cascade import CascadeConfig
from pliant.config.cluster import GatewayConfig
from pliant.config.encoder import EncoderConfig
from pliant.config.llm import AdaptersConfig, LlmConfig
from pliant.config.llm_cascade import LlmCascadeConfig
from pliant.config.route import RouteConfig
from pliant.config.tenants import TenantConfig
from pliant.config.vision import VisionConfig
from pliant.deployments.http.application import application
from pliant.deployments.http.statuses import OPENAI, STATUSES
from pliant.deployments.kinds import loaded, read
from pliant.deployments.serving.batches.runner import Runner
from pliant.deployments.serving.batches.store import BatchStore
from pliant.deployments.serving.outcome import Outcome, Retry
from pliant.deployments.serving.services import Services
from pliant.deployments.serving.state.storage import FolderStorage

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("*.md")]
KEYS: dict[str, type[BaseModel]] = {
    "key of `gateway`": GatewayConfig,
    "key of a tenant": TenantConfig,
    "key of `budget`": BudgetConfig,
    "key of an `encoder` service": EncoderConfig,
    "key of a `cascade` service": CascadeConfig,
    "key of an `llm` service": LlmConfig,
    "key of `adapters`": AdaptersConfig,
    "key of an `llm-cascade` service": LlmCascadeConfig,
    "key of a `route` service": RouteConfig,
    "key of a `vision` service": VisionConfig,
}
"""By the head of the table that has them."""
NO_METRICS = {"pliant_encoder", "pliant_cascade", "pliant_vision"}
"""Platforms of models."""
FASTAPI_S_OWN = {"GET /docs", "GET /openapi.json"}


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_cells(page: Path, head: str) -> set[str]:
    """What is set as code in the first column of the table that begins with `head`."""
    _, _, rest = page.read_text().partition(f"| {head} |")
    table = rest.split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:] if line.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def strings(folder: Path) -> Iterator[tuple[Path, str]]:
    for module in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield module, node.value


def metric_names() -> Iterator[tuple[Path, str]]:
    for module, text in strings(ROOT / "deployments"):
        if re.fullmatch(r"pliant_\w+", text) and text not in NO_METRICS:
            yield module, text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not link.startswith("http"):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"({page.name}" in index


def test_the_readme_has_a_whole_cluster_yaml(tmp_path: Path) -> None:
    """It is read as it stands; its models are on the hub."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    path = tmp_path / "cluster.yaml"
    path.write_text(block)
    assert read(path).serving.services.keys() == {"reviews", "chat", "photos"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_key_of_an_example_opens_a_cluster(page: Path) -> None:
    """What somebody copies into a file of keys is refused."""
    assert not re.search(r"\b[0-9a-f]{64}\b", page.read_text())


@pytest.mark.parametrize("head", KEYS)
def test_keys_of_cluster_yaml(head: str) -> None:
    page = "tenants.md" if head == "key of a tenant" else "configuration.md"
    assert first_cells(DOCS / page, head) == {
        field.alias or name for name, field in KEYS[head].model_fields.items()
    } - {"kind"}


def test_metrics() -> None:
    named = {name for _, name in metric_names()}
    told = set(re.findall(r"`(pliant_\w+)`", (DOCS / "metrics.md").read_text()))
    assert {name.removesuffix("_total") for name in told} == {name.removesuffix("_total") for name in named}


def test_metric_names_stand_in_one_file_a_kind() -> None:
    elsewhere = {
        (str(module.relative_to(ROOT)), name) for module, name in metric_names() if module.name != "metrics.py"
    }
    assert not elsewhere


def test_commands_and_flags() -> None:
    page = (DOCS / "commands.md").read_text()
    commands = typer.main.get_group(cli.app).commands
    flags = {
        flag for command in commands.values() for option in command.params for flag in option.opts if flag[:2] == "--"
    }
    assert set(re.findall(r"^\| `pliant ([\w-]+)", page, re.M)) == commands.keys()
    assert set(re.findall(r"`(--[\w-]+)", page)) == flags


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_understood(page: Path) -> None:
    """In blocks of code: what `pliant` is given there."""
    commands = typer.main.get_group(cli.app).commands
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```", page.read_text(), flags=re.M | re.S):
        for line in re.findall(r"^ *(?:\$ )?(?:\S*/)?pliant ([^►\n]*)$", block, re.M):
            name, *arguments = shlex.split(line, comments=True)
            assert name in commands, line
            commands[name].make_context(name, arguments).close()


def test_what_doctor_looks_at() -> None:
    nobody = Unknown("not looked at")
    node = Node("here", machine(), guarded=True)
    names = {name for name, _ in examine(Facts(Wants(0, 0, 0), "", None, [nobody], [node], ray=True))}
    assert first_cells(DOCS / "operate.md", "check") == names


def test_routes() -> None:
    placeholders = {"model": "NAME", "task": "TASK", "version": "1", "file_id": "ID", "batch_id": "ID"}
    batches = Runner(BatchStore(FolderStorage(ROOT)), "")
    config, services = GatewayConfig(), Services([])
    routers = [router for kind in loaded().values() for router in kind.routers(services, None, config)]
    app = application(config, services, dict, bytes, routers, keyed(()), batches=batches)
    paths = app.openapi()["paths"]
    there = {
        f"{method.upper()} {re.sub(r'{(.*?)}', lambda part: placeholders[part[1]], path)}"
        for path, methods in paths.items()
        for method in methods
    }
    page = (DOCS / "clients.md").read_text()
    told = set(re.findall(r"`((?:GET|POST|DELETE) /[^`]*)`", page.partition("## Texts")[0])) - FASTAPI_S_OWN
    assert told == {route for route in there if "/versions/" not in route}
    for route in there - told:
        assert f"`{route.split()[1]}`" in page


def statuses(module: Path) -> Iterator[int]:
    """Those of errors: given to a function, or in a table of them."""
    for node in ast.walk(ast.parse(module.read_text())):
        given = node.args if isinstance(node, ast.Call) else node.values if isinstance(node, ast.Dict) else ()
        for value in given:
            if isinstance(value, ast.Constant) and value.value in range(400, 600):
                yield value.value


def test_statuses() -> None:
    found = {*STATUSES.values(), *(row.status for row in OPENAI.values())}
    _, _, table = (DOCS / "clients.md").read_text().partition("| status | when |")
    told = set(re.findall(r"\b[45]\d\d\b", " ".join(re.findall(r"^\|([^|]*)\|", table, re.M))))
    assert told == set(map(str, found))


def test_only_the_tables_of_protocols_know_statuses() -> None:
    for module in (ROOT / "deployments").rglob("*.py"):
        assert module.name == "statuses.py" or not set(statuses(module)), module


def test_outcomes() -> None:
    assert first_cells(DOCS / "metrics.md", "outcome") == set(Outcome)
    retries = re.search(r"^\| `pliant_retries_total` .*$", (DOCS / "metrics.md").read_text(), re.M)
    assert retries
    assert set(re.findall(r"`([a-z]+)`", retries[0])) == set(get_args(Retry))
