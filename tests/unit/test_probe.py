"""The yardsticks: rates of this machine are finite and positive, and what is no rate is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from native.library import NativeError, Pool, available_isas, isa_current, isa_limit
from native.memory import HugeBuffer
from native.probe import KINDS, ops_rate, rate, read_rate


@pytest.fixture
def highest() -> Iterator[None]:
    """Puts the rung back that was in use."""
    before = isa_current()
    yield
    isa_limit(before)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.usefixtures("highest")
def test_every_rung_has_a_rate_for_every_kind(isa: str, kind: str) -> None:
    isa_limit(isa)
    with Pool(2) as pool:
        found = ops_rate(pool, kind, 8)
    assert math.isfinite(found)
    assert 1e7 < found < 1e16


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("n_bytes", [64, 4096 + 64, (3 << 20) + 128])
def test_reading_has_a_rate(ahead: bool, n_bytes: int) -> None:
    with HugeBuffer(4 << 20) as buffer, Pool(2) as pool:
        buffer.array[:] = 1
        found = read_rate(pool, buffer.array[:n_bytes], ahead)
    assert math.isfinite(found)
    assert 0 < found < 1e15


@pytest.mark.parametrize(("amount", "ns"), [(0, 100), (-1, 100), (5, 0), (5, -3), (math.nan, 5), (math.inf, 5)])
def test_a_broken_limit_is_refused(amount: float, ns: int) -> None:
    with pytest.raises(NativeError, match="no rate"):
        rate(amount, ns, "read")


def test_impossible_probes_are_refused() -> None:
    with Pool(1) as pool, HugeBuffer(4096) as buffer:
        with pytest.raises(NativeError, match="int7"):
            ops_rate(pool, "int7", 1)
        for n_items in (0, -1, 1 << 40):
            with pytest.raises(NativeError, match="cb_probe_ops"):
                ops_rate(pool, "f32", n_items)
        with pytest.raises(NativeError, match="cb_probe_read"):
            read_rate(pool, buffer.array[:65], False)
        with pytest.raises(NativeError, match="cb_probe_read"):
            read_rate(pool, buffer.array[1:65], False)
        with pytest.raises(NativeError, match="uint8"):
            read_rate(pool, np.zeros(64, np.float32), False)
