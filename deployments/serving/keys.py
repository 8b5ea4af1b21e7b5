"""Who a key belongs to: keys by their SHA-256, from the environment and from a file that may change while we run."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.config.tenants import ANONYMOUS, OPEN, UNNAMED
from pliant.deployments.serving.tenants import Account, TenantRecorder
from pliant.errors import ConfigError

logger = logging.getLogger("pliant")

_LOOK_EVERY_S = 1.0
"""At the file."""
_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*):([0-9a-f]{64})")
_OPEN_SHARE = 0.75
"""Of the requests that a gateway works on at a time, those that one tenant may have where there are others."""


class Keys:
    """The tenants of keys, by what `gateway` says; `known` are the tenants there are.

    Raises ConfigError if they cannot be read. A file that cannot be read later on changes nothing.
    """

    def __init__(
        self,
        gateway: GatewayConfig,
        known: Collection[str],
        environment: Mapping[str, str] = os.environ,
        now: Callable[[], float] = lambda: time.monotonic(),
    ) -> None:
        self._known = known
        self._now = now
        self._fixed: dict[str, str] = {}
        """Tenant by hash."""
        if variable := gateway.api_keys_env:
            plain = [key.strip() for key in environment.get(variable, "").split(",") if key.strip()]
            if not plain:
                raise ConfigError(
                    [f"gateway.api_keys_env: got {variable}; the gateway's environment has no keys in it"]
                )
            self._fixed |= {hashed(key): UNNAMED for key in plain}
        if variable := gateway.keys_env:
            if not environment.get(variable, "").strip():
                raise ConfigError([f"gateway.keys_env: got {variable}; the gateway's environment has no keys in it"])
            self._fixed |= self._parsed(environment[variable], f"gateway.keys_env: {variable}")
        self._file = Path(gateway.keys_file).expanduser() if gateway.keys_file else None
        self.asked = bool(self._fixed or self._file)
        """Whether there are keys at all."""
        self._tenants = self._fixed
        self._look_at = 0.0
        self._seen: tuple[int, int, int] | None = None
        if self._file:
            try:
                self._read(self._file)
            except OSError as error:
                raise ConfigError([f"gateway.keys_file: got {self._file}; {error.strerror}"]) from None

    def tenant(self, key: str) -> str | None:
        """Whose `key` is; None if nobody's."""
        if self._file and self._now() >= self._look_at:
            try:
                self._read(self._file)
            except (OSError, ConfigError) as error:
                logger.error("keys stay as they were: %s", error)
            self._look_at = self._now() + _LOOK_EVERY_S
        return self._tenants.get(hashed(key))

    def _read(self, file: Path) -> None:
        """Take over what is in `file`, if it has changed."""
        before, self._seen = self._seen, None
        found = file.stat()
        seen = (found.st_mtime_ns, found.st_size, found.st_ino)
        content = None if seen == before else file.read_bytes()
        self._seen = seen  # what is wrong in it is told once
        if content is not None:
            where = f"gateway.keys_file: {file}"
            try:
                text = content.decode()
            except UnicodeDecodeError:
                raise ConfigError([f"{where}: is no text in UTF-8"]) from None
            self._tenants = {**self._fixed, **self._parsed(text, where)}

    def _parsed(self, text: str, where: str) -> dict[str, str]:
        found, wrong = {}, []
        for number, entry in enumerate(_entries(text), 1):
            match = _ENTRY.fullmatch(entry)
            if match is None:  # perhaps the key itself, which is not for the log
                name = entry.partition(":")[0]
                whose = f" ({name})" if name in self._known else ""
                wrong.append(
                    f"{where}: entry {number}{whose}: an entry is NAME:SHA256, the key's hash in 64 hex digits"
                )
            elif match[1] not in self._known:
                wrong.append(f"{where}: got a key of {match[1]!r}; tenants has no such tenant")
            else:
                found[match[2]] = match[1]
        if wrong:
            raise ConfigError(wrong)
        return found


class Tenants:
    """Who may call one of so many `gateways` (None: as there are at least), as `config` has it.

    Raises ConfigError if keys cannot be read.
    """

    def __init__(
        self,
        config: ServingConfig,
        recorder: TenantRecorder | None = None,
        environment: Mapping[str, str] = os.environ,
        now: Callable[[], float] = lambda: time.monotonic(),
        gateways: Callable[[], int] | None = None,
    ) -> None:
        gateway = config.gateway
        configs = dict(config.tenants)
        self._keys = Keys(gateway, config.tenants, environment, now)
        if gateway.api_keys_env:
            configs.setdefault(UNNAMED, OPEN)
        if not self._keys.asked:
            configs.setdefault(ANONYMOUS, OPEN)
        shared = max(1, int(_OPEN_SHARE * gateway.max_ongoing_requests)) if len(configs) > 1 else None
        self.accounts = {
            name: Account(name, tenant, gateways or (lambda: gateway.replicas.min), shared, recorder, now)
            for name, tenant in configs.items()
        }

    @property
    def ask_for_keys(self) -> bool:
        """Whether there are any."""
        return self._keys.asked

    def of(self, authorization: str) -> Account | None:
        """Who sends this header, which may be empty; None if nobody may who does."""
        if not self._keys.asked or not authorization:
            return self.accounts.get(ANONYMOUS)
        scheme, _, key = authorization.partition(" ")
        tenant = self._keys.tenant(key.strip()) if scheme == "Bearer" else None
        return self.accounts.get(tenant) if tenant else None

    def facts(self) -> dict[str, dict[str, object]]:
        """For /stats, by tenant."""
        return {name: account.facts() for name, account in self.accounts.items()}


def hashed(key: str) -> str:
    """As key files have it."""
    return hashlib.sha256(key.encode()).hexdigest()


def _entries(text: str) -> Iterator[str]:
    """Separated by white space or commas; what follows a # in a line is for people."""
    for line in text.splitlines():
        yield from filter(None, re.split(r"[\s,]+", line.partition("#")[0]))
