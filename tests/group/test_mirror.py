"""Real groups that read from two copies, and what groups write: to a model's directory nothing, elsewhere only as said."""

from __future__ import annotations

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


def written_bytes(group: Group) -> int:
    """What keeper and services have had written to storage; files in memory do not count.

    colibri-up is left out: its number holds what the commands before it wrote, mount its own books for one.
    """
    total = 0
    for pid in (group.keeper_pid, *(entry["pid"] for entry in group.processes()["services"].values())):
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        total += int(fields["write_bytes"])
    return total


@pytest.fixture
def read_only() -> Callable[[Path], list[str]]:
    """read_only(directory) -> what to put before a command so that it can write neither there nor on the root file system."""

    def prefix(directory: Path) -> list[str]:
        script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && mount -o remount,ro,bind / && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(directory)]

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
    """G7: 100 requests without usage history write no byte outside the run directory; with it, one small file."""
    model = Path(shutil.copytree(converted("deepseek_v3", "int8"), tmp_path / "model"))
    home = elsewhere / "home"
    home.mkdir()
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(home))
    container = Container.open(model)
    n_experts = sum(file.n_experts for file in container.experts.values())
    answers = []
    for history in (False, True):
        group = Group(model, elsewhere / f"run{int(history)}", history=history, slots=24)
        group.argv = [*read_only(model), *group.argv]
        with group:
            answers.append([group.tokens([7, i % 50, 3], 2) for i in range(100 if not history else 10)])
            assert written_bytes(group) == 0
            assert not list(home.rglob("*")), "the usage history is written at most once a minute and at the end"
        files = [path for path in home.rglob("*") if path.is_file()]
        assert len(files) == int(history), files
        assert sum(path.stat().st_size for path in files) <= history * (8 * n_experts + 1000)
        wait_clean(group)
    assert answers[1] == answers[0][:10]
