"""TLS and mTLS over real channels, and certificates that stop the start."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

import rolloutd.client
from rolloutd.server.cli import main
from rolloutd.server.config import load_config
from rolloutd.server.config_keys import ConfigError
from tests.server.certificates import Authority
from tests.server.harness import Rig, running_server


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@asynccontextmanager
async def secure(flags: dict[str, Any]) -> AsyncIterator[Rig]:
    async with running_server(engines=(), wait=False, flags=flags) as rig:
        yield rig


def server_flags(ca: Authority, *hosts: str, mutual: bool = False) -> dict[str, Any]:
    certificate, key = ca.issue("server", *(hosts or ("127.0.0.1",)))
    flags = {"tls.certificate_file": certificate, "tls.private_key_file": key}
    return flags | ({"tls.client_ca_file": ca.ca_file} if mutual else {})


async def version(rig: Rig, **options: Any) -> str:
    options = {"reconnect_seconds": 0.2, **options}
    async with rolloutd.client.connect(f"127.0.0.1:{rig.server.port}", **options) as client:
        return str((await client.get_server_info()).version)


async def test_tls_with_the_right_authority(ca: Authority) -> None:
    async with secure(server_flags(ca)) as rig:
        assert await version(rig, ca_file=ca.ca_file)
        options: dict[str, Any] = {"run": "run", "consumer": "c", "ca_file": ca.ca_file}
        async with rolloutd.client.connect(f"127.0.0.1:{rig.server.port}", **options) as client:
            assert (await client.submit([1, 2], max_new_tokens=1)).rollout_id


async def test_tls_wrong_authority_no_tls_and_wrong_name_do_not_connect(ca: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with secure(server_flags(ca, "sidecars.rl.svc")) as rig:
        for options in (
            {"ca_file": stranger.ca_file, "server_name": "sidecars.rl.svc"},
            {"ca_file": ca.ca_file},  # certified for a name that the address is not
            {"tls": True},
            {},
        ):
            with pytest.raises(rolloutd.client.ServerUnavailable, match="do both sides use TLS"):
                await version(rig, **options)
        assert await version(rig, ca_file=ca.ca_file, server_name="sidecars.rl.svc")


async def test_mtls_lets_in_who_the_authority_knows(ca: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    certificate, key = ca.issue("client", "trainer@example.org")
    foreign = stranger.issue("foreign", "trainer@example.org")
    expired = ca.issue("expired", "trainer@example.org", expired=True)
    async with secure(server_flags(ca, mutual=True)) as rig:
        assert await version(rig, ca_file=ca.ca_file, certificate_file=certificate, private_key_file=key)
        for pair in ((None, None), foreign, expired):
            with pytest.raises(rolloutd.client.ServerUnavailable):
                await version(rig, ca_file=ca.ca_file, certificate_file=pair[0], private_key_file=pair[1])


async def test_mtls_and_keys_are_both_asked_for(ca: Authority, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("the-key\n")
    certificate, key = ca.issue("client", "trainer@example.org")
    shown = {"ca_file": ca.ca_file, "certificate_file": certificate, "private_key_file": key}
    async with secure(server_flags(ca, mutual=True) | {"server.api_keys_file": str(keys)}) as rig:
        with pytest.raises(rolloutd.client.Unauthorized):
            await version(rig, **shown)
        assert await version(rig, **shown, api_key="the-key")


def test_client_certificates_guard_a_public_bind(ca: Authority) -> None:
    flags = {"server.host": "0.0.0.0"}
    with pytest.raises(ConfigError, match="server.host"):
        load_config(flags=flags | server_flags(ca))  # TLS alone tells nobody who calls
    assert load_config(flags=flags | server_flags(ca, mutual=True)).tls.on


@pytest.fixture
def files(ca: Authority, tmp_path: Path) -> dict[str, str]:
    """Files of every kind that can be given by mistake."""
    certificate, key = ca.issue("good", "127.0.0.1")
    other, other_key = ca.issue("other", "127.0.0.1")
    expired, expired_key = ca.issue("expired", "127.0.0.1", expired=True)
    text = tmp_path / "text"
    text.write_text("not PEM\n")
    locked = tmp_path / "locked.key"
    private = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    locked.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    return {
        "certificate": certificate,
        "key": key,
        "other key": other_key,
        "expired": expired,
        "expired key": expired_key,
        "text": str(text),
        "locked": str(locked),
        "absent": str(tmp_path / "absent"),
        "folder": str(tmp_path),
        "ca": ca.ca_file,
        "leaf": other,
    }


@pytest.mark.parametrize(
    ("certificate", "key", "client_ca", "wrong", "message"),
    [
        ("certificate", None, None, "tls.certificate_file", "needs tls.private_key_file"),
        (None, "key", None, "tls.private_key_file", "needs tls.certificate_file"),
        (None, None, "ca", "tls.client_ca_file", "needs tls.certificate_file"),
        ("absent", "key", None, "tls.certificate_file", "cannot read {absent}"),
        ("certificate", "absent", None, "tls.private_key_file", "cannot read {absent}"),
        ("certificate", "folder", None, "tls.private_key_file", "cannot read {folder}"),
        ("certificate", "key", "absent", "tls.client_ca_file", "cannot read {absent}"),
        ("text", "key", None, "tls.certificate_file", "{text} has no readable PEM certificate"),
        ("key", "key", None, "tls.certificate_file", "{key} has no readable PEM certificate"),
        ("certificate", "text", None, "tls.private_key_file", "{text} has no readable PEM private key"),
        ("certificate", "other key", None, "tls.private_key_file", "does not belong to the certificate {certificate}"),
        ("certificate", "locked", None, "tls.private_key_file", "protected by a password"),
        ("expired", "expired key", None, "tls.certificate_file", "{expired}: certificate has expired"),
        ("certificate", "key", "text", "tls.client_ca_file", "{text} has no readable PEM certificate"),
        ("certificate", "key", "leaf", "tls.client_ca_file", "{leaf} has no certificate of an authority"),
    ],
)
def test_what_is_wrong_with_a_file_stops_the_start(
    files: dict[str, str], certificate: str | None, key: str | None, client_ca: str | None, wrong: str, message: str
) -> None:
    given = {"certificate_file": certificate, "private_key_file": key, "client_ca_file": client_ca}
    flags = {f"tls.{field}": files[name] for field, name in given.items() if name is not None}
    with pytest.raises(ConfigError) as raised:
        load_config(flags=flags)
    assert str(raised.value).startswith(wrong)
    assert message.format(**{name.replace(" ", "_"): path for name, path in files.items()}) in str(raised.value)
    assert "PRIVATE KEY-----" not in str(raised.value) and "secret" not in str(raised.value)


def test_check_shows_access_and_no_secret(
    ca: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-secret\nsecond-secret # of team b\n")
    flags = server_flags(ca, "sidecars.rl.svc", "127.0.0.1", mutual=True)
    config = tmp_path / "c.yaml"
    lines = [f"  {key.removeprefix('tls.')}: {path}" for key, path in flags.items()]
    config.write_text("\n".join(["server:", f"  api_keys_file: {keys}", "tls:", *lines]))
    assert main(["check", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    assert f"API keys     2 in {keys}" in shown
    assert "certificate  for sidecars.rl.svc, 127.0.0.1, until " in shown
    assert "clients      only with a certificate" in shown
    assert "secret" not in shown.replace(str(keys), "") and "PRIVATE" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ca_file": "absent"}, "ca_file: cannot read"),
        ({"ca_file": "text"}, "ca_file: .*no readable PEM certificate"),
        ({"certificate_file": "certificate"}, "go together"),
        ({"private_key_file": "key"}, "go together"),
        ({"certificate_file": "certificate", "private_key_file": "absent"}, "private_key_file: cannot read"),
        ({"certificate_file": "certificate", "private_key_file": "other key"}, "private_key_file: .*does not belong"),
        ({"certificate_file": "certificate", "private_key_file": "locked"}, "protected by a password"),
        ({"certificate_file": "text", "private_key_file": "key"}, "not a readable PEM"),
    ],
)
def test_the_client_looks_at_its_files_too(files: dict[str, str], arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rolloutd.client.connect("127.0.0.1:1", **{name: files[file] for name, file in arguments.items()})  # type: ignore[arg-type]


def test_a_server_name_without_tls_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="server_name goes with TLS"):
        rolloutd.client.connect("127.0.0.1:1", server_name="x")


async def test_files_are_read_when_the_server_starts(ca: Authority, tmp_path: Path) -> None:
    flags = server_flags(ca)
    shutil.copy(flags["tls.certificate_file"], tmp_path / "again.crt")
    async with secure(flags | {"tls.certificate_file": str(tmp_path / "again.crt")}) as rig:
        (tmp_path / "again.crt").unlink()
        assert await version(rig, ca_file=ca.ca_file)
