"""The usage history: rates are what they say, a file comes back exactly, and a bad file counts as none."""

from __future__ import annotations

import fcntl
import os
import random
import threading
from pathlib import Path

import msgpack
import numpy as np
import pytest

from shared.experts.usage import FORMAT, UsageHistory, load_usage, save_usage

LAYERS = (1, 2, 5)


def used(n_visits: int = 300) -> UsageHistory:
    rng = random.Random(0)
    history = UsageHistory(LAYERS, 16)
    for i in range(n_visits):
        for layer in LAYERS:
            history.count(layer, sorted({layer, 7, rng.randrange(16)}) if i % 2 else [3])
    return history


def test_rates_are_uses_per_visit() -> None:
    history = used()
    assert history.slow[0, 3] == pytest.approx(0.5, abs=0.06)
    assert history.slow[1, 2] == pytest.approx(0.5, abs=0.06)
    assert history.slow.sum(axis=1) == pytest.approx([1.93] * 3, abs=0.1)
    for _ in range(20):
        history.count(5, [9, 11], [1.0, 0.25])
    assert history.fast[2, 9] > 0.8 and history.fast[2, 11] == pytest.approx(0.25 * history.fast[2, 9], rel=0.1)
    assert history.slow[2, 9] < 0.15
    expected = history.expected()
    assert list(expected.values()) == sorted(expected.values(), reverse=True)
    assert expected[5, 9] == pytest.approx((history.slow[2, 9] + history.fast[2, 9]) / 2)
    assert all(rate > 0 for rate in expected.values())


def test_an_empty_history_expects_nothing() -> None:
    assert UsageHistory(LAYERS, 16).expected() == {}


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "usage" / "f"
    history = used()
    save_usage(path, "f", history)
    save_usage(path, "f", history)
    assert [p.name for p in path.parent.iterdir()] == ["f"]
    assert path.stat().st_size < 8 * 3 * 16 + 300
    found, why = load_usage(path, "f", LAYERS, 16)
    assert why == ""
    np.testing.assert_array_equal(found.slow, history.slow)
    np.testing.assert_array_equal(found.fast, history.fast)
    np.testing.assert_array_equal(found.n_visits, history.n_visits)
    found, why = load_usage(path, "f", (2, 9), 16)  # without the MTP layer, with another one
    assert why == "" and (found.slow[0] == history.slow[1]).all() and not found.slow[1].any()
    found.count(9, [1])


def test_two_groups_that_write_the_same_file_add_their_visits(tmp_path: Path) -> None:
    path = tmp_path / "f"
    save_usage(path, "f", used(100))
    one, other = (load_usage(path, "f", LAYERS, 16)[0] for _ in range(2))
    assert not one.has_news
    for _ in range(300):
        one.count(1, [10])
    for _ in range(100):
        other.count(1, [11])
        other.count(2, [12])
    save_usage(path, "f", one)
    assert not one.has_news
    save_usage(path, "f", other)
    both, why = load_usage(path, "f", LAYERS, 16)
    assert why == "" and both.n_visits.tolist() == [500, 200, 100]
    assert both.slow[0, 10] == pytest.approx(300 / 500, abs=0.02), "the first writer's visits are still there"
    assert both.slow[0, 11] == pytest.approx(100 / 500, abs=0.02)
    assert both.slow[1, 12] == pytest.approx(100 / 200, abs=0.02)
    assert both.fast[0, 10] > 0.4 and both.fast[0, 11] > 0.4, "what either used lately is warm"
    np.testing.assert_array_equal(both.slow, other.slow)
    save_usage(path, "f", one)  # without news of its own it changes nothing
    np.testing.assert_array_equal(load_usage(path, "f", LAYERS, 16)[0].slow, both.slow)


def test_many_rounds_of_two_writers_count_every_visit_once(tmp_path: Path) -> None:
    path = tmp_path / "f"
    groups = [load_usage(path, "f", LAYERS, 16)[0] for _ in range(2)]
    rng = random.Random(3)
    uses = np.zeros(16)
    for n in range(200):
        group = rng.choice(groups)
        expert = rng.randrange(16)
        group.count(2, [expert])
        uses[expert] += 1
        if n % 7 == 0:
            save_usage(path, "f", group)
    for group in groups:
        save_usage(path, "f", group)
    found, _ = load_usage(path, "f", LAYERS, 16)
    assert found.n_visits.tolist() == [0, 200, 0]
    np.testing.assert_allclose(found.slow[1], uses / 200, atol=1e-6)


def test_a_group_that_does_not_draft_keeps_the_drafting_layer_of_another(tmp_path: Path) -> None:
    path = tmp_path / "f"
    save_usage(path, "f", used())
    plain, _ = load_usage(path, "f", LAYERS[:2], 16)
    drafting, _ = load_usage(path, "f", LAYERS, 16)
    plain.count(1, [4])
    save_usage(path, "f", plain)
    drafting.count(5, [4])
    save_usage(path, "f", drafting)
    plain.count(1, [4])
    save_usage(path, "f", plain)
    found, why = load_usage(path, "f", LAYERS, 16)
    assert why == "" and found.n_visits.tolist() == [302, 300, 301]


def test_a_writer_waits_for_another_but_not_for_long(tmp_path: Path) -> None:
    path = tmp_path / "f"
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    timer = threading.Timer(0.05, lambda: fcntl.flock(fd, fcntl.LOCK_UN))
    timer.start()
    save_usage(path, "f", used())
    timer.join()
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BlockingIOError):
        save_usage(path, "f", used())
    os.close(fd)


def test_no_file_is_no_reason(tmp_path: Path) -> None:
    history, why = load_usage(tmp_path / "none", "f", LAYERS, 16)
    assert why == "" and history.expected() == {}


def test_every_damage_gives_an_empty_history_and_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "f"
    save_usage(path, "f", used())
    data = path.read_bytes()
    head = msgpack.unpackb(data)
    assert load_usage(path, "g", LAYERS, 16)[1] == "it is of model f"
    assert load_usage(path, "f", LAYERS, 17)[1] == "it is of model f"
    changes = [
        {"version": 2},
        {"format": "x"},
        {"checksum": 1},
        {"layers": [1, 2]},
        {"layers": 5},
        {"n_visits": [1, 2, -3]},
        {"n_visits": "abc"},
        {"rates": b""},
        {"fingerprint": None},
    ]
    for change in changes:
        path.write_bytes(msgpack.packb({**head, **change}))
        history, why = load_usage(path, "f", LAYERS, 16)
        assert why and history.expected() == {}, change
    for cut in (0, 1, 40, len(data) - 1):
        path.write_bytes(data[:cut])
        assert load_usage(path, "f", LAYERS, 16)[1]
    rng = random.Random(1)
    for _ in range(300):
        broken = bytearray(data)
        broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        load_usage(path, "f", LAYERS, 16)  # whatever it says, it raises nothing
    assert FORMAT.encode() in data


def test_a_place_that_cannot_be_written_is_an_oserror_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        save_usage(tmp_path / "file" / "f", "f", used())
    (tmp_path / "f").mkdir()
    with pytest.raises(OSError):
        save_usage(tmp_path / "f", "f", used())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "file"]
