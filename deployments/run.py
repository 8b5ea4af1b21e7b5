"""`serve run`, that says how far it is, and answers what it has accepted before it stops.

`python -m pliant.deployments.run cluster.yaml`. On an interrupt `serve run` ends the HTTP proxies at once, with the
requests that they carry. Deleting the applications first lets the replicas finish; requests that come meanwhile are
refused. To the file descriptor that $PLIANT_STATUS_FD names goes a line of JSON with what Serve says of the
deployments, every second, or every three where all is well.
"""

from __future__ import annotations

import pliant.lean_worker  # noqa: F401  before Serve is imported

# isort: split
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve
from ray.serve.scripts import cli

from pliant.deployments import serve_file
from pliant.deployments.ray_start import patient
from pliant.errors import ConfigError

STATUS_FD = "PLIANT_STATUS_FD"
_EVERY_S = 1.0
_HEALTHY_EVERY_S = 3.0
"""Where all is well: each status makes Serve pickle every deployment's router."""


def main() -> None:
    signal.signal(signal.SIGINT, _drain)
    try:
        serve_file.check(Path(sys.argv[1]))
    except ConfigError as error:
        sys.exit("\n".join(error.problems))
    if descriptor := os.environ.pop(STATUS_FD, None):
        threading.Thread(target=_tell, args=(int(descriptor),), daemon=True).start()
    with patient():
        cli(["run", *sys.argv[1:]])


def _drain(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in serve.status().applications:
        serve.delete(name)
    raise KeyboardInterrupt


def _tell(descriptor: int) -> None:
    with os.fdopen(descriptor, "w", buffering=1) as out:
        every_s = _EVERY_S
        while True:
            time.sleep(every_s)
            if ray.is_initialized():
                try:
                    status = _status()
                    print(json.dumps(status), file=out)
                    healthy = all(each["status"] == "HEALTHY" for each in status["deployments"].values())
                    every_s = _HEALTHY_EVERY_S if healthy else _EVERY_S
                except BrokenPipeError:
                    return
                except Exception as error:  # Serve starts, or stops
                    logging.getLogger("pliant").debug("no status: %r", error)


def _status() -> dict[str, Any]:
    """Each deployment's status, message, and number of replicas by state; and what is wrong with the applications."""
    applications = serve.status().applications.values()
    return {
        "problems": [each.message for each in applications if each.status == "DEPLOY_FAILED"],
        "deployments": {
            name: {
                "status": str(each.status.value),
                "message": each.message,
                "replicas": dict(each.replica_states),
            }
            for application in applications
            for name, each in application.deployments.items()
        },
    }


if __name__ == "__main__":
    main()
