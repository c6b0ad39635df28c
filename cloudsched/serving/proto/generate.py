"""Writes the Python of `cloudsched.proto`; run it after a change and commit what it writes."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def main() -> int:
    """Generate."""
    from grpc_tools import protoc

    source = Path(__file__).with_name("cloudsched.proto").relative_to(ROOT)
    arguments = [f"-I{ROOT}", f"--python_out={ROOT}", f"--grpc_python_out={ROOT}"]
    return int(protoc.main(["protoc", *arguments, str(ROOT / source)]))


if __name__ == "__main__":
    sys.exit(main())
