"""The server's certificates: read and tried out before anything listens.

Invariants
- A server that starts has a certificate that is valid now and belongs to its private key: the pair has done a handshake
  with itself, in memory. gRPC would take anything, and every client would fail later without a reason.
- Errors name the setting and the file, never what is in a private key.

What this module does not know: API keys (`access.py`), and who the clients are.
"""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rolloutd.server.config_keys import ConfigError


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """PEM files. With `client_ca_file`, only clients with a certificate of one of its authorities are let in (mTLS)."""

    certificate_file: str | None = None
    private_key_file: str | None = None
    client_ca_file: str | None = None

    @property
    def on(self) -> bool:
        return self.certificate_file is not None


@dataclass(frozen=True, slots=True)
class TlsFacts:
    """What to tell a person about it."""

    names: tuple[str, ...]  # host names and addresses the certificate is for
    expires: str


def check_tls(settings: TlsSettings) -> TlsFacts | None:
    """Try the files out; None when TLS is off. Raises ConfigError."""
    if not settings.on:
        for field in ("private_key_file", "client_ca_file"):
            if getattr(settings, field) is not None:
                raise ConfigError(f"tls.{field}: needs tls.certificate_file (and tls.private_key_file) as well")
        return None
    if settings.private_key_file is None:
        raise ConfigError("tls.certificate_file: needs tls.private_key_file, the PEM file of its private key")
    assert settings.certificate_file is not None
    for field in ("certificate_file", "private_key_file", "client_ca_file"):
        if (path := getattr(settings, field)) is not None:
            _read(f"tls.{field}", path)
    if settings.client_ca_file is not None:
        _check_authorities(settings.client_ca_file)
    return _handshake(settings.certificate_file, settings.private_key_file)


def server_credentials(settings: TlsSettings) -> grpc.ServerCredentials:
    """For a server whose `settings.on`. Raises ConfigError."""
    check_tls(settings)
    assert settings.certificate_file is not None and settings.private_key_file is not None
    pair = (
        _read("tls.private_key_file", settings.private_key_file),
        _read("tls.certificate_file", settings.certificate_file),
    )
    if settings.client_ca_file is None:
        return grpc.ssl_server_credentials([pair])
    authorities = _read("tls.client_ca_file", settings.client_ca_file)
    return grpc.ssl_server_credentials([pair], root_certificates=authorities, require_client_auth=True)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror or error}") from None


def _check_authorities(path: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ConfigError(f"tls.client_ca_file: {path} has no readable PEM certificate: {_reason(error)}") from None
    authorities = context.get_ca_certs()
    if not authorities:
        raise ConfigError(f"tls.client_ca_file: {path} has no certificate of an authority (CA:TRUE)")
    if all(ssl.cert_time_to_seconds(str(authority["notAfter"])) < time.time() for authority in authorities):
        raise ConfigError(f"tls.client_ca_file: every authority of {path} has expired; no client could connect")


def _handshake(certificate_file: str, private_key_file: str) -> TlsFacts:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is the trusted end of the chain
    try:
        client.load_verify_locations(cafile=certificate_file)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls.certificate_file: {certificate_file} has no readable PEM certificate: {_reason(error)}"
        ) from None
    try:
        server.load_cert_chain(certificate_file, private_key_file, password=_no_password)
    except ssl.SSLError as error:
        problem = (
            f"does not belong to the certificate {certificate_file}"
            if error.reason == "KEY_VALUES_MISMATCH"
            else f"has no readable PEM private key: {_reason(error)}"
        )
        raise ConfigError(f"tls.private_key_file: {private_key_file} {problem}") from None
    try:
        certificate = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigError(
            f"tls.certificate_file: clients would refuse {certificate_file}: {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        raise ConfigError(f"tls.certificate_file: {certificate_file} cannot be used: {_reason(error)}") from None
    names = tuple(str(name) for _, name in certificate.get("subjectAltName", ()))
    return TlsFacts(names, str(certificate.get("notAfter", "")))


def _no_password() -> str:
    raise ConfigError(
        "tls.private_key_file: is protected by a password; give a file without (readable by this user only)"
    )


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """What a client sees of the server's certificate. Raises ssl.SSLError when the two do not come together."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = ends
    while waiting:
        still: list[ssl.SSLObject] = []
        for end in waiting:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                still.append(end)
        waiting = still
    return dict(ends[0].getpeercert() or {})


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
