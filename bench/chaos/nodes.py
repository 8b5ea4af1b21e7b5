"""A Ray cluster of several nodes, which are processes of this machine, and what befalls them.

The process that has them owns its Ray.
"""

from __future__ import annotations

import contextlib
from typing import Any

import psutil
import ray
from ray import serve
from ray._private.state import actors
from ray.cluster_utils import Cluster

from pliant.bench.ray_session import free_port
from pliant.deployments.drain import announce
from pliant.deployments.ray_start import patient

_STORE_BYTES = 80 * 2**20
_NOTICE_S = 60
_STARTS_WITHIN_S = 900


class Nodes:
    """A head, on which Serve's proxy and controller run, and whatever is added."""

    def __init__(self, head_cpus: int, num_cpus: int, num_gpus: int = 0) -> None:
        """What the head has, and each other node."""
        self._each: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus, "object_store_memory": _STORE_BYTES}
        head = {"num_cpus": head_cpus, "num_gpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        with patient():
            self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        """Those that were added and are not removed, in order."""

    def connect(self) -> str:
        """Start Serve; the address at which it will answer."""
        ray.init(address=self.cluster.address, log_to_driver=False)
        self.cluster.wait_for_nodes(_STARTS_WITHIN_S)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        return f"http://127.0.0.1:{port}"

    def add(self) -> None:
        """One more node."""
        with patient():
            self.nodes.append(self.cluster.add_node(**self._each))

    def remove(self, index: int) -> None:
        """Without a warning."""
        self.cluster.remove_node(self.nodes.pop(index), allow_graceful=False)

    def terminate(self, index: int) -> None:
        """As `ray start --block` does when it gets SIGTERM: drain it, wait until it is idle, and end its processes."""
        node = self.nodes.pop(index)
        node._drain_node_before_shutdown()
        self.cluster.remove_node(node)

    def drain(self, index: int) -> str:
        """As a cloud's notice that a node goes away in a minute would; its id."""
        node = str(self.nodes[index].node_id)
        announce(self.cluster.address, node, _NOTICE_S)
        return node

    def end(self) -> None:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        self.cluster.shutdown()  # type: ignore[no-untyped-call]


def processes(title: str) -> set[int]:
    """Ids of ours whose title contains `title`."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if title in " ".join(process.cmdline()):
                found.add(process.pid)
    return found


def replicas_on(node: str) -> bool:
    """Whether some actor, which are all Serve's, lives on `node`."""
    return any(actor["State"] == "ALIVE" and actor["Address"]["NodeID"] == node for actor in actors().values())
