"""The allowed addresses of pictures: the public internet, and named hosts."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

Address = IPv4Address | IPv6Address

_NOT_PUBLIC = [
    ip_network(each)
    for each in (
        "192.88.99.0/24",  # relays of 6to4
        "::/96",  # IPv4 in IPv6, as it was once written
        "64:ff9b::/96",  # NAT64, which reaches any IPv4 address
        "64:ff9b:1::/48",
        "2001::/32",  # Teredo, the same
        "2002::/16",  # 6to4, the same
        "fec0::/10",  # site-local, before fc00::/7
        "5f00::/16",  # segment routing
    )
]
"""Networks that Python takes for global ones, in some of its versions at least."""


def parsed(text: str) -> Address | None:
    """The canonical form of an address, or None if it is not one."""
    try:
        return ip_address(text.partition("%")[0])
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether it is a unicast address on the public internet."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return False
    if not address.is_global or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return not any(
        address in network for network in _NOT_PUBLIC if isinstance(network, IPv6Network) == (address.version == 6)
    )


@dataclass(frozen=True, slots=True)
class Place:
    """A host that pictures may come from. `port`: only this one, or None for those of http and https."""

    host: str
    port: int | None

    @classmethod
    def of(cls, text: str) -> Place:
        """ "images.example", "images.example:8080", "10.0.0.3:8080", "[fd00::3]:8080". Raises ValueError."""
        parts = urlsplit(f"//{text}")
        if not parts.hostname or parts.netloc != text or "@" in text or parts.port == 0:
            raise ValueError(f"{text!r} is no host")
        return cls(parts.hostname, parts.port)
