"""A start is over when the gateway itself answers."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import launch
from shared.messages import control
from tests.support.fake_router import FakeRouter, GatewayProcess, await_ready
from tests.support.waiting import wait_for


def status_with(url: str) -> control.Status:
    gateway = control.ServiceStatus("gateway", "ready", 1, 1, 0.0, "", (("url", url),))
    return control.Status(True, "ready", 0, 0, (gateway,))


def test_the_gateway_is_asked_itself(tmp_path: Path) -> None:
    process = GatewayProcess(tmp_path / "run")
    try:
        status = status_with(process.wait_url())
        assert not launch.gateway_serves(status)
        router = FakeRouter(process.endpoints)
        try:
            await_ready(process, router)
            assert launch.gateway_serves(status)
            router.is_ready = False
            wait_for(lambda: not launch.gateway_serves(status), "the gateway to hear of it")
        finally:
            router.close()
    finally:
        process.close()
    assert not launch.gateway_serves(status)
    assert not launch.gateway_serves(status_with(""))


def test_ready_is_not_said_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = itertools.chain([False, False], itertools.repeat(True))
    monkeypatch.setattr(launch, "gateway_serves", lambda status: next(answers))
    group: Any = SimpleNamespace(
        check=lambda: None, run_dir=tmp_path, status=lambda timeout_s: status_with("http://x:1")
    )
    assert len(list(launch.GroupProcess.wait_ready(group))) == 3
