"""Rejects requests from web pages of other sites, by their `Host` and `Origin`.

A browser runs pages of other sites on the same machine and network as the servers of this package. A page can post to
`http://127.0.0.1:PORT` (the browser adds the page's `Origin`), and a page whose domain resolves to a local address (DNS
rebinding) can also read the answers (the browser sends that domain as `Host`). So `Host` must be a name that such a page cannot have, and
`Origin`, if present, must be this server itself. Programs other than browsers send no `Origin`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket

HOSTS = "MTPCTL_ALLOWED_HOSTS"
"""Environment variable: further host names of the servers, separated by commas, such as that of a proxy."""
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)


def is_allowed_host(authority: str) -> bool:
    """Whether a request with this `Host` may be answered.

    True for an IP address, `localhost`, a name without a dot (no public domain has one), the name of this machine, and names in
    `MTPCTL_ALLOWED_HOSTS`: DNS rebinding needs a domain of the attacker.
    """
    match = _AUTHORITY.fullmatch(authority.strip().lower())
    if match is None:
        return False
    name = match[1].removesuffix(".")
    return "." not in name or name.endswith(".localhost") or _is_address(name) or name in _own_names()


def is_same_origin(origin: str, authority: str) -> bool:
    """Whether `origin` is the server that the `Host` names. The scheme is not compared, because a proxy may add TLS."""
    scheme, mark, rest = origin.strip().lower().partition("://")
    return bool(mark) and scheme in ("http", "https") and rest == authority.strip().lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _own_names() -> set[str]:
    named = os.environ.get(HOSTS, "").split(",")
    return {each.strip().lower().removesuffix(".") for each in (*named, socket.gethostname())} - {""}
