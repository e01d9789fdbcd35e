"""Which requests the debugging API answers: those for a name of its own, and not those of other sites' pages."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from gradflow_export.errors import ArgumentError, ArgumentTypeError

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?", re.IGNORECASE)
_LONGEST = 80


class HostGate:
    """Answers requests whose ``Host`` names this server, and refuses those that a browser sends for another site.

    A web page may give its own name the address 127.0.0.1 after it was loaded (DNS rebinding), and then reads what
    answers there as its own. The browser still sends that name.

    Args:
        hosts: Names and addresses beside those of the loopback interface.

    Raises:
        ArgumentError: A host is no name and no address.
        ArgumentTypeError: The hosts are no list of strings.
    """

    def __init__(self, hosts: Sequence[str] = ()) -> None:
        if isinstance(hosts, str) or not isinstance(hosts, (list, tuple, set, frozenset)):
            raise ArgumentTypeError(f"hosts must be a list of names, got {hosts!r}; for example hosts=['gpu7.lan'].")
        self._hosts: set[str] = set()
        for host in hosts:
            self.allow(host)

    def allow(self, host: str) -> None:
        """Answer under one more name or address.

        Raises:
            ArgumentError: It is none.
            ArgumentTypeError: It is no string.
        """
        if not isinstance(host, str):
            raise ArgumentTypeError(f"a host must be a name or an address, got {host!r}; for example 'gpu7.lan'.")
        plain = _plain(f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host)
        if plain is None:
            raise ArgumentError(
                f"a host must be a name or an address without scheme, got {host!r}; such as 'gpu7.lan'."
            )
        self._hosts.add(plain)

    def around(self, app: App) -> App:
        """Return an application that refuses what this gate does not let through."""

        async def gated(scope: Scope, receive: Any, send: Any) -> None:
            refusal = self.refusal(scope) if scope["type"] == "http" else None
            if refusal is None:
                await app(scope, receive, send)
                return
            status, message = refusal
            body = json.dumps({"error": message}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return gated

    def refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and message of a request that is refused, ``None`` for one that is answered.

        Args:
            scope: Of the request, as the Asynchronous Server Gateway Interface has it.
        """
        found: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1").strip())
        hosts = found.get("host", [])
        plain = _plain(hosts[0]) if len(hosts) == 1 else None
        if plain is None:
            given = ", ".join(hosts)[:_LONGEST] or "none"
            return 400, f"expected one header 'Host' with a name or an address, got {given!r}; send one."
        server = str((scope.get("server") or ("",))[0])
        if not self._knows(plain, server):
            return 403, (
                f"expected a header 'Host' that names this server, got {hosts[0][:_LONGEST]!r}; use "
                "http://127.0.0.1 or http://localhost, or allow the name: create_app(..., hosts=[name])."
            )
        sites = found.get("sec-fetch-site", [])
        if any(site.lower() == "cross-site" for site in sites):
            return (
                403,
                "expected a request of this server's own, got one of another site's page; open the address itself.",
            )
        for origin in found.get("origin", []):
            name = _plain(_netloc(origin))
            if name is None or not self._knows(name, server):
                return 403, (
                    f"expected a request of this server's own, got one with the origin {origin[:_LONGEST]!r}; allow "
                    "its host: create_app(..., hosts=[name])."
                )
        return None

    def _knows(self, host: str, server: str) -> bool:
        # An address cannot be given to another one; a name can. So the address that was reached is as good as a name.
        reached = _address(server) is not None and _plain(f"[{server}]" if ":" in server else server) == host
        return host in self._hosts or is_loopback(host) or reached


def is_loopback(host: str) -> bool:
    """Whether a host is one of this machine's own loopback interface."""
    address = _address(host)
    if address is None:
        return host.rstrip(".").lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def is_everywhere(host: str) -> bool:
    """Whether a host stands for every interface, which is no address that a request could be sent to."""
    address = _address(host)
    return address is not None and address.is_unspecified


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def _plain(host: str) -> str | None:
    """Return name or address in small letters and in one form, without port; ``None`` where it is none."""
    match = _HOST.fullmatch(host)
    if match is None:
        return None
    name = match[1].lower().rstrip(".").strip("[]")
    address = _address(name)
    return str(address) if address is not None else name or None


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
