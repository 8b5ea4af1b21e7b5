"""One real cluster for all end-to-end tests but those of several nodes or gateways: the repository's own cluster.yaml,
and more.

Its models are trained while tests already ask those services that are ready: each file of tests names in NEEDS what it
asks. What is more: a folder from which tasks may be loaded, a random language model with many adapters, a cascade of
both language models, two cascades whose profile is given, and a service of the toy kind. Nothing gives up because the
machine is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from support.waiting import HANGS_AFTER_S, PATIENT_MS, PROCESS_HANGS_AFTER_S

from e2e import answers, faults, given_cascades
from e2e.adapter_oracle import NAME, Oracle
from e2e.application import IMPORT_PATH
from e2e.cluster import ROOT, Cluster, serving


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="session")
def faults_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where `faults` finds its orders, here and in replicas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faults.FOLDER, str(tmp_path_factory.mktemp("faults")))
        yield


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle, faults_folder: None) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    application = content["applications"][0]
    application["logging_config"]["encoding"] = "JSON"
    application["import_path"] = IMPORT_PATH
    args = application["args"]
    services: dict[str, Any] = args["services"]
    services["digits"]["replicas"] = 2
    services["digits"]["tasks"] = {
        "folder": services["digits"]["tasks"],
        "roots": [str(folder / "tasks")],
    }
    services[NAME] = oracle.service()
    services[answers.NAME] = answers.service(folder)
    args["state"] = str(folder)
    for service in services.values():
        if service["kind"] not in ("cascade", "route", "llm-cascade"):
            service["timeout_s"] = PROCESS_HANGS_AFTER_S
        if service["kind"] in ("llm", "route", "llm-cascade"):
            service["slo_ms"] = PATIENT_MS
    with given_cascades.added(args, folder):
        services["echo"] = {"kind": "echo", "replicas": 2, "timeout_s": HANGS_AFTER_S, "answer_s": 0.1}
        with serving(content, folder) as started:
            yield started


@pytest.fixture(scope="module", autouse=True)
def _ready(request: pytest.FixtureRequest) -> None:
    """The services that a file NEEDS can answer; all, if it does not say which."""
    if "cluster" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("cluster")
        cluster.await_ready(*getattr(request.module, "NEEDS", ()))
