"""Strangers get to a cluster only by keys and TLS, and `pliant serve` finds its own gateway behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from support.certificates import Certificate, authority, signed
from support.local_https import listening

from pliant.config.http import HttpOptions
from pliant.deployments.kinds import read
from pliant.errors import ConfigError

SERVICES = {"a": {"kind": "encoder", "model": "zoo/topics-small", "lengths": [64], "replicas": 1}}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def certificate(root: Certificate) -> Certificate:
    return signed(root.certificate.parent, root, "models.example.org")


def problems(folder: Path, http: dict[str, Any], **gateway: Any) -> list[str]:
    """What a whole file with these has wrong."""
    args = {"gateway": gateway, "services": SERVICES}
    application = {"import_path": "pliant.deployments.app:build", "args": args}
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    try:
        read(path)
    except ConfigError as error:
        return list(error.problems)
    return []


def tls(certificate: Certificate) -> dict[str, str]:
    return {"ssl_certfile": str(certificate.certificate), "ssl_keyfile": str(certificate.key)}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "models.example.org"])
def test_strangers_need_keys_and_tls(tmp_path: Path, certificate: Certificate, host: str) -> None:
    neither, without_tls, without_keys = (
        problems(tmp_path, {"host": host}),
        problems(tmp_path, {"host": host}, api_keys_env="KEYS"),
        problems(tmp_path, {"host": host, **tls(certificate)}),
    )
    assert neither[0].startswith(f"http_options.host: got {host}, which other machines reach, without API keys")
    assert "TLS" in neither[0]
    assert "API keys" not in without_tls[0]
    assert "TLS" not in without_keys[0]
    assert not problems(tmp_path, {"host": host, **tls(certificate)}, api_keys_env="KEYS")
    assert not problems(tmp_path, {"host": host}, behind_proxy=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_neither(tmp_path: Path, host: str) -> None:
    assert not problems(tmp_path, {"host": host})


def test_files_that_cannot_be_used(tmp_path: Path, certificate: Certificate, root: Certificate) -> None:
    good, missing = tls(certificate), str(tmp_path / "missing.pem")
    for changed, line in (
        ({"ssl_certfile": None}, "ssl_certfile, ssl_keyfile: got one of them"),
        (
            {"ssl_keyfile": missing},
            f"ssl_certfile: got {certificate.certificate}; it cannot be used with {missing}: No",
        ),
        ({"ssl_keyfile": str(root.key)}, "ssl_certfile: got"),
        ({"ssl_ca_certs": missing}, f"ssl_ca_certs: got {missing}; it cannot be used: No such file"),
    ):
        assert problems(tmp_path, good | changed)[0].startswith(f"http_options.{line}")


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("10.0.0.7", "http://10.0.0.7:8000")],
)
def test_the_address(host: str, url: str) -> None:
    assert HttpOptions(host=host).url == url


def test_a_cluster_is_reached_at_its_own_certificate(root: Certificate, certificate: Certificate) -> None:
    """Whoever signed it, and whatever name is in it; another certificate is not taken."""
    other = signed(root.certificate.parent, root, "other.example.org")
    with listening(certificate) as port:
        options = HttpOptions(port=port, **tls(certificate))
        assert httpx.get(options.url, verify=options.trust()).text == "here"
        elsewhere = HttpOptions(port=port, **tls(other))
        with pytest.raises(httpx.ConnectError):
            httpx.get(elsewhere.url, verify=elsewhere.trust())


def test_a_password_is_not_repeated(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, {"ssl_keyfile_password": 314159})
    assert problem == "http_options.ssl_keyfile_password: got a secret; input should be a valid string"
