"""A socket that takes HAProxy's commands."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_COLUMNS = ("pxname", "svname", "scur", "bck", "hrsp_4xx", "hrsp_5xx", "wredis", "type")


def numbers(
    front: int, gateways: int, backup: int = 0, running: int = 0, redispatched: int = 0, bad: int = 0, pid: int = 1
) -> str:
    """As HAProxy says them: so many 5xx of each, and `bad` 4xx that no gateway gave."""
    rows = [
        ("http_frontend", "FRONTEND", running, "", bad, front, "", 0),
        ("pliant", "gateway-1", 0, 0, 0, gateways, redispatched, 2),
        ("pliant", "serve", 0, 1, 0, backup, 0, 2),
        ("pliant", "BACKEND", 0, 0, 0, gateways + backup, redispatched, 1),
    ]
    table = "\n".join(",".join(map(str, row)) for row in (_COLUMNS, *rows))
    return f"Name: HAProxy\nPid: {pid}\nUptime: 0d\n\n# {table}\n\n"


class Haproxy:
    """Says `says` to whoever asks for numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.says = numbers(front=0, gateways=0)
        self.asked = 0

    @contextmanager
    def listening(self) -> Iterator[Haproxy]:
        fake = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                assert self.rfile.readline() == b"show info; show stat\n"
                fake.asked += 1
                with suppress(OSError):  # whoever asked has heard enough
                    self.wfile.write(fake.says.encode())

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with socketserver.ThreadingUnixStreamServer(str(self.path), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()
