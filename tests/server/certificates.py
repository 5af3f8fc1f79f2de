"""Certificates for tests, made when they are needed: an authority, what it signed, and files of both."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme


class Authority:
    """One CA and the PEM files of what it signs, in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.ca_file = str(folder / f"{name}.pem")
        self._ca.cert_pem.write_to_path(self.ca_file)

    def issue(self, name: str, *hosts: str, expired: bool = False) -> tuple[str, str]:
        """Certificate file and private key file for the hosts."""
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        certificate = self._ca.issue_cert(*hosts, not_after=past if expired else None)
        files = str(self._folder / f"{name}.crt"), str(self._folder / f"{name}.key")
        Path(files[0]).write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(files[1])
        return files
