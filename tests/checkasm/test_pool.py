"""The thread pool: every item once, no work lost, no busy idling, callers queue."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from native.kernels import linear, rmsnorm
from native.library import NativeError, Pool, default_threads, quota_cpus
from native.matrix import ACT_Q8
from tests.checkasm.kit import activations, assert_same, random_matrix


def test_default_is_the_cores_this_process_may_use() -> None:
    code = "from native.library import Pool; print(Pool().n_threads)"
    one = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}]); " + code
    done = subprocess.run([sys.executable, "-c", one], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
    with Pool() as pool:
        assert pool.n_threads == default_threads()
        assert 1 <= pool.n_threads <= len(os.sched_getaffinity(0))


GROUPS = {
    "none": ({}, "0::/a/b\n", 0),
    "own": ({"a/b/cpu.max": "150000 100000"}, "0::/a/b\n", 2),
    "a group above": ({"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b\n", 1),
    "the smallest counts": ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "700000 100000"}, "0::/a/b\n", 3),
    "the root of a namespace": ({"cpu.max": "50000 100000"}, "0::/\n", 1),
    "another group's": ({"c/cpu.max": "100000 100000"}, "0::/a/b\n", 0),
    "version 1": (
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
        "5:memory:/x\n4:cpu,cpuacct:/a\n0::/\n",
        3,
    ),
    "version 1 without a limit": (
        {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, "4:cpuacct,cpu:/a\n", 0,
    ),
    "cpuset is not cpu": ({"cpuset/a/cpu.cfs_quota_us": "100000", "cpuset/a/cpu.cfs_period_us": "100000"}, "2:cpuset:/a\n", 0),
    "nonsense": ({"a/b/cpu.max": "\n"}, "what\n0:\n0::/a/b\n", 0),
}  # fmt: skip


@pytest.mark.parametrize(("files", "membership", "granted"), GROUPS.values(), ids=GROUPS.keys())
def test_quota_of_control_groups(files: dict[str, str], membership: str, granted: int, tmp_path: Path) -> None:
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "cgroup").write_text(membership)
    assert quota_cpus(tmp_path / "cgroup", tmp_path / "fs") == granted
    assert quota_cpus(tmp_path / "absent", tmp_path / "fs") == 0


def test_one_thread_means_no_workers() -> None:
    before = len(os.listdir("/proc/self/task"))
    with Pool(1):
        assert len(os.listdir("/proc/self/task")) == before
    with Pool(3):
        assert len(os.listdir("/proc/self/task")) == before + 2
    assert len(os.listdir("/proc/self/task")) == before


def test_impossible_counts_are_refused() -> None:
    for n in (-1, 257):
        with pytest.raises(NativeError, match=r"0\.\.256"):
            Pool(n)


def test_closing_twice_is_fine() -> None:
    pool = Pool(2)
    pool.close()
    pool.close()
    with pytest.raises(NativeError, match="cb_rmsnorm"):
        rmsnorm(pool, np.ones((1, 16), np.float32), np.ones(16, np.float32), 1e-6, np.ones((1, 16), np.float32))


@pytest.mark.parametrize("n_threads", [2, 5])
def test_many_short_jobs_lose_nothing(n_threads: int) -> None:
    """Thousands of jobs of a few microseconds, more threads than cores: late workers meet closed doors."""
    rng = np.random.default_rng(1)
    packed = random_matrix(rng, "q8", ACT_Q8, 640, 64)
    x = activations(rng, 4, 64)
    want, out = np.zeros((4, 640), np.float32), np.zeros((4, 640), np.float32)
    with Pool(1) as single:
        linear(single, packed.matrix, x, want)
    m = packed.matrix
    with Pool(n_threads) as pool:
        for _ in range(3000):
            out[:] = np.nan
            linear(pool, m, x, out)
            assert (out == want).all()


def test_callers_queue() -> None:
    """Two Python threads on one pool: each gets its own result."""
    rng = np.random.default_rng(2)
    packed = [random_matrix(rng, "q4", ACT_Q8, 320, 256) for _ in range(2)]
    x = activations(rng, 3, 256)
    failures: list[str] = []
    with Pool(2) as pool:
        want = [np.zeros((3, 320), np.float32) for _ in packed]
        for p, w in zip(packed, want):
            linear(pool, p.matrix, x, w)

        def repeat(i: int) -> None:
            m, out = packed[i].matrix, np.zeros((3, 320), np.float32)
            for _ in range(500):
                out[:] = np.nan
                linear(pool, m, x, out)
                if not (out == want[i]).all():
                    failures.append(f"caller {i}")

        threads = [threading.Thread(target=repeat, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_scratch_grows_and_is_reused() -> None:
    """Large calls between small ones; memory does not grow with the number of calls."""
    rng = np.random.default_rng(3)
    packed = random_matrix(rng, "q8", ACT_Q8, 16, 4096)
    sizes = [1, 600, 3, 1500, 1, 600]
    with Pool(2) as pool:
        whole = np.zeros((1500, 16), np.float32)
        x = activations(rng, 1500, 4096)
        linear(pool, packed.matrix, x, whole)
        resident = []
        for _ in range(5):
            for n in sizes:
                out = np.zeros((n, 16), np.float32)
                linear(pool, packed.matrix, x[:n], out)
                assert_same(out, whole[:n], f"{n} rows")
            resident.append(int(Path("/proc/self/statm").read_text().split()[1]))
        assert resident[-1] - resident[1] < 512, f"resident pages grew: {resident}"


def test_idle_workers_sleep() -> None:
    with Pool(4) as pool:
        x = np.ones((64, 64), np.float32)
        rmsnorm(pool, x, np.ones(64, np.float32), 1e-6, x)
        begin = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - begin < 0.05
