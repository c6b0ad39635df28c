"""Talks to the service over HTTP with nothing but the standard library.

python serve/client_http.py --url http://127.0.0.1:8000 --token TOKEN
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.request
import uuid
from typing import Any


class Client:
    """Repeats calls that failed for no fault of the caller; every call may be repeated safely."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token

    def __call__(self, method: str, path: str, document: Any = None) -> Any:
        """Send one call and return its reply."""
        body = None if document is None else json.dumps(document).encode()
        for attempt in range(8):
            request = urllib.request.Request(self._url + path, body, method=method)
            request.add_header("Authorization", f"Bearer {self._token}")
            request.add_header("Content-Type", "application/json")
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return json.load(response)
            except urllib.error.HTTPError as error:
                if error.code != 429 and error.code < 500:
                    raise SystemExit(f"{error.code}: {json.load(error)['error']}") from error
                wait_s = float(error.headers.get("Retry-After", 0.1 * 2**attempt))
            except (urllib.error.URLError, ConnectionError):
                wait_s = 0.1 * 2**attempt
            time.sleep(wait_s)
        raise SystemExit(f"{self._url} does not answer.")


def main() -> None:
    """Ask for decisions, then let the service keep a cluster's state."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--token", default="")
    arguments = parser.parse_args()
    call = Client(arguments.url, arguments.token)

    # Stateless: describe the cluster, get the decisions of this tick.
    fleet = {
        "resources": ["cpu", "memory"],
        "servers": [{"capacity": [1.0, 1.0], "idle_w": 100.0, "max_w": 300.0}] * 4,
    }
    reply = call(
        "POST",
        "/v1/decisions",
        {
            "fleet": fleet,
            "servers": [{"mode": "active"}] * 2 + [{"mode": "asleep"}] * 2,
            "running": [{"server": 0, "demand": [0.5, 0.25], "ticks_left": 12}],
            "queue": [{"id": "render", "demand": [0.5, 0.5], "duration": 30}],
        },
    )
    for decision in reply["decisions"]:
        print(decision["kind"], decision["job"] or "", "server", decision["server"])

    # Stateful: say what happens, in order, with an id for each event.
    cluster = f"example-{uuid.uuid4().hex[:8]}"
    call("POST", "/v1/clusters", {"id": cluster, "fleet": fleet})
    events = [
        {"kind": "tick", "id": "tick-0"},
        {"kind": "arrival", "id": "a-1", "job": "web", "demand": [0.25, 0.25], "duration": 60},
    ]
    reply = call("POST", f"/v1/clusters/{cluster}/events", {"events": events})
    print("web runs on server", next(d["server"] for d in reply["decisions"] if d["job"] == "web"))
    done = [{"kind": "tick", "id": "tick-1"}, {"kind": "completion", "id": "c-1", "job": "web"}]
    call("POST", f"/v1/clusters/{cluster}/events", {"events": done})
    print(call("GET", f"/v1/clusters/{cluster}")["counters"])


if __name__ == "__main__":
    main()
