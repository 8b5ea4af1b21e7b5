"""Clients of a running cluster, which go on whatever happens."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
from support.waiting import HANGS_AFTER_S, wait_until

ROUNDS = 6
_PAUSE_S = 0.1
"""After each answer, times those that a client is ahead of the last one: clients that ask without a pause take the
processors that what they wait for needs."""


class Load:
    """Clients that send one request after another, with short pauses, until stopped, and count how each ended.

    `send` sends one, whose number it is given, by a client of `address`, and says how it ended.
    """

    def __init__(self, address: str, clients: int, send: Callable[[httpx.Client, int], str]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._send = send
        self._ended = [0] * clients
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(len(self._ended)) as pool:
            clients = [pool.submit(self._client, index) for index in range(len(self._ended))]
            try:
                yield
            finally:
                self._stop.set()
                for client in clients:
                    client.result()

    def go_on(self, rounds: int = ROUNDS) -> None:
        """Wait until each client has had so many more answers."""
        enough = [ended + rounds for ended in self._ended]
        wait_until(lambda: all(map(int.__ge__, self._ended, enough)), lambda: min(self._ended))

    def _client(self, index: int) -> None:
        with httpx.Client(base_url=self._address, timeout=HANGS_AFTER_S) as http:
            while not self._stop.is_set():
                try:
                    outcome = self._send(http, index + self._ended[index])
                except httpx.TransportError as error:
                    outcome = repr(error)
                self.outcomes[outcome] += 1
                self._ended[index] += 1
                self._stop.wait(_PAUSE_S * (1 + self._ended[index] - min(self._ended)))
