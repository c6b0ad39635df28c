"""A load generator for HTTP on loopback: some connections, each sending as fast as it is answered.

Requests are bytes made beforehand and answers are only looked at for their status and length, so
that a core is spent on the service and not on its measurement. It runs in a process of its own.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from dataclasses import dataclass

HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one run saw."""

    num_requests: int
    num_failed: int
    elapsed_s: float
    latencies_s: list[float]

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return self.num_requests / self.elapsed_s

    def percentile_ms(self, share: float) -> float:
        """Latency in milliseconds below which this share of the answers came."""
        ordered = sorted(self.latencies_s)
        return 1000.0 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def request_bytes(path: str, body: bytes, token: str) -> bytes:
    """Return a whole POST request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def generate(
    port: int, request: bytes, *, connections: int, seconds: float, host: str = "127.0.0.1"
) -> Load:
    """Send the same request over some connections for a while."""
    poll = select.epoll()
    sockets: dict[int, socket.socket] = {}
    for _ in range(connections):
        connection = socket.create_connection((host, port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[connection.fileno()] = connection
        poll.register(connection.fileno(), select.EPOLLIN)
    sent_at = dict.fromkeys(sockets, 0.0)
    parts: dict[int, bytes] = dict.fromkeys(sockets, b"")
    latencies: list[float] = []
    num_failed = 0
    start = time.perf_counter()
    for number, connection in sockets.items():
        connection.sendall(request)
        sent_at[number] = time.perf_counter()
    deadline = start + seconds
    try:
        while time.perf_counter() < deadline:
            for number, _ in poll.poll(1.0):
                connection = sockets[number]
                data = parts[number] + connection.recv(1 << 18)
                if not data:
                    raise ConnectionError("The service closed a connection.")
                if not _is_whole(data):
                    parts[number] = data
                    continue
                now = time.perf_counter()
                latencies.append(now - sent_at[number])
                num_failed += data[9:12] != b"200"
                parts[number] = b""
                sent_at[number] = now
                connection.sendall(request)
        elapsed = time.perf_counter() - start
    finally:
        for connection in sockets.values():
            connection.close()
        poll.close()
    return Load(
        num_requests=len(latencies),
        num_failed=num_failed,
        elapsed_s=elapsed,
        latencies_s=latencies,
    )


def _is_whole(data: bytes) -> bool:
    """Return whether an answer has come to its end."""
    end = data.find(HEAD_END)
    if end < 0:
        return False
    head = data[:end].lower()
    at = head.find(b"content-length:")
    if at < 0:
        return data.endswith(b"0\r\n\r\n")  # chunked
    length = int(head[at + 15 : head.find(b"\r\n", at) if b"\r\n" in head[at:] else None])
    return len(data) >= end + len(HEAD_END) + length


def main() -> None:
    """Read port, path, token, connections, seconds and a body file; print JSON."""
    import json
    from pathlib import Path

    port, path, token, connections, seconds, file = sys.argv[1:7]
    request = request_bytes(path, Path(file).read_bytes(), token)
    load = generate(int(port), request, connections=int(connections), seconds=float(seconds))
    print(
        json.dumps(
            {
                "requests_per_s": load.per_s,
                "failed": load.num_failed,
                "p50_ms": load.percentile_ms(0.5),
                "p90_ms": load.percentile_ms(0.9),
                "p99_ms": load.percentile_ms(0.99),
            }
        )
    )


if __name__ == "__main__":
    main()
