"""Real groups that read from two copies, and what groups write: to a model's directory nothing, elsewhere only as said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.main import cli
from shared.container.reader import Container
from shared.memory.segments import COUNTERS, Segment
from shared.step.counters import read_all
from tests.group.harness import Group, run_up, wait_clean
from tests.support.ring import Ring

pytestmark = pytest.mark.group

PROMPT = [3, 14, 15, 92, 65, 35]


def counters_of(group: Group) -> dict[str, int]:
    segment = Segment.attach(group.run_id, COUNTERS)
    try:
        return read_all(segment.buf)["expert_io"]
    finally:
        segment.close()


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A directory on another file system than the tests' own, where there is one."""
    base = Path(tempfile.mkdtemp(prefix="cbt-", dir="/dev/shm"))
    yield base
    shutil.rmtree(base, ignore_errors=True)


def test_a_mirror_that_is_damaged_and_then_deleted_changes_no_word(
    converted: Callable[[str, str], Path], start_group: Callable[..., Group], elsewhere: Path
) -> None:
    model, mirror = converted("glm_moe_dsa", "int8"), elsewhere / "mirror"
    with Ring(model, elsewhere, kv_dtype="bf16") as ring:
        first = ring.generate(PROMPT, 24).tokens
    refused = run_up(str(model), "--mirror", str(mirror), "--port", "0", "--run-dir", str(elsewhere / "run"))
    assert refused.returncode == 78 and "is its drive mounted" in refused.stderr

    assert CliRunner().invoke(cli, ["mirror", "stage", str(model), str(mirror)]).exit_code == 0
    for file in Container.open(model).experts.values():
        with (mirror / file.name).open("r+b") as out:
            for expert in range(0, file.n_experts, 2):
                out.seek(file.offset_of(expert) + 64)
                out.write(b"\x5a\xa5" * 32)
    group = start_group(model, slots=12, draft="off", mirror=mirror)
    assert f"experts also from {mirror}: 2 drives" in group.said
    assert group.tokens(PROMPT, 24) == first
    found = counters_of(group)
    assert found["copies_damaged"] == found["copy_faults"] > 0 and found["read_errors"] == 0
    log = (group.run_dir / "log" / "expert_io.log").read_text()
    assert log.count("copy_damaged") <= len(Container.open(model).experts) and f"path={mirror}/experts-" in log
    shutil.rmtree(mirror)
    assert group.tokens(PROMPT, 24) == first
    group.kill("expert_io")
    group.wait_ready()
    assert group.tokens(PROMPT, 24) == first, "the next expert_io does without"
    assert "mirror_left_out" in (group.run_dir / "log" / "expert_io.log").read_text()
    assert group.stop() == 0


IN_MEMORY = {
    *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
    *(
        "fusectl",
        "hugetlbfs",
        "mqueue",
        "nsfs",
        "proc",
        "pstore",
        "ramfs",
        "rpc_pipefs",
        "securityfs",
        "sysfs",
        "tmpfs",
    ),
    "tracefs",
}
"""File systems that lie on no storage."""


def pids_of(group: Group) -> list[int]:
    return [group.keeper_pid, *(entry["pid"] for entry in group.processes()["services"].values())]


def writable_storage(pid: int) -> list[str]:
    """Where a process could write to storage: mount points, each as it is seen (the last mount there)."""
    seen: dict[str, tuple[str, str]] = {}
    for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        fields = mount.split()
        seen[fields[4]] = kind.split()[0], fields[5]
    return [
        point for point, (kind, options) in seen.items() if kind not in IN_MEMORY and "ro" not in options.split(",")
    ]


def open_for_writing(pid: int) -> list[Path]:
    """Files that a process has open for writing."""
    found = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target, info = fd.readlink(), Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text()
        except OSError:
            continue  # closed meanwhile
        flags = int(re.findall(r"^flags:\s+([0-7]+)", info, re.MULTILINE)[0], 8)
        if target.is_absolute() and flags & os.O_ACCMODE != os.O_RDONLY:
            found.append(target)
    return found


@pytest.fixture
def read_only() -> Callable[[Path], list[str]]:
    """read_only(directory) -> what to put before a command so that it can write neither there nor to any storage."""

    def prefix(directory: Path) -> list[str]:
        script = (
            'mount --bind "$0" "$0" && while read -r _ point kind _; do case " $1 " in *" $kind "*) ;; '
            '*) mount -o remount,ro,bind "$(printf %b "$point")" ;; esac; done < /proc/self/mounts; shift; exec "$@"'
        )
        return ["unshare", "--mount", "sh", "-c", script, str(directory), " ".join(sorted(IN_MEMORY))]

    try:
        tried = subprocess.run([*prefix(Path("/usr")), "touch", "/usr/x"], capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no unshare: {error}")
    if "Read-only" not in tried.stderr:
        pytest.skip(f"mounting is not allowed here: {tried.stderr}")
    return prefix


def test_read_only_means_read_only(
    converted: Callable[[str, str], Path], read_only: Callable[[Path], list[str]], elsewhere: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """G7: 100 requests without usage history write no byte outside the run directory; with it, one small file.

    Storage is mounted so that nobody in the group can write to it, and nobody tries: what the kernel counts as written by a
    process (``/proc/PID/io``) would include what it had to write of others, to read or to get memory.
    """
    model = Path(shutil.copytree(converted("deepseek_v3", "int8"), tmp_path / "model"))
    home = elsewhere / "home"
    home.mkdir()
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(home))
    container = Container.open(model)
    n_experts = sum(file.n_experts for file in container.experts.values())
    with (tmp_path / "mine").open("w"):
        assert tmp_path / "mine" in open_for_writing(os.getpid()), "it would be seen"
    answers = []
    for history in (False, True):
        group = Group(model, elsewhere / f"run{int(history)}", history=history, slots=24)
        group.argv = [*read_only(model), *group.argv]
        with group:
            answers.append([group.tokens([7, i % 50, 3], 2) for i in range(100 if not history else 10)])
            for pid in pids_of(group):
                assert writable_storage(pid) == []
                for path in open_for_writing(pid):
                    assert path.is_relative_to(group.run_dir) or path.is_relative_to("/dev"), path
            logs = "".join(path.read_text() for path in (group.run_dir / "log").iterdir())
            assert "Read-only file system" not in logs + group.said, "and nobody has tried to"
            assert not list(home.rglob("*")), "the usage history is written at most once a minute and at the end"
        files = [path for path in home.rglob("*") if path.is_file()]
        assert len(files) == int(history), files
        assert sum(path.stat().st_size for path in files) <= history * (8 * n_experts + 1000)
        wait_clean(group)
    assert answers[1] == answers[0][:10]
