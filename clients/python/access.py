"""How a client shows who it is and how it knows the server: API key, TLS, client certificate.

Invariants: files are read once, when the client is made, and what is wrong with them or the key is said then, with the
argument's name; a key never appears in a repr or an error. What this does not know: what is called.
"""

import os
import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc

API_KEY_VARIABLE = "ROLLOUTD_API_KEY"
_KEY = re.compile(r"[!-~]+")  # what may travel in gRPC metadata, less the space that ends a word

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Access:
    """What every channel and call of a client carries. Made by `access_of`."""

    api_key: str = field(default="", repr=False)
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)  # None: no TLS
    server_name: str = ""  # the name to check the server's certificate against, when it is not that of the address

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def for_server(self, name: str) -> "Access":
        """The same, for a server that is reached by address and certified by name."""
        return self if self.server_name or self.credentials is None else replace(self, server_name=name)


def access_of(
    api_key: str | None = None,
    *,
    tls: bool = False,
    ca_file: PathLike | None = None,
    certificate_file: PathLike | None = None,
    private_key_file: PathLike | None = None,
    server_name: str = "",
) -> Access:
    """The access these arguments of `connect` describe. Raises ValueError."""
    key = os.environ.get(API_KEY_VARIABLE, "").strip() if api_key is None else api_key.strip()
    where = API_KEY_VARIABLE if api_key is None else "api_key"
    if api_key is not None and not key:
        raise ValueError(f"api_key is empty: give a key, or leave it out (then {API_KEY_VARIABLE} is looked at)")
    if key and _KEY.fullmatch(key) is None:
        raise ValueError(f"{where}: a key is one word of printable ASCII characters")
    if (certificate_file is None) != (private_key_file is None):
        raise ValueError("certificate_file and private_key_file go together")
    if not (tls or ca_file is not None or certificate_file is not None):
        if server_name:
            raise ValueError("server_name goes with TLS: tls=True, or a ca_file")
        return Access(key)
    _try_out(ca_file, certificate_file, private_key_file)
    credentials = grpc.ssl_channel_credentials(
        _read("ca_file", ca_file),
        _read("private_key_file", private_key_file),
        _read("certificate_file", certificate_file),
    )
    return Access(key, credentials, server_name)


def _read(argument: str, path: PathLike | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{argument}: cannot read {path}: {error.strerror or error}") from None


def _try_out(ca_file: PathLike | None, certificate_file: PathLike | None, private_key_file: PathLike | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is not None:
        _read("ca_file", ca_file)
        try:
            context.load_verify_locations(cafile=ca_file)
        except ssl.SSLError:
            raise ValueError(f"ca_file: {ca_file} has no readable PEM certificate") from None
    if certificate_file is not None:
        _read("certificate_file", certificate_file)
        _read("private_key_file", private_key_file)
        try:
            context.load_cert_chain(certificate_file, private_key_file, password=_no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(
                    f"private_key_file: {private_key_file} does not belong to {certificate_file}"
                ) from None
            raise ValueError(
                f"certificate_file, private_key_file: {certificate_file} and {private_key_file} are not a readable PEM "
                "certificate and key"
            ) from None


def _no_password() -> str:
    raise ValueError("private_key_file: is protected by a password; give a file without (readable by this user only)")
