"""Which servers there are behind a DNS name: every address of it is one (a headless Service lists its ready pods).

Invariants: one address family is used (IPv4 where there is any), because the two families of one name are the same servers; a
name that cannot be looked up now changes nothing. What this does not know: what is done with a server.
"""

import asyncio
import ipaddress
import socket

from rolloutd.client.connection import logger


def split_target(target: str) -> tuple[str, int]:
    """Host and port of "name:port", with or without "dns:///" before it. ValueError when it is neither."""
    text = target.removeprefix("dns:///")
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or "/" in host:
        raise ValueError(f"{target!r} is not the address of servers: give HOST:PORT, or dns:///HOST:PORT")
    return host.strip("[]"), int(port)


async def look_up(host: str, port: int) -> list[str] | None:
    """Targets of all addresses of a name, in order; None when it cannot be looked up now."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("cannot look up %s: %s", host, error)
        return None
    addresses = {ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found}
    family = min((address.version for address in addresses), default=4)
    chosen = sorted(str(address) for address in addresses if address.version == family)
    return [f"[{address}]:{port}" if family == 6 else f"{address}:{port}" for address in chosen]
