"""An ASGI application on a port of this machine, for clients that cannot be given anything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from support.waiting import wait_until


@contextmanager
def listening(app: ASGIApp) -> Iterator[str]:
    """Its host and port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        [socket] = server.servers[0].sockets
        yield f"127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
