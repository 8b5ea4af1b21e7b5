"""How much memory there is where a process computes, and how much of it the process takes."""

import gc
import os
import re
from pathlib import Path

_CGROUP, _CGROUP_1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_CGROUP_FILES = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current", "inactive_file"),
    (_CGROUP_1 / "memory.limit_in_bytes", _CGROUP_1 / "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of either version of control groups: the limit, what is used, and in memory.stat what of it can be had back."""
_OWN = Path("/proc/self/smaps_rollup")


def free_bytes() -> int:
    """The memory that this machine, or the container that this process runs in, can give without swapping."""
    meminfo = Path("/proc/meminfo")
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if meminfo.exists() and (found := re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE)):
        free = int(found[1]) * 1024
    for limit, used, cached in _CGROUP_FILES:
        if limit.exists() and (most := limit.read_text().strip()).isdecimal():
            given_back = re.search(rf"^{cached} (\d+)$", (limit.parent / "memory.stat").read_text(), re.MULTILINE)
            free = min(free, int(most) - int(used.read_text()) + int(given_back[1] if given_back else 0))
    return free


def used_bytes(device: str) -> int:
    """Of the machine's memory, what only this process has; of a GPU's, what all have.

    So what is loaded has taken what this rises by, on a GPU if nobody else loads anything meanwhile. What torch keeps
    there of what is gone is given back first.
    """
    if device == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        free, whole = torch.cuda.mem_get_info()
        return whole - free
    return 1024 * sum(
        int(kilobytes) for kilobytes in re.findall(r"^Private_\w+: +(\d+)", _OWN.read_text(), re.MULTILINE)
    )
