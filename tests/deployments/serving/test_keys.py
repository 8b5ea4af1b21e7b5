"""Keys: where they come from, and that a file of them counts as it is now."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from pliant.config.cluster import GatewayConfig, ServingConfig
from pliant.config.tenants import RIGHTS, TenantConfig
from pliant.deployments.serving.keys import Keys, Tenants, hashed
from pliant.errors import ConfigError

KNOWN = ("a", "b")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def written(file: Path, *entries: str) -> None:
    """At another time than before. A surrogate is a byte that is no text."""
    before = file.stat().st_mtime_ns if file.exists() else 0
    file.write_text("\n".join(entries), errors="surrogateescape")
    os.utime(file, ns=(before + 10**9, before + 10**9))


def of(key: str, tenant: str) -> str:
    return f"{tenant}:{hashed(key)}"


def test_a_hash_is_as_sha256sum_has_it() -> None:
    assert hashed("secret") == "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"


def test_what_changes_in_the_file_counts(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    written(file, "# name:hash", of("one", "a"), of("two", "b") + "  # until May")
    keys = Keys(GatewayConfig(keys_file=str(file)), KNOWN, {}, clock)
    assert [keys.tenant(key) for key in ("one", "two", "three")] == ["a", "b", None]
    written(file, of("two", "a"), of("three", "b"))
    clock.now += 2
    assert [keys.tenant(key) for key in ("one", "two", "three")] == [None, "a", "b"]


@pytest.mark.parametrize("content", ["a:xyz", "nobody:" + "0" * 64, "a:" + "0" * 63, "\udcff", None])
def test_a_file_that_cannot_be_read_later_changes_nothing(tmp_path: Path, content: str | None) -> None:
    file, clock = tmp_path / "keys", Clock()
    written(file, of("one", "a"))
    keys = Keys(GatewayConfig(keys_file=str(file)), KNOWN, {}, clock)
    if content is None:
        file.unlink()
    else:
        written(file, content)
    clock.now += 2
    assert keys.tenant("one") == "a"
    written(file, of("two", "a"))
    clock.now += 2
    assert (keys.tenant("one"), keys.tenant("two")) == (None, "a")


def test_a_file_that_may_be_read_again_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever mends its mode changes neither its time nor its size."""
    file, clock = tmp_path / "keys", Clock()
    written(file, of("one", "a"))
    keys = Keys(GatewayConfig(keys_file=str(file)), KNOWN, {}, clock)
    written(file, of("two", "a"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError))
        clock.now += 2
        assert keys.tenant("one") == "a"
    clock.now += 2
    assert (keys.tenant("one"), keys.tenant("two")) == (None, "a")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("a:xyz", "an entry is NAME:SHA256"),
        ("nobody:" + "0" * 64, "got a key of 'nobody'; tenants has no such tenant"),
        ("\udcff", "is no text in UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_at_the_start_is_an_error(tmp_path: Path, content: str | None, line: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        written(file, content)
    with pytest.raises(ConfigError, match=line):
        Keys(GatewayConfig(keys_file=str(file)), KNOWN, {})


def test_all_sources_together(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(of("three", "b"))
    gateway = GatewayConfig(api_keys_env="PLAIN", keys_env="HASHED", keys_file=str(file))
    environment = {"PLAIN": "one, 1", "HASHED": of("two", "a")}
    keys = Keys(gateway, KNOWN, environment)
    assert [keys.tenant(key) for key in ("one", "1", "two", "three")] == ["default", "default", "a", "b"]
    for variable in environment:
        with pytest.raises(ConfigError, match="the gateway's environment has no keys in it"):
            Keys(gateway, KNOWN, environment | {variable: " "})


def test_keys_without_a_name_may_do_all_unless_it_is_said_otherwise() -> None:
    environment = {"PLAIN": "one"}
    gateway = GatewayConfig(api_keys_env="PLAIN")
    account = Tenants(ServingConfig(gateway, {}), environment=environment).of("Bearer one")
    assert account
    assert (account.name, account.config.rights) == ("default", RIGHTS)
    limited = ServingConfig(gateway, {}, {"default": TenantConfig(rights=("infer",))})
    account = Tenants(limited, environment=environment).of("Bearer one")
    assert account
    assert account.config.rights == ("infer",)


@pytest.mark.parametrize(
    ("entry", "told"), [("a:sk-live-1", r"KEYS: entry 2 \(a\): "), ("sk-live-1", "KEYS: entry 2: ")]
)
def test_a_key_that_is_written_for_its_hash_is_not_repeated(entry: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        Keys(GatewayConfig(keys_env="KEYS"), KNOWN, {"KEYS": f"{of('one', 'b')},{entry}"})
    assert "sk" not in str(refused.value)
