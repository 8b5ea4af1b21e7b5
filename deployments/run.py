"""`serve run`, that answers what it has accepted before it stops: `python -m pliant.deployments.run cluster.yaml`.

On an interrupt `serve run` ends the HTTP proxies at once, with the requests that they carry. Deleting the applications
first lets the replicas finish; requests that come meanwhile get 503.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from ray import serve
from ray.serve.scripts import cli


def main() -> None:
    signal.signal(signal.SIGINT, _drain)
    cli(["run", *sys.argv[1:]])


def _drain(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in serve.status().applications:
        serve.delete(name)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
