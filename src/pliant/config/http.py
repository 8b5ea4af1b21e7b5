"""Where a cluster listens, with which certificate, and whether strangers may reach it there."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import Field

from pliant.config.base import Strict

_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""By an address that means all of a machine's, the one by which it reaches itself."""


class HttpOptions(Strict):
    """Serve's HTTP options; what is not ours to know is passed on to Serve untouched."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    root_path: Any = None
    request_timeout_s: Any = None
    keep_alive_timeout_s: Any = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None
    """Of those who sign clients' certificates."""

    @property
    def url(self) -> str:
        """By which this machine reaches itself."""
        host = _HERE.get(self.host, self.host)
        return f"{'https' if self.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def public(self) -> bool:
        """Whether other machines may reach it."""
        try:
            return not ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"

    def trust(self) -> ssl.SSLContext | bool:
        """What a client on this machine checks: that the server has this very certificate, whatever name is in it.

        If the server asks for one, the client has the same."""
        if self.ssl_certfile is None:
            return True
        context = ssl.create_default_context(cafile=self.ssl_certfile)
        context.check_hostname = False
        if self.ssl_ca_certs and self.ssl_keyfile:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    def problems(self, keys: bool, behind_proxy: bool) -> Iterator[str]:
        """What is wrong, a line each. `keys`: clients need one; `behind_proxy`: something in front sees to all that."""
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            yield "ssl_certfile, ssl_keyfile: got one of them; give both"
        elif self.ssl_certfile and self.ssl_keyfile:
            yield from self._unusable(self.ssl_certfile, self.ssl_keyfile)
        if self.public and not behind_proxy:
            lacks = [] if keys else ["API keys (gateway.api_keys_env, keys_env or keys_file)"]
            lacks += [] if self.ssl_certfile else ["TLS (http_options.ssl_certfile and ssl_keyfile)"]
            if lacks:
                yield (
                    f"host: got {self.host}, which other machines reach, without {' and '.join(lacks)}; give them, "
                    "listen on 127.0.0.1, or say gateway.behind_proxy: true if something in front of it has both"
                )

    def _unusable(self, certificate: str, key: str) -> Iterator[str]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key, self.ssl_keyfile_password or "")
        except OSError as error:  # an SSLError is one
            yield f"ssl_certfile: got {certificate}; it cannot be used with {key}: {error.strerror or error}"
        if self.ssl_ca_certs:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except OSError as error:
                yield f"ssl_ca_certs: got {self.ssl_ca_certs}; it cannot be used: {error.strerror or error}"
