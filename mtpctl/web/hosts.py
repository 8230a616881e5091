"""Decides from `Host` and `Origin` whether a request comes from a web page that has no business here.

A browser runs pages of strangers on the same machine and in the same network as the servers of this package. A page can post to
`http://127.0.0.1:PORT` (the browser adds the page's `Origin`), and a page whose domain is made to resolve to a local address (DNS
rebinding) can also read the answers (the browser sends that domain as `Host`). So a `Host` must be a name that such a page cannot have, and
an `Origin`, if there is one, must be this server itself. Programs other than browsers send no `Origin`.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket

HOSTS = "MTPCTL_ALLOWED_HOSTS"
"""Environment variable: further names, separated by commas, under which clients reach the servers of this package, such as a proxy's."""
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)


def may_be_host(authority: str) -> bool:
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
    """Whether a page of `origin` was served under the `Host` that its request names. The scheme is not compared: a proxy may add TLS."""
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
