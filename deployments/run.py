"""`serve run`, that says how far it is, and answers what it has accepted before it stops.

`python -m pliant.deployments.run cluster.yaml`. On an interrupt `serve run` ends the HTTP proxies at once, with the
requests that they carry. Deleting the applications first lets the replicas finish; requests that come meanwhile are
refused. To the file descriptor that $PLIANT_STATUS_FD names goes a line of JSON with what Serve says of the
deployments, every second, or every three where all is well. If nobody reads there any more, as the terminal was closed
or `pliant serve` was killed, that is an interrupt, too.
"""

from __future__ import annotations

import pliant.lean_worker  # noqa: F401  before Serve is imported

# isort: split
import json
import logging
import os
import select
import signal
import sys
import threading
from contextlib import suppress
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
    """Until nobody reads it."""
    reader_gone = select.poll()
    reader_gone.register(descriptor, select.POLLERR)
    every_s = _EVERY_S
    with suppress(BrokenPipeError), os.fdopen(descriptor, "w", buffering=1) as out:
        while not reader_gone.poll(1000 * every_s):
            if ray.is_initialized():
                try:
                    status = _status()
                except Exception as error:  # Serve starts, or stops
                    logging.getLogger("pliant").debug("no status: %r", error)
                    continue
                print(json.dumps(status), file=out)
                healthy = all(each["status"] == "HEALTHY" for each in status["deployments"].values())
                every_s = _HEALTHY_EVERY_S if healthy else _EVERY_S
    if signal.getsignal(signal.SIGINT) is _drain:  # which has not begun
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


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
