"""What `pliant doctor` makes of facts: a finding each, and what to do about it. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pliant import haproxy
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

_GB = 1e9
_CACHE_FULL_BYTES, _CACHE_LOW_BYTES = 1e9, 5e9
_OBJECT_STORE_SHARE, _OBJECT_STORE_BYTES = 0.3, 10e9
"""Ray's object store wants this share of free memory, and is content with so many bytes of /dev/shm."""
_CLOCKS_APART_S, _SIGNATURES_FAIL_S = 2.0, 600.0
"""From when on logs of two nodes do not fit together; from when on object storage refuses what is signed."""


class Finding(NamedTuple):
    """What a check says."""

    level: Literal["ok", "warning", "problem"]
    says: str
    fix: str = ""
    """What to do, unless all is well."""


def examine(facts: Facts) -> Iterator[tuple[str, Finding]]:
    """Each check's name and what it says, in the order in which they are shown."""
    machines = [node.machine for node in facts.nodes if isinstance(node.machine, Machine)]
    yield "file", file(facts.file)
    for name, check in _ON_EACH_MACHINE.items():
        for finding in _summed([(each.host, _judged(attrgetter(name)(each), check)) for each in machines]):
            yield name.replace("_", " "), finding
    if isinstance(wants := facts.file, Wants):
        alone = facts.ray is not True
        for name, fact, of_all in _OF_ALL_MACHINES:
            yield name, _of_all(facts.nodes, fact, of_all, wants, alone)
    for each in facts.ports:
        yield "port", _judged(each, port)
    yield "nodes", nodes(facts.nodes, facts.ray)
    yield "versions", versions(machines)
    if facts.ray is True:
        yield "token", token(facts.nodes)
        yield "clocks", clocks(facts.nodes)
    yield "cluster", cluster(facts.url, facts.troubles)


def file(found: Wants | Unknown) -> Finding:
    if isinstance(found, Unknown):
        return Finding("problem", found.reason, "correct the file; `pliant check` says the same")
    memory_gb = found.memory_bytes / _GB
    return Finding("ok", f"it wants {found.cpus:g} CPUs, {found.gpus:g} GPUs and about {memory_gb:.1f} GB of memory")


def c_compiler(found: Compiler) -> Finding:
    if found.command is None:
        missing = "no C compiler was found, so models on CPUs answer several times slower"
        return Finding("warning", missing, "install one (apt-get install gcc), or name it in CC")
    return _compiles(found, "gcc")


def cxx_compiler(found: Compiler) -> Finding:
    if found.command is None:
        missing = "no C++ compiler was found, so torch compiles nothing for CPUs"
        return Finding("warning", missing, "install one (apt-get install g++), or name it in CXX")
    return _compiles(found, "g++")


def _compiles(found: Compiler, package: str) -> Finding:
    if found.fault:
        fix = f"repair it (apt-get install --reinstall {package} libc6-dev), or name another one in CC and CXX"
        return Finding("problem", f"{found.command} does not compile a few lines: {found.fault}", fix)
    return Finding("ok", f"{found.command} compiles, and what it makes can be loaded")


def shared_memory(found: SharedMemory) -> Finding:
    """Ray puts its object store elsewhere if it finds no room in /dev/shm when it starts."""
    room = found.total if found.ray_runs else found.free
    wanted = min(_OBJECT_STORE_SHARE * found.memory_free, _OBJECT_STORE_BYTES)
    if room < wanted:
        says = f"/dev/shm has {room / _GB:.1f} GB, but Ray wants {wanted / _GB:.1f} GB, and will use the slower /tmp"
        return Finding("warning", says, f"give the container --shm-size={wanted * 1.1 / _GB:.0f}g, or empty /dev/shm")
    return Finding("ok", f"/dev/shm has {room / _GB:.1f} GB, of which Ray wants {wanted / _GB:.1f} GB")


def cache(found: Disk) -> Finding:
    fix = f"make room in {found.folder}, or name another folder in PLIANT_CACHE"
    free = f"{found.folder} has {found.free / _GB:.1f} GB left"
    if not found.writable:
        return Finding("problem", f"{found.folder} cannot be written", "own it, or name another folder in PLIANT_CACHE")
    if found.free < _CACHE_FULL_BYTES:
        return Finding("problem", f"{free}: models and compiled code find no room", fix)
    if found.free < _CACHE_LOW_BYTES:
        return Finding("warning", f"{free}, which a large model fills", fix)
    return Finding("ok", free)


def cuda(found: Cuda) -> Finding:
    """The driver knows programs for its own CUDA and older ones, and with limits those of its major version."""
    if not found.gpus:
        return Finding("ok", "there is no NVIDIA GPU, and torch computes on CPUs")
    driver = _dotted(found.driver)
    if found.torch is None:
        says = f"there are {found.gpus} GPUs, but torch was built for CPUs alone"
        return Finding("problem", says, f"install a build of torch for CUDA {driver} or older")
    says = f"the driver is for CUDA {driver}, torch for {_dotted(found.torch)}"
    if found.driver is None or found.torch[0] > found.driver[0]:
        return Finding("problem", says, "install a newer NVIDIA driver, or torch for an older CUDA")
    if found.torch > found.driver:
        return Finding("warning", f"{says}, which may lack functions of it", "install a newer NVIDIA driver")
    return Finding("ok", f"{says}; {found.gpus} GPUs")


def _dotted(version: tuple[int, int] | None) -> str:
    return ".".join(map(str, version)) if version else "none"


def has_haproxy(found: bool) -> Finding:
    if found:
        return Finding("ok", "HAProxy is installed, and keeps requests whose gateway dies")
    says = "there is no HAProxy, so Serve's own proxy loses what a gateway that dies was working on"
    return Finding("warning", says, haproxy.MISSING)


def memory(found: Sequence[Memory], wants: Wants, alone: bool) -> Finding:
    total, free = sum(each.total for each in found), sum(each.free for each in found)
    has = f"the file wants about {wants.memory_bytes / _GB:.1f} GB of memory; there are {total / _GB:.1f} GB"
    if wants.memory_bytes > total:
        return Finding("problem", has, "serve fewer replicas, lower memory_mb of language models, or add nodes")
    if alone and wants.memory_bytes > free:
        return Finding("warning", f"{has}, {free / _GB:.1f} of them free", "end other programs before the start")
    return Finding("ok", has)


def cpus(found: Sequence[int], wants: Wants, alone: bool) -> Finding:
    return few_cpus(wants.cpus, sum(found), alone)


def few_cpus(wanted: float, there: int, alone: bool) -> Finding:
    return _enough("CPUs", wanted, there, alone, "lower `cpus` or `replicas`, or add nodes")


def gpus(found: Sequence[Cuda], wants: Wants, alone: bool) -> Finding:
    fix = "lower `gpus` or `replicas`, or add nodes"
    if not any(each.driver for each in found):
        fix = f"install the NVIDIA driver, if there are GPUs; or {fix}"
    return _enough("GPUs", wants.gpus, sum(each.gpus for each in found), alone, fix)


def _enough(what: str, wanted: float, there: float, alone: bool, fix: str) -> Finding:
    """Where Ray does not run yet other machines may have the rest."""
    if wanted > there + 1e-9:
        has = f"the file wants {wanted:g} {what}, and {'this machine has' if alone else 'all nodes have'} {there:g}"
        return Finding("warning" if alone else "problem", f"{has}: replicas will wait for a place", fix)
    return Finding("ok", f"the file wants {wanted:g} {what}; there are {there:g}")


def port(found: Port) -> Finding:
    if found.holder is None:
        return Finding("ok", f"{found.number}, for {found.wanted_by}, is free")
    held = f"{found.number} is held by {found.holder}"
    if found.right:
        return Finding("ok", f"{held}: {found.wanted_by}")
    return Finding("problem", f"{held}, but {found.wanted_by} wants it", found.fix)


def nodes(found: Sequence[Node], ray: bool | Unknown) -> Finding:
    if isinstance(ray, Unknown):
        says = f"Ray runs but does not answer, so only this machine was looked at: {ray.reason}"
        fix = "if it asks for a token, export RAY_AUTH_MODE=token; if not, see whether `ray status` answers"
        return Finding("warning", says, fix)
    if not ray:
        return Finding("ok", "Ray does not run here yet; only this machine was looked at")
    if lost := [f"{node.host} ({node.machine.reason})" for node in found if isinstance(node.machine, Unknown)]:
        says = f"nothing could be looked at on {', '.join(lost)}"
        return Finding("warning", says, "install the same version of pliant there, and see whether the node answers")
    return Finding("ok", f"Ray runs on {len(found)} {'node' if len(found) == 1 else 'nodes'}, and all answer")


def token(found: Sequence[Node]) -> Finding:
    if open_ := [node.host for node in found if isinstance(node.machine, Machine) and not node.guarded]:
        says = f"whoever reaches Ray's ports may run programs, without a token, on {', '.join(open_)}"
        return Finding("problem", says, "start Ray with a token (docs/operations.md, GPUs and several nodes)")
    return Finding("ok", "Ray asks for a token on all nodes")


def versions(found: Sequence[Machine]) -> Finding:
    """Those of libraries without what follows a plus: torch for CPUs and for CUDA may serve together."""
    holders: dict[str, dict[str, list[str]]] = {}
    for each in found:
        if isinstance(each.versions, Unknown):
            return _unknown(f"{each.host}: {each.versions.reason}", "install pliant there as on the other nodes")
        for library, version in each.versions.items():
            holders.setdefault(library, {}).setdefault(version.partition("+")[0], []).append(each.host)
    if unlike := {library: of for library, of in holders.items() if len(of) > 1}:
        says = "; ".join(
            f"{library} is {' and '.join(f'{version} on {_some(hosts)}' for version, hosts in of.items())}"
            for library, of in unlike.items()
        )
        # Ray lets no node of another Python or Ray in; what pliant's processes say to each other, both versions read
        level: Literal["warning", "problem"] = "warning" if unlike.keys() == {"pliant"} else "problem"
        return Finding(level, says, "finish the upgrade: install the same versions on every node")
    return Finding("ok", ", ".join(f"{library} {next(iter(of))}" for library, of in holders.items()))


def clocks(found: Sequence[Node]) -> Finding:
    """Requests do not depend on clocks; logs, and storage that is asked with signatures, do."""
    apart = {node.host: max(0.0, abs(node.clock_s) - node.clock_within_s) for node in found}
    host, most = max(apart.items(), key=lambda each: each[1])
    if most < _CLOCKS_APART_S:
        return Finding("ok", f"no node's is more than {_CLOCKS_APART_S:g} s from this machine's")
    says = f"that of {host} is {most:.0f} s from this machine's"
    fix = "have all nodes set their clocks from the network (chrony, systemd-timesyncd)"
    if most > _SIGNATURES_FAIL_S:
        return Finding("problem", f"{says}: object storage refuses what is signed by it", fix)
    return Finding("warning", f"{says}: logs of nodes do not fit together", fix)


def cluster(url: str, troubles: Sequence[str] | Unknown | None) -> Finding:
    if troubles is None:
        return Finding("ok", f"nothing answers at {url} yet")
    if isinstance(troubles, Unknown):
        return _unknown(troubles.reason, "name another address with --url, or the key in PLIANT_API_KEY")
    if troubles:
        return Finding("problem", f"{url}: {'; '.join(troubles)}", "see docs/incidents.md, or /console")
    return Finding("ok", f"{url} answers, and all services are ready")


def _judged(fact: Any, check: Callable[[Any], Finding]) -> Finding:
    return _unknown(fact.reason) if isinstance(fact, Unknown) else check(fact)


def _unknown(reason: str, fix: str = "look at it by hand") -> Finding:
    return Finding("warning", f"cannot be looked at: {reason}", fix)


def _summed(found: Sequence[tuple[str, Finding]]) -> Iterator[Finding]:
    """One finding for all machines if all is well on each, else that of each on which it is not."""
    bad = [(host, finding) for host, finding in found if finding.level != "ok"]
    if len(found) == 1:
        yield found[0][1]
    elif bad:
        yield from (finding._replace(says=f"{host}: {finding.says}") for host, finding in bad)
    elif found:
        yield Finding("ok", f"on all {len(found)} nodes; on {found[0][0]}: {found[0][1].says}")


def _of_all(
    nodes: Sequence[Node],
    fact: str,
    check: Callable[[Sequence[Any], Wants, bool], Finding],
    wants: Wants,
    alone: bool,
) -> Finding:
    machines = [(node.host, node.machine) for node in nodes]
    found = [(host, each if isinstance(each, Unknown) else getattr(each, fact)) for host, each in machines]
    if missing := [f"{host}: {each.reason}" for host, each in found if isinstance(each, Unknown)]:
        return _unknown("; ".join(missing))
    return check([each for _, each in found], wants, alone)


def _some(hosts: Sequence[str]) -> str:
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {len(hosts) - 1} more"


_ON_EACH_MACHINE: dict[str, Callable[[Any], Finding]] = {
    "c_compiler": c_compiler,
    "cxx_compiler": cxx_compiler,
    "shared_memory": shared_memory,
    "cache": cache,
    "cuda": cuda,
    "haproxy": has_haproxy,
}
"""By the fact of a machine that it is about."""
_OF_ALL_MACHINES = (("memory", "memory", memory), ("cpus", "cpus", cpus), ("gpus", "cuda", gpus))
"""Checks of what all machines have together, and the fact that they are about."""
