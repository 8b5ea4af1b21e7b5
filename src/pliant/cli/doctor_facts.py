"""What `pliant doctor` looks at: facts of a machine, of its ports, and of what a cluster.yaml wants.

What cannot be looked at is Unknown, whatever went wrong; nothing here raises.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import psutil

import pliant
from pliant import haproxy
from pliant.cache import cache_folder
from pliant.config.cluster import PLANNER_CPUS, ClusterConfig
from pliant.kernels import c_compiler

Found = TypeVar("Found")

_RAY_BYTES = 1.1e9
"""What Ray and Serve take without services, and below what each process of ours takes, in the default cluster
(docs/measurements.md)."""
_PROCESS_BYTES = 0.21e9
_CGROUP = Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")
_RAYLET = "raylet"
_PROBE = "#include <math.h>\n#include <pthread.h>\nfloat probe(float x) { return sqrtf(x); }\n"
_PROBE_CXX = '#include <vector>\nextern "C" int probe() { return std::vector<int>(3).size(); }\n'
_COMPILE_S = 60


@dataclass(frozen=True)
class Unknown:
    """A fact that could not be looked at."""

    reason: str


@dataclass(frozen=True)
class Wants:
    """What a cluster.yaml needs of all machines together, with the fewest replicas."""

    cpus: float
    """In Ray's books."""
    gpus: float
    memory_bytes: float


@dataclass(frozen=True)
class Compiler:
    """A compiler of one language."""

    command: str | None
    fault: str | None = None
    """What it said when a few lines did not compile or load."""


@dataclass(frozen=True)
class Memory:
    """Bytes, as far as the machine or the container has them."""

    total: int
    free: int


@dataclass(frozen=True)
class SharedMemory:
    """/dev/shm, where Ray keeps its object store, in bytes."""

    total: int
    free: int
    memory_free: int
    """Of the machine: of this Ray takes a share."""
    ray_runs: bool
    """Whether Ray has taken it already."""


@dataclass(frozen=True)
class Disk:
    """Where something lies that is made once."""

    folder: str
    free: int
    """Bytes."""
    writable: bool


@dataclass(frozen=True)
class Cuda:
    """CUDA versions as (major, minor)."""

    gpus: int
    driver: tuple[int, int] | None
    """The latest that the driver knows; None: there is no driver."""
    torch: tuple[int, int] | None
    """For which torch was built; None: for CPUs alone."""


@dataclass(frozen=True)
class Machine:
    """One machine."""

    host: str
    cpus: int | Unknown
    versions: Mapping[str, str] | Unknown
    """By name: python, pliant, ray, torch."""
    c_compiler: Compiler | Unknown
    cxx_compiler: Compiler | Unknown
    memory: Memory | Unknown
    shared_memory: SharedMemory | Unknown
    cache: Disk | Unknown
    cuda: Cuda | Unknown
    haproxy: bool | Unknown


@dataclass(frozen=True)
class Port:
    """A port of this machine."""

    number: int
    wanted_by: str
    holder: str | None
    """Who listens there."""
    right: bool
    """Whether that is who wants it."""
    fix: str
    """What to do if it is not."""


@dataclass(frozen=True)
class Node:
    """A machine as Ray knows it, or this one alone where Ray cannot be asked."""

    host: str
    machine: Machine | Unknown
    guarded: bool = False
    """Whether its Ray asks for a token."""
    clock_s: float = 0.0
    """By how much its clock is ahead of this machine's, give or take `clock_within_s`."""
    clock_within_s: float = 0.0


@dataclass(frozen=True)
class Facts:
    """All that is looked at."""

    file: Wants | Unknown
    url: str
    troubles: list[str] | Unknown | None
    """What is wrong by the running cluster's /stats; None: no cluster answers."""
    ports: list[Port | Unknown]
    nodes: list[Node]
    ray: bool | Unknown
    """Whether `nodes` are all of a running Ray; otherwise there may be others. Unknown: why it does not answer."""


def known(look: Callable[[], Found]) -> Found | Unknown:
    """What `look` finds."""
    try:
        return look()
    except Exception as error:
        return Unknown(f"{error or type(error).__name__}".strip().splitlines()[0])


def machine() -> Machine:
    """Looks at the machine on which this is called."""
    return Machine(
        host=socket.gethostname(),
        cpus=known(lambda: len(os.sched_getaffinity(0))),
        versions=known(_versions),
        c_compiler=known(_c_compiler),
        cxx_compiler=known(_cxx_compiler),
        memory=known(_memory),
        shared_memory=known(_shared_memory),
        cache=known(lambda: _disk(cache_folder())),
        cuda=known(_cuda),
        haproxy=known(haproxy.installed),
    )


def wants(cluster: ClusterConfig) -> Wants:
    """Raises ModelError if a model's description cannot be had."""
    processes, memory = cluster.serving.gateway.replicas.min + 1, 0.0
    for service in cluster.serving.services.values():
        if size := service.replica_range():
            processes += size.min
            memory += size.min * service.memory_bytes()
    return Wants(*reserved(cluster), _RAY_BYTES + processes * _PROCESS_BYTES + memory)


def reserved(cluster: ClusterConfig) -> tuple[float, float]:
    """CPUs and GPUs that gateways, planner and the fewest replicas reserve in Ray."""
    gateway = cluster.serving.gateway
    cpus, gpus = gateway.replicas.min * gateway.cpus + PLANNER_CPUS, 0.0
    for service in cluster.serving.services.values():
        if size := service.replica_range():
            each = service.resources()
            cpus += size.min * each.get("num_cpus", 0)
            gpus += size.min * each.get("num_gpus", 0)
    return cpus, gpus


def ray_runs() -> bool:
    """On this machine."""
    return any(each.info["name"] == _RAYLET for each in psutil.process_iter(["name"]))


def holder(port: int) -> str | None:
    """Who listens on a port of this machine; programs of other users have no name."""
    for each in psutil.net_connections("tcp"):
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
            return f"{psutil.Process(each.pid).name()} (process {each.pid})" if each.pid else "another user's program"
    return None


def _versions() -> dict[str, str]:
    libraries = {name: metadata.version(name) for name in ("ray", "torch")}
    return {"python": sys.version.split()[0], "pliant": pliant.__version__, **libraries}


def _c_compiler() -> Compiler:
    command = c_compiler.compiler()
    return Compiler(
        command, command and _fault(command, "probe.c", _PROBE, (*c_compiler.OPTIONS, *c_compiler.THIS_MACHINE))
    )


def _cxx_compiler() -> Compiler:
    command = c_compiler.cxx_compiler()
    return Compiler(command, command and _fault(command, "probe.cpp", _PROBE_CXX, ("-fPIC", "-shared")))


def _fault(command: str, name: str, source: str, options: tuple[str, ...]) -> str | None:
    """What is wrong with the compiler; None if its library can be loaded."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(source)
        library = path.with_suffix(".so")
        compiled = [command, *options, str(path), "-o", str(library), "-lm"]
        done = subprocess.run(compiled, capture_output=True, text=True, errors="replace", timeout=_COMPILE_S)
        if done.returncode:
            return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            return str(error)
    return None


def _memory() -> Memory:
    """A container's limit counts where it is lower."""
    found = psutil.virtual_memory()
    total, free = int(found.total), int(found.available)
    limit = _CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        total = min(total, int(most))
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used = int((_CGROUP / "memory.current").read_text()) - int(counts["inactive_file"])
        free = min(free, total - used)
    return Memory(total, free)


def _shared_memory() -> SharedMemory:
    found = shutil.disk_usage(_SHM)
    return SharedMemory(found.total, found.free, _memory().free, ray_runs())


def _disk(folder: Path) -> Disk:
    """`folder` need not be there yet."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Disk(str(folder), shutil.disk_usage(there).free, writable)


def _cuda() -> Cuda:
    return Cuda(*_driver(), torch=_torch_cuda())


def _driver() -> tuple[int, tuple[int, int] | None]:
    """How many GPUs there are, and the driver's CUDA."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, None
    version, number = ctypes.c_int(), ctypes.c_int()
    for call, *arguments in (
        (library.cuInit, 0),
        (library.cuDriverGetVersion, ctypes.byref(version)),
        (library.cuDeviceGetCount, ctypes.byref(number)),
    ):
        if status := call(*arguments):
            raise OSError(f"the NVIDIA driver does not start (CUDA error {status})")
    return number.value, (version.value // 1000, version.value % 1000 // 10)


def _torch_cuda() -> tuple[int, int] | None:
    """Read without importing torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch is not installed")
    version: Mapping[str, Any] = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    if version["cuda"] is None:
        return None
    major, minor = version["cuda"].split(".")[:2]
    return int(major), int(minor)
