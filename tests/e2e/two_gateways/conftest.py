"""A cluster behind HAProxy, for tests that take its parts away: two gateways, one replica each of a text classifier and
a language model, a model of which there is a new version, and replicas that only sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.encoder_models import save, save_pooling
from support.waiting import PATIENT_MS, PROCESS_HANGS_AFTER_S

from e2e.application import IMPORT_PATH
from e2e.cluster import ROOT, Cluster, serving
from e2e.pretend_nodes import LENGTHS, model
from e2e.scaled import POLICY, SLEEPING, TOLD


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The number of sleeping replicas that there are to be."""
    file = tmp_path_factory.mktemp("told") / "replicas"
    file.write_text("3")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOLD, str(file))
        yield file


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that read texts differently: by their prompt, and by whether they know of token types."""
    root = tmp_path_factory.mktemp("models")
    old = save_pooling(save(root / "old", "bert", "embed"), "mean", True)
    prompts = {"prompts": {"all": "the cat "}, "default_prompt_name": "all"}
    new = save_pooling(save(root / "new", "roberta", "embed", type_vocab_size=1), "mean", True, **prompts)
    return old, new


@pytest.fixture(scope="package")
def cluster(
    told: Path, versions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, faults_folder: None
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("two_gateways")
    content = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    content["applications"][0]["import_path"] = IMPORT_PATH
    args = content["applications"][0]["args"]
    args["gateway"]["replicas"] = 2
    args["budget"] = {"policy": POLICY}
    services = {name: {**args["services"][name], "replicas": 1} for name in ("topics-small", "chat")}
    services["chat"] |= {"slo_ms": PATIENT_MS, "timeout_s": PROCESS_HANGS_AFTER_S}
    few = {"kind": "encoder", "slo_ms": PATIENT_MS, "cpus": 0.05}
    services["vectors"] = {**few, "model": str(versions[0]), "replicas": 2, "timeout_s": PROCESS_HANGS_AFTER_S}
    sleeping = {"model": model(folder / "model"), "lengths": list(LENGTHS), "residency": "one"}
    services[SLEEPING] = {**few, **sleeping, "replicas": {"min": 1, "max": 3}}
    args["services"] = services
    with serving(content, folder) as started:
        yield started
