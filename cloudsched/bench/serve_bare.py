"""The yardstick of `cloudsched bench serve`: the same application on plain uvicorn, one process."""

from __future__ import annotations

import json
import socket
import sys

import torch
import uvicorn

from cloudsched.serving.backend import ServingSettings
from cloudsched.serving.bare import BareApplication


def main() -> None:
    """Serve until ended; prints its URL once it is ready."""
    policy, token, state_dir = sys.argv[1:4]
    torch.set_num_threads(1)
    application = BareApplication(ServingSettings(policy=policy, token=token, state_dir=state_dir))
    listener = socket.create_server(("127.0.0.1", 0))

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)

    config = uvicorn.Config(application, log_level="error", access_log=False)
    Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
