"""What `pliant serve` puts in front of gateways."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pliant import haproxy
from pliant.cli.serve import edge
from pliant.config.http import HttpOptions
from pliant.errors import ConfigError

TLS = {"ssl_certfile": "/c.pem", "ssl_keyfile": "/k.pem"}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program that becomes HAProxy."""
    (tmp_path / "pliant-haproxy").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path / "pliant-haproxy"


def test_haproxy_where_it_is_installed(installed: Path) -> None:
    found = edge(HttpOptions())
    assert found[haproxy.SWITCH] == "1"
    assert found[haproxy.PASSWORD] != edge(HttpOptions())[haproxy.PASSWORD]
    assert found["RAY_SERVE_HAPROXY_BINARY_PATH"] == str(installed)
    assert haproxy.TLS not in found


def test_haproxy_gets_the_certificates(installed: Path) -> None:
    found = json.loads(edge(HttpOptions(**TLS, ssl_ca_certs="/a.pem"))[haproxy.TLS])
    assert haproxy.Tls(**found) == haproxy.Tls("/c.pem", "/k.pem", "/a.pem")


def test_serve_s_own_proxy_elsewhere(installed: Path) -> None:
    assert edge(HttpOptions(**TLS, ssl_keyfile_password="secret")) == {}
    installed.unlink()
    assert edge(HttpOptions(**TLS)) == {}


@pytest.mark.parametrize("why", ["not installed", "not wanted"])
def test_client_certificates_need_haproxy(installed: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "not installed":
        installed.unlink()
    else:
        monkeypatch.setenv(haproxy.SWITCH, "0")
    with pytest.raises(ConfigError) as error:
        edge(HttpOptions(**TLS, ssl_ca_certs="/a.pem"))
    assert error.value.problems[0].startswith("http_options.ssl_ca_certs: only HAProxy asks clients")
