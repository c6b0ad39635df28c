"""Who may call, how much, and how often."""

from __future__ import annotations

import hmac
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import cache

from cloudsched.config import Settings
from cloudsched.errors import ConfigError
from cloudsched.serving.errors import (
    OverloadedError,
    RateLimitError,
    TooLargeError,
    UnauthorisedError,
)

MAX_CALLERS = 10_000  # whose rates are remembered
LOOPBACK = ("127.", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class LimitSettings(Settings):
    """Limits of one replica."""

    max_body_bytes: int = 16 * 2**20
    """Largest request; a larger one gets 413."""
    max_in_flight: int = 256
    """Requests in hand at once; one more gets 503."""
    rate_per_s: float = 0.0
    """Requests a second of one caller (by address); more get 429. 0: no limit."""
    burst: int = 100
    """Requests that a caller may send at once before the rate counts."""

    def __post_init__(self) -> None:
        self._integer("max_body_bytes", low=1)
        self._integer("max_in_flight", low=1)
        self._number("rate_per_s", low=0.0)
        self._integer("burst", low=1)


class Gate:
    """Lets requests in, or says why not.

    Args:
        token: what callers must know; empty only where all callers are on this machine.
    """

    def __init__(self, token: str, limits: LimitSettings) -> None:
        self._expected = f"Bearer {token}".encode() if token else b""
        self._token = token.encode()
        self._limits = limits
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # caller -> level, at

    @property
    def max_body_bytes(self) -> int:
        """Largest request."""
        return self._limits.max_body_bytes

    def check_token(self, authorization: bytes, caller: str) -> None:
        """Refuse a caller who does not know the token; in constant time."""
        if not self._expected:
            if not is_local(caller):
                raise UnauthorisedError(
                    f"This service runs without a token, for callers on its own machine; you call "
                    f"from {caller}."
                )
        elif not hmac.compare_digest(authorization, self._expected):
            raise UnauthorisedError("Send the header `Authorization: Bearer TOKEN`.")

    def check_path_token(self, token: str, caller: str) -> None:
        """The same for callers that cannot send headers, such as the kube-scheduler."""
        if not self._expected:
            self.check_token(b"", caller)
        elif not hmac.compare_digest(token.encode(), self._token):
            raise UnauthorisedError("The token in the path is wrong.")

    def check_size(self, num_bytes: int) -> None:
        """Refuse a body that is too large."""
        if num_bytes > self._limits.max_body_bytes:
            raise TooLargeError(
                f"The body has {num_bytes} bytes or more; {self._limits.max_body_bytes} at most. "
                "Send smaller batches."
            )

    def check_rate(self, caller: str) -> None:
        """Refuse a caller who sends too much."""
        rate = self._limits.rate_per_s
        if rate == 0.0:
            return
        now = time.monotonic()
        level, since = self._buckets.pop(caller, (float(self._limits.burst), now))
        level = min(float(self._limits.burst), level + rate * (now - since))
        is_allowed = level >= 1.0
        self._buckets[caller] = (level - 1.0 if is_allowed else level, now)
        if len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        if not is_allowed:
            raise RateLimitError(f"More than {rate:g} requests a second from {caller}.")

    def check_load(self, num_in_flight: int) -> None:
        """Refuse when enough is in hand."""
        if num_in_flight > self._limits.max_in_flight:
            raise OverloadedError(
                f"{self._limits.max_in_flight} requests are in hand already; try again shortly."
            )


def is_local(caller: str) -> bool:
    """Return whether a caller is on this machine."""
    return caller.startswith(LOOPBACK) or caller in _own_addresses()


def check_host(host: str, token: str) -> None:
    """Refuse to listen to the world without a token."""
    if not token and not host.startswith(LOOPBACK):
        raise ConfigError(
            f"host={host!r} without a token: --no-auth is only for loopback, such as 127.0.0.1."
        )


@cache
def _own_addresses() -> frozenset[str]:
    """Return this machine's addresses: HAProxy calls replicas from one of them."""
    names = {socket.gethostname(), socket.getfqdn()}
    found: set[str] = set()
    for name in names:
        try:
            found.update(str(info[4][0]) for info in socket.getaddrinfo(name, None))
        except OSError:
            continue
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; asks which address would
            found.add(probe.getsockname()[0])
    except OSError:
        pass
    return frozenset(found)
