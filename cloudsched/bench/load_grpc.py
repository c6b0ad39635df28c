"""The load generator for gRPC: some channels, each sending as fast as it is answered."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import grpc

METHOD = "/cloudsched.v1.Scheduler/Decide"


async def _generate(
    address: str, token: str, connections: int, seconds: float, body: bytes
) -> list[float]:
    latencies: list[float] = []
    metadata = (("authorization", f"Bearer {token}"),)
    deadline = time.perf_counter() + seconds

    async def caller(number: int) -> None:
        # Channels with equal options would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1), ("cloudsched.number", number)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call: Any = channel.unary_unary(METHOD)  # bytes in, bytes out
            while (start := time.perf_counter()) < deadline:
                await call(body, metadata=metadata)
                latencies.append(time.perf_counter() - start)

    await asyncio.gather(*(caller(number) for number in range(connections)))
    return latencies


def main() -> None:
    """Read address, token, connections, seconds and a message file; print JSON."""
    address, token, connections, seconds, file = sys.argv[1:6]
    body = Path(file).read_bytes()
    latencies = asyncio.run(_generate(address, token, int(connections), float(seconds), body))
    ordered = sorted(latencies)

    def percentile_ms(share: float) -> float:
        return 1000.0 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    print(
        json.dumps(
            {
                "requests_per_s": len(ordered) / float(seconds),
                "p50_ms": percentile_ms(0.5),
                "p90_ms": percentile_ms(0.9),
                "p99_ms": percentile_ms(0.99),
            }
        )
    )


if __name__ == "__main__":
    main()
