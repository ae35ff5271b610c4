"""Entry point of the expert_io process: ``python -m services.expert_io --config FILE``."""

from __future__ import annotations

import shared.run.first  # noqa: F401

# isort: split

import sys

from services.expert_io.service import ExpertIoService
from shared.run.lifecycle import run_service

if __name__ == "__main__":
    sys.exit(run_service(ExpertIoService(), sys.argv[1:]))
