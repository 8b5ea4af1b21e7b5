"""Each check of `pliant doctor`, over facts that are made up."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from pliant.cli import doctor_checks
from pliant.cli.doctor_checks import Finding, examine
from pliant.cli.doctor_facts import (
    Compiler,
    Cuda,
    Disk,
    Facts,
    Machine,
    Memory,
    Node,
    Port,
    SharedMemory,
    Unknown,
    Wants,
)

GB = 10**9
VERSIONS = {"python": "3.11.2", "pliant": "0.1.0", "ray": "2.60.0", "torch": "2.13.0+cpu"}
WANTS = Wants(cpus=4, gpus=0, memory_bytes=4 * GB)
MACHINE = Machine(
    host="a",
    cpus=8,
    versions=VERSIONS,
    c_compiler=Compiler("cc"),
    cxx_compiler=Compiler("g++"),
    memory=Memory(16 * GB, 12 * GB),
    shared_memory=SharedMemory(8 * GB, 8 * GB, 12 * GB, ray_runs=False),
    cache=Disk("/cache", 50 * GB, writable=True),
    cuda=Cuda(0, None, None),
    haproxy=True,
)
FREE = Port(8000, "the cluster", None, right=False, fix="stop it")
FACTS = Facts(
    file=WANTS, url="http://x:8000", troubles=None, ports=[FREE], nodes=[Node("this machine", MACHINE)], ray=False
)


def node(host: str, **changed: Any) -> Node:
    return Node(host, replace(MACHINE, host=host, **changed), guarded=True)


def of_nodes(*nodes: Node) -> list[tuple[str, Finding]]:
    return list(examine(replace(FACTS, nodes=list(nodes), ray=True)))


def found(findings: list[tuple[str, Finding]], check: str) -> list[Finding]:
    return [finding for name, finding in findings if name == check]


def test_where_all_is_well_each_check_says_so_in_one_line() -> None:
    for facts in (FACTS, replace(FACTS, nodes=[node("a"), node("b")], ray=True, troubles=[])):
        for name, finding in examine(facts):
            assert finding.level == "ok", (name, finding)
            assert "\n" not in finding.says


@pytest.mark.parametrize(
    ("check", "fact", "level", "says"),
    [
        ("file", Unknown("services.a: what?"), "problem", "services.a: what?"),
        ("c_compiler", Compiler(None), "warning", "no C compiler"),
        ("c_compiler", Compiler("cc", "no stdio.h"), "problem", "cc does not compile a few lines: no stdio.h"),
        ("cxx_compiler", Compiler(None), "warning", "no C++ compiler"),
        ("cxx_compiler", Compiler("g++", "killed"), "problem", "g++ does not compile a few lines: killed"),
        ("shared_memory", SharedMemory(64 * 10**6, 64 * 10**6, 12 * GB, False), "warning", "Ray wants 3.6 GB"),
        ("shared_memory", SharedMemory(8 * GB, GB, 12 * GB, False), "warning", "has 1.0 GB"),
        ("shared_memory", SharedMemory(8 * GB, GB, 12 * GB, True), "ok", "has 8.0 GB"),
        ("shared_memory", SharedMemory(11 * GB, 11 * GB, 900 * GB, False), "ok", "Ray wants 10.0 GB"),
        ("cache", Disk("/c", 50 * GB, writable=False), "problem", "/c cannot be written"),
        ("cache", Disk("/c", GB // 2, writable=True), "problem", "no room"),
        ("cache", Disk("/c", 2 * GB, writable=True), "warning", "2.0 GB left"),
        ("cuda", Cuda(2, (12, 8), None), "problem", "torch was built for CPUs alone"),
        ("cuda", Cuda(2, (12, 8), (13, 0)), "problem", "the driver is for CUDA 12.8, torch for 13.0"),
        ("cuda", Cuda(2, (12, 4), (12, 8)), "warning", "12.4"),
        ("cuda", Cuda(2, (13, 0), (12, 8)), "ok", "2 GPUs"),
        ("cuda", Cuda(0, None, (12, 8)), "ok", "no NVIDIA GPU"),
        ("has_haproxy", False, "warning", "no HAProxy"),
        ("port", replace(FREE, holder="nginx (process 7)"), "problem", "8000 is held by nginx (process 7)"),
        ("port", replace(FREE, holder="python (process 7)", right=True), "ok", "python (process 7): the cluster"),
        ("port", FREE, "ok", "is free"),
    ],
)  # fmt: skip
def test_a_fact_and_what_is_made_of_it(check: str, fact: Any, level: str, says: str) -> None:
    finding = getattr(doctor_checks, check)(fact)
    assert finding.level == level
    assert says in finding.says
    assert bool(finding.fix) == (level != "ok")


@pytest.mark.parametrize(
    ("check", "have", "wants", "alone", "level"),
    [
        ("memory", [Memory(3 * GB, 3 * GB)], WANTS, True, "problem"),
        ("memory", [Memory(3 * GB, 3 * GB)] * 2, WANTS, False, "ok"),
        ("memory", [Memory(16 * GB, GB)], WANTS, True, "warning"),
        ("memory", [Memory(16 * GB, GB)], WANTS, False, "ok"),
        ("cpus", [2], WANTS, True, "warning"),
        ("cpus", [2], WANTS, False, "problem"),
        ("cpus", [2, 2], WANTS, False, "ok"),
        ("gpus", [Cuda(0, None, None)], replace(WANTS, gpus=1), True, "warning"),
        ("gpus", [Cuda(1, (12, 8), (12, 8))] * 2, replace(WANTS, gpus=3), False, "problem"),
        ("gpus", [Cuda(1, (12, 8), (12, 8))] * 3, replace(WANTS, gpus=3), False, "ok"),
    ],
)
def test_what_the_file_wants_beside_what_there_is(
    check: str, have: list[Any], wants: Wants, alone: bool, level: str
) -> None:
    finding = getattr(doctor_checks, check)(have, wants, alone)
    assert finding.level == level
    assert bool(finding.fix) == (level != "ok")


def test_gpus_without_a_driver_need_one() -> None:
    lacking = doctor_checks.gpus([Cuda(0, None, (12, 8))], replace(WANTS, gpus=1), True)
    assert "install the NVIDIA driver" in lacking.fix


def test_a_ray_that_does_not_answer_is_a_warning() -> None:
    finding = doctor_checks.nodes(FACTS.nodes, Unknown("a token is missing"))
    assert finding.level == "warning"
    assert "a token is missing" in finding.says


def test_a_node_that_does_not_answer_is_named_and_no_sum_is_made_of_the_others() -> None:
    findings = of_nodes(node("a"), Node("b", Unknown("No module named pliant")))
    (lost,), (memory,) = found(findings, "nodes"), found(findings, "memory")
    assert (lost.level, memory.level) == ("warning", "warning")
    assert "b (No module named pliant)" in lost.says
    assert "b: No module named pliant" in memory.says


def test_what_is_wrong_on_one_node_names_it() -> None:
    (compiler,) = found(of_nodes(node("a"), node("b", c_compiler=Compiler(None))), "c compiler")
    assert compiler.level == "warning"
    assert compiler.says.startswith("b: ")


def test_nodes_without_a_token_are_named() -> None:
    (token,) = found(of_nodes(node("a"), replace(node("b"), guarded=False)), "token")
    assert token.level == "problem"
    assert token.says.endswith("on b")


@pytest.mark.parametrize(
    ("library", "version", "level"),
    [
        ("pliant", "0.2.0", "warning"),
        ("torch", "2.12.0+cpu", "problem"),
        ("torch", "2.13.0+cu128", "ok"),
        ("ray", "2.61.0", "problem"),
        ("python", "3.12.1", "problem"),
    ],
)
def test_versions_that_differ_are_named_with_their_nodes(library: str, version: str, level: str) -> None:
    other = node("c", versions={**VERSIONS, library: version})
    (versions,) = found(of_nodes(node("a"), node("b"), other), "versions")
    assert versions.level == level
    if level != "ok":
        assert f"{version.partition('+')[0]} on c" in versions.says
        assert "on a and 1 more" in versions.says


@pytest.mark.parametrize(
    ("clock_s", "within_s", "level"),
    [(1.0, 0.0, "ok"), (-5.0, 0.1, "warning"), (5.0, 4.0, "ok"), (900.0, 0.1, "problem")],
)
def test_clocks_are_apart_by_no_more_than_can_be_known(clock_s: float, within_s: float, level: str) -> None:
    ahead = replace(node("b"), clock_s=clock_s, clock_within_s=within_s)
    (clocks,) = found(of_nodes(node("a"), ahead), "clocks")
    assert clocks.level == level


@pytest.mark.parametrize(
    ("troubles", "level", "says"),
    [
        (None, "ok", "nothing answers"),
        ([], "ok", "all services are ready"),
        (["chat is not ready: loading"], "problem", "chat is not ready: loading"),
        (Unknown("http://x:8000 wants the key"), "warning", "wants the key"),
    ],
)
def test_a_running_cluster_says_what_is_wrong(troubles: Any, level: str, says: str) -> None:
    finding = doctor_checks.cluster("http://x:8000", troubles)
    assert finding.level == level
    assert says in finding.says


def test_whatever_cannot_be_looked_at_is_a_warning() -> None:
    unknown = {each.name: Unknown("is broken") for each in fields(Machine) if each.name != "host"}
    broken = Node("a", Machine(host="a", **unknown), guarded=True)  # type: ignore[arg-type]
    for ray in (False, True, Unknown("is broken")):
        nothing = Facts(WANTS, "http://x", Unknown("is broken"), [Unknown("is broken")], [broken], ray)
        findings = dict(examine(nothing))
        assert findings.keys() >= {"memory", "cpus", "gpus", "versions", "cache", "port", "cluster"}
        for name, finding in findings.items():
            assert finding.level == "ok" or "is broken" in finding.says, name
            assert finding.level != "problem"
