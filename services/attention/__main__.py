"""Entry point of the attention process: ``python -m services.attention --config FILE``."""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import sys

from services.attention.service import AttentionService
from shared.run.lifecycle import run_service

if __name__ == "__main__":
    sys.exit(run_service(AttentionService(), sys.argv[1:]))
