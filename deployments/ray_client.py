"""Asks a running Ray something, for a limited time.

Ray's client may wait without end for a head that does not answer, ends its process when the head is gone for long, and
prints what befalls nodes; so it has a process of its own.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import ray

from pliant.errors import PliantError

Found = TypeVar("Found")


def in_ray(ask: Callable[..., Found], *args: Any, within_s: float) -> Found:
    """What `ask`, a function of a module, returns, called in a client of the Ray that $RAY_ADDRESS names or that runs
    here.

    Raises PliantError if it does, if Ray cannot be reached, and after `within_s`.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    client = context.Process(target=_client, args=(ask, args, sender), daemon=True)
    client.start()
    sender.close()
    try:
        if not receiver.poll(within_s):
            raise PliantError(f"no answer within {within_s:g} s")
        found: Found | PliantError = receiver.recv()
    except EOFError:
        raise PliantError("Ray's client ended without an answer") from None
    finally:
        client.kill()
        client.join()
    if isinstance(found, PliantError):
        raise found
    return found


def _client(ask: Callable[..., Any], args: tuple[Any, ...], sender: Connection) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    try:
        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
        sender.send(ask(*args))
    except Exception as error:
        sender.send(PliantError((str(error).strip() or repr(error)).splitlines()[0]))
    finally:
        ray.shutdown()
