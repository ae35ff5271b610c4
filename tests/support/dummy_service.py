"""A service without a model, run as a real process by the lifecycle tests: ``python -m tests.support.dummy_service``.

``DUMMY`` in the environment says how it should misbehave.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from shared.errors import ContainerError
from shared.messages.layer import HiddenReady, Mixed
from shared.run.lifecycle import run_service
from shared.run.service import Service, ServiceContext
from shared.wire.protocols import ControlBus


class Dummy(Service):
    name = "attention"
    receives = (Mixed,)

    def load(self, ctx: ServiceContext[ControlBus]) -> dict[str, str]:
        self._ctx = ctx
        self._mode = os.environ.get("DUMMY", "")
        self._is_busy = False
        self._peers: list[str] = []
        ctx.set_stage("load weights")
        if self._mode == "bad_container":
            raise ContainerError("dense-00000.safetensors is missing: convert the checkpoint again")
        if self._mode == "bug":
            raise ZeroDivisionError("division by zero")
        return {"kernels": "none"}

    def handle(self, msg: Any, sender: str) -> None:
        if msg.layer == 13:
            raise RuntimeError("layer 13 is unlucky")
        if msg.layer == 14:
            self._is_busy = not self._is_busy
        if msg.layer == 15:
            time.sleep(30)
        self._ctx.bus.post("router", HiddenReady(msg.step, msg.layer, msg.frame, len(self._peers)))

    def peer_changed(self, service: str, incarnation: int) -> None:
        self._peers.append(service)

    def is_idle(self) -> bool:
        return not self._is_busy

    def cut(self, reason: str) -> int:
        self._is_busy = False
        return 1


if __name__ == "__main__":
    sys.exit(run_service(Dummy()))
