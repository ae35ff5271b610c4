"""Entry point of the router process: ``python -m services.router --config FILE``."""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import sys

from services.router.service import RouterService
from shared.run.lifecycle import run_service

if __name__ == "__main__":
    sys.exit(run_service(RouterService(), sys.argv[1:]))
