"""Who may call a route that is for this machine only."""

from __future__ import annotations

import socket
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit


def is_local(client: str, origin: str | None, host: str | None, bound: str) -> bool:
    """Whether a request comes from this machine and not from a web page that means it harm.

    The client's address must be a loopback one. A browser's request names its
    page in `Origin`, which must be of this server. `Host` must name this machine:
    a page can point a name of its own at a loopback address and then is of the
    "same" origin, and a proxy in front of the server is a loopback client, too.
    `bound` is the host that the server was told to listen on.
    """
    try:
        return _loopback(client) and _from_here(origin, host, bound)
    except ValueError:  # no address at all
        return False


def _from_here(origin: str | None, host: str | None, bound: str) -> bool:
    if host is not None and not _this_machine(urlsplit(f"//{host}").hostname or "", bound):
        return False
    if origin is None:
        return True
    page = urlsplit(origin)
    return bool(page.netloc) and host is not None and page.netloc.lower() == host.lower()


def _loopback(address: str) -> bool:
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return (mapped or ip).is_loopback


def _this_machine(name: str, bound: str) -> bool:
    name = name.lower().rstrip(".")
    known = {"localhost", bound.lower(), socket.gethostname().lower(), socket.gethostname().partition(".")[0].lower()}
    return name in known or name.endswith(".localhost") or _loopback(name)
