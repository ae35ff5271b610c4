"""Entry point of the gateway process: ``python -m services.gateway --config FILE``."""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import sys

from services.gateway.service import GatewayService
from shared.run.lifecycle import run_service_async

if __name__ == "__main__":
    sys.exit(run_service_async(GatewayService(), sys.argv[1:]))
