"""Entry point of the drafter process: ``python -m services.drafter --config FILE``."""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import sys

from services.drafter.service import DrafterService
from shared.run.lifecycle import run_service

if __name__ == "__main__":
    sys.exit(run_service(DrafterService(), sys.argv[1:]))
