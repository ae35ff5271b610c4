"""Converting while fetching: the bytes are those of a conversion of the downloaded checkpoint, whatever happens on the way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conversion.fetching import FetchPlan, HubConversion, Listeners, begun_commit
from conversion.hub import Hub, HubName
from shared.container.reader import Container
from shared.errors import CapacityError, ColibriError, ContainerError, DownloadError
from tests.oracle import oracle_config, oracle_dir, read_tensors, write_checkpoint
from tests.support.hub_server import COMMIT, REPO, TOKEN, Fault, HubServer

Converted = Callable[[str, str], Path]
NAME, PRECISION = "glm_moe_dsa", "int4"
ROOT = Path(__file__).parents[2]
N_SHARDS = 7
SHARDS = [f"model-{i + 1:05d}-of-{N_SHARDS:05d}.safetensors" for i in range(N_SHARDS)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's tensors in seven shards by their names' order: experts lie across borders, as they do in large models."""
    tensors = sorted(read_tensors(oracle_dir(NAME)).items())
    per_shard = -(-len(tensors) // N_SHARDS)
    shards = {name: dict(tensors[i * per_shard : (i + 1) * per_shard]) for i, name in enumerate(SHARDS)}
    made = write_checkpoint(tmp_path_factory.mktemp("hub") / "repository", oracle_config(NAME), shards)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(oracle_dir(NAME) / name, made)
    (made / "modeling_tiny.py").write_text("raise SystemExit")
    (made / "original").mkdir()
    (made / "original" / "consolidated.safetensors").write_bytes(b"something else")
    return made


@pytest.fixture
def hub(repository: Path) -> Iterator[HubServer]:
    with HubServer(repository) as server:
        yield server


def fetch(
    hub: HubServer, out: Path, name: str = f"hf:{REPO}", plans: list[FetchPlan] | None = None, made: object = None
) -> None:
    """The conversion as the command does it, without waits that a person would want."""
    parsed = HubName.of(name)
    with HubConversion(Hub.open(parsed, begun_commit(out, parsed), hub.endpoint, (0.0, 0.0)), PRECISION) as conversion:

        def start(plan: FetchPlan, _kept: int) -> Listeners:
            if plans is not None:
                plans.append(plan)
            return Listeners(made=made) if callable(made) else Listeners()

        conversion.run(out, start)


def assert_same(out: Path, reference: Path) -> None:
    names = sorted(path.name for path in reference.iterdir())
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name


def test_the_container_is_that_of_the_downloaded_checkpoint(
    hub: HubServer, converted: Converted, tmp_path: Path
) -> None:
    plans: list[FetchPlan] = []
    most = 0

    def watch(_: int) -> None:
        nonlocal most
        lying = 0
        for path in (tmp_path / "out" / ".unfinished" / "shards").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the fetching thread renames what is whole, and deletes
                lying += path.stat().st_size
        most = max(most, lying)

    fetch(hub, tmp_path / "out", plans=plans, made=watch)
    assert_same(tmp_path / "out", converted(NAME, PRECISION))
    for shard in SHARDS:
        assert hub.fetched(shard) == (hub.directory / shard).stat().st_size, "once, and whole"
    assert not any(sent.file.startswith(("modeling", "original")) for sent in hub.log)
    assert plans[0].order == SHARDS
    assert most <= plans[0].window_bytes < plans[0].n_bytes / 2


class Interrupted(Exception):
    pass


def test_interrupted_again_and_again(hub: HubServer, converted: Converted, tmp_path: Path) -> None:
    """What is converted is never fetched again."""
    out = tmp_path / "out"
    plans: list[FetchPlan] = []
    for _ in range(20):
        left, before = 60, len(hub.log)

        def made(_: int) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise Interrupted

        try:
            fetch(hub, out, plans=plans, made=made)
        except Interrupted:
            assert not (out / "colibri.json").exists()
        fetched = {sent.file for sent in hub.log[before:] if sent.is_to_the_end and sent.file in SHARDS}
        assert fetched <= set(plans[-1].order)
        if (out / "colibri.json").exists():
            break
    assert_same(out, converted(NAME, PRECISION))
    assert [plan.order[0] for plan in plans] == sorted(plan.order[0] for plan in plans)
    assert len(plans) > 3 and len(plans[-1].order) < len(plans[0].order) / 2


def command(hub: HubServer, *words: object, **environment: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(hub.directory.parent / "home"), **environment}
    return subprocess.Popen(
        [sys.executable, "-m", "cli.main", *map(str, words)],
        cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_the_command_killed_while_it_fetches(hub: HubServer, converted: Converted, tmp_path: Path) -> None:
    """kill -9 after so many bytes of shards have left the server; finished shards are not asked for again."""
    out = tmp_path / "out"
    total = sum((hub.directory / shard).stat().st_size for shard in SHARDS)
    sent_before, before = 0, 0
    for share in (0.35, 0.4):
        n_headers = sum(min(131072, (hub.directory / shard).stat().st_size) for shard in SHARDS)
        limit = before + n_headers + int(share * total)
        process = command(hub, "convert", f"hf:{REPO}", out, "--precision", PRECISION)
        hub.on_bytes = lambda sent, limit=limit, process=process: process.kill() if sent >= limit else None
        assert said(process)[0] == -signal.SIGKILL
        before = sum(sent.n_bytes for sent in hub.log if sent.file in SHARDS)
        assert before > sent_before
    hub.on_bytes = lambda _: None
    code, printed, err = said(command(hub, "convert", f"hf:{REPO}", out, "--precision", PRECISION))
    assert code == 0, err
    assert f"at commit {COMMIT}" in printed and "to be fetched: " in printed and "wrote " in printed
    assert_same(out, converted(NAME, PRECISION))
    code, printed, err = said(command(hub, "convert", f"hf:{REPO}", out, "--precision", PRECISION))
    assert code == 0 and "nothing to do" in printed


def test_a_connection_that_ends_in_mid_shard(hub: HubServer, converted: Converted, tmp_path: Path) -> None:
    size = (hub.directory / SHARDS[2]).stat().st_size
    hub.faults = {
        (SHARDS[2], 1): Fault(cut=size // 3),
        (SHARDS[2], 2): Fault(status=503),
        (SHARDS[2], 3): Fault(cut=1000),
    }
    fetch(hub, tmp_path / "out")
    assert_same(tmp_path / "out", converted(NAME, PRECISION))
    starts = [sent.start for sent in hub.log if sent.file == SHARDS[2]][1:]
    assert starts == [0, size // 3, size // 3 + 1000]
    assert hub.fetched(SHARDS[2]) == size


def test_a_server_that_breaks_off_for_good(hub: HubServer, converted: Converted, tmp_path: Path) -> None:
    """What came is kept; the same command goes on when the server is well again."""
    hub.faults = {(SHARDS[3], 1): Fault(cut=5000)}
    hub.always = {SHARDS[3]: Fault(status=502)}
    hub.faults |= {(SHARDS[3], 0): Fault(cut=1 << 30)}
    with pytest.raises(DownloadError, match=r"3 tries in a row brought nothing: status 502\. .* same command"):
        fetch(hub, tmp_path / "out")
    with pytest.raises(ContainerError, match="unfinished"):
        Container.open(tmp_path / "out")
    hub.always, hub.faults = {}, {}
    before = len(hub.log)
    fetch(hub, tmp_path / "out")
    assert_same(tmp_path / "out", converted(NAME, PRECISION))
    later = [sent for sent in hub.log[before:] if sent.file in SHARDS]
    assert [sent.start for sent in later if sent.file == SHARDS[3]] == [0, 5000]
    size = (hub.directory / SHARDS[0]).stat().st_size
    assert sum(sent.n_bytes for sent in later if sent.file == SHARDS[0]) <= min(131072, size), "its header alone"


def test_a_wrong_checksum(hub: HubServer, converted: Converted, tmp_path: Path) -> None:
    """Once: fetched again. Always: nothing is made from it."""
    hub.faults = {(SHARDS[1], 1): Fault(flip=True)}
    fetch(hub, tmp_path / "a")
    assert_same(tmp_path / "a", converted(NAME, PRECISION))
    hub.faults |= {(SHARDS[4], n): Fault(flip=True) for n in range(2, 9)}
    with pytest.raises(DownloadError, match=rf"{SHARDS[4]}: the bytes that came have the checksum .* the hub promises"):
        fetch(hub, tmp_path / "b")
    assert not (tmp_path / "b" / "colibri.json").exists()
    hub.always = {"config.json": Fault(flip=True)}
    with pytest.raises(DownloadError, match=r"config\.json: the bytes that came have the checksum git:"):
        fetch(hub, tmp_path / "c")


def test_leftovers_that_a_power_cut_has_torn(hub: HubServer, converted: Converted, tmp_path: Path) -> None:
    """A shard on the disk counts when its checksum does."""
    out = tmp_path / "out"
    hub.always = {SHARDS[2]: Fault(cut=0)}
    hub.faults = {(SHARDS[2], 0): Fault(cut=1 << 30)}
    with pytest.raises(DownloadError):
        fetch(hub, out)
    hub.always = {}
    shards = out / ".unfinished" / "shards"
    (shards / SHARDS[2]).write_bytes(bytes((hub.directory / SHARDS[2]).stat().st_size))
    (shards / "model-00099-of-00099.safetensors").write_bytes(b"of another time")
    fetch(hub, out)
    assert_same(out, converted(NAME, PRECISION))


def test_a_revision_that_moved(repository: Path, converted: Converted, tmp_path: Path) -> None:
    """Half of a container is never made from another commit than the other half."""
    out = tmp_path / "out"
    with HubServer(repository, always={SHARDS[3]: Fault(status=500)}) as hub:
        hub.faults = {(SHARDS[3], 0): Fault(cut=1 << 30)}
        with pytest.raises(DownloadError):
            fetch(hub, out)
    moved = "deadbeef" * 5
    with HubServer(repository, commit=moved) as hub:  # the old commit is gone
        with pytest.raises(ContainerError, match=f"no revision {COMMIT}"):
            fetch(hub, out)
        with (
            HubConversion(Hub.open(HubName.of(f"hf:{REPO}"), "", hub.endpoint, ()), PRECISION) as conversion,
            pytest.raises(ContainerError, match=rf"other arguments or another source .*commit: '{COMMIT}' then"),
        ):
            conversion.run(out, lambda *_: Listeners())
    with HubServer(repository) as hub:
        with pytest.raises(ContainerError, match="another source"):
            fetch(hub, out, f"hf:{REPO}@v1")
        fetch(hub, out)
    assert_same(out, converted(NAME, PRECISION))


@pytest.mark.parametrize(
    ("refusals", "sentence"),
    [
        ({"/api": Fault(401, "RepoNotFound")}, r"has no model birds/tiny, or shows it to others only\. .* HF_TOKEN"),
        ({"/api": Fault(404, "RepoNotFound")}, r"has no model birds/tiny"),
        ({f"/{REPO}": Fault(403, "GatedRepo")}, r"is gated: .* accepted first.* at http://.*/birds/tiny"),
        ({f"/{REPO}": Fault(403)}, r"refuses .* with status 403\. Log in"),
        ({f"/{REPO}": Fault(404, "EntryNotFound")}, r"lists .* does not have it"),
        ({"/api": Fault(500)}, r"3 tries in a row brought nothing: status 500"),
        ({f"/{REPO}": Fault(429)}, r"3 tries in a row brought nothing: status 429"),
        ({f"/{REPO}": Fault(418)}, r"refuses .* with status 418\."),
    ],
)
def test_refusals(hub: HubServer, tmp_path: Path, refusals: dict[str, Fault], sentence: str) -> None:
    hub.refusals = refusals
    with pytest.raises(ColibriError, match=sentence) as caught:
        fetch(hub, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_nobody_listens(repository: Path, tmp_path: Path) -> None:
    with HubServer(repository) as hub:
        pass
    hub.move_away()
    with pytest.raises(DownloadError, match=r"tries in a row brought nothing: .*refused"):
        fetch(hub, tmp_path / "out")


def test_names_and_revisions(hub: HubServer, tmp_path: Path) -> None:
    with pytest.raises(ContainerError, match="no revision v7 of birds/tiny"):
        fetch(hub, tmp_path / "out", f"hf:{REPO}@v7")
    assert HubName.of("hf:a/b@refs/pr/1") == HubName("a/b", "refs/pr/1")
    assert HubName.of("hf://a/b") == HubName("a/b")
    for text in ("hf:", "hf:a b/c", "hf:a/b/c", "hf:a/b@"):
        with pytest.raises(ContainerError, match="names no model"):
            HubName.of(text)


def test_the_command_refuses_with_a_sentence(hub: HubServer, tmp_path: Path) -> None:
    """And a token goes along when there is one."""
    hub.needs_token = True
    code, _, err = said(command(hub, "convert", f"hf:{REPO}", tmp_path / "out"))
    assert code == 78 and err.startswith("colibri: ") and "HF_TOKEN" in err and "Traceback" not in err
    code, printed, err = said(command(hub, "estimate", f"hf:{REPO}", "--disk", 2, "--memory", 20, HF_TOKEN=TOKEN))
    assert code == 0, err
    for word in ("int4", "int8", "bf16", "f32", "tok/s", COMMIT, "7 files"):
        assert word in printed
    assert all(hub.fetched(shard) == 0 for shard in SHARDS)


def test_a_server_that_knows_no_ranges_and_one_that_lists_names_alone(
    hub: HubServer, converted: Converted, tmp_path: Path
) -> None:
    hub.knows_ranges = False
    hub.faults = {(SHARDS[5], 1): Fault(cut=3000)}
    fetch(hub, tmp_path / "a")
    assert_same(tmp_path / "a", converted(NAME, PRECISION))
    hub.knows_ranges, hub.has_sizes = True, False
    fetch(hub, tmp_path / "b")
    assert_same(tmp_path / "b", converted(NAME, PRECISION))
    hub.has_sizes, hub.has_checksums = True, False
    with HubConversion(Hub.open(HubName.of(f"hf:{REPO}"), "", hub.endpoint), PRECISION) as conversion:
        assert conversion.without_checksum == SHARDS


def test_a_slow_server(hub: HubServer, converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow is waited for; silent is asked again, where it was."""
    hub.faults = {(SHARDS[1], 1): Fault(drop_s=0.003)}
    fetch(hub, tmp_path / "a")
    assert_same(tmp_path / "a", converted(NAME, PRECISION))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.faults = {(SHARDS[1], 3): Fault(drop_s=1.0)}
    fetch(hub, tmp_path / "b")
    assert_same(tmp_path / "b", converted(NAME, PRECISION))
    hub.always = {SHARDS[1]: Fault(drop_s=1.0)}
    with pytest.raises(DownloadError, match="3 tries in a row brought nothing: the server does not answer in time"):
        fetch(hub, tmp_path / "c")


def test_large_files_from_another_server(
    hub: HubServer, converted: Converted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token is for the hub alone."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with HubServer(hub.directory) as storage:
        hub.needs_token, hub.redirect_to = True, storage.endpoint.replace("127.0.0.1", "localhost")
        storage.faults = {(SHARDS[2], 1): Fault(cut=70_000)}
        fetch(hub, tmp_path / "out")
        assert hub.authorizations == {f"Bearer {TOKEN}"} and storage.authorizations == {""}
        assert [sent.start for sent in storage.log if sent.file == SHARDS[2]] == [0, 0, 70_000]
    assert_same(tmp_path / "out", converted(NAME, PRECISION))


def test_room_for_the_window(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused beforehand where it does not fit; where only fetching ahead does not, it is left."""
    with HubConversion(Hub.open(HubName.of(f"hf:{REPO}"), "", hub.endpoint), PRECISION) as conversion:
        window = conversion.window_bytes()
        total = conversion.conversion.plan.dense_bytes + conversion.conversion.plan.expert_bytes
        real = os.statvfs

        class Small:
            def __init__(self, free: int) -> None:
                self.f_bavail, self.f_frsize = free, 1

        room = (1 << 20) + 16 * 4096 + 300 * 200
        plans: list[FetchPlan] = []

        def run(out: Path, free: int) -> None:
            def start(plan: FetchPlan, _: int) -> Listeners:
                plans.append(plan)
                raise Interrupted

            monkeypatch.setattr(os, "statvfs", lambda path: Small(free))
            try:
                conversion.run(out, start)
            except Interrupted:
                pass
            finally:
                monkeypatch.setattr(os, "statvfs", real)

        run(tmp_path / "a", total + room + window)
        run(tmp_path / "b", total + room + window * 9 // 10)
        assert [plan.n_ahead for plan in plans] == [1, 0]
        with pytest.raises(CapacityError, match=r"more bytes .* for shards of the checkpoint that are being converted"):
            run(tmp_path / "c", total)
    assert all(hub.fetched(shard) == 0 for shard in SHARDS)


def test_what_can_not_be_converted_is_said_before_a_shard_is_fetched(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(repository, copy)
    (copy / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    with HubServer(copy) as hub:
        with pytest.raises(ColibriError, match="'mystery'"):
            fetch(hub, tmp_path / "out")
        shutil.copy(repository / "config.json", copy)
        (copy / SHARDS[6]).unlink()
        with pytest.raises(ContainerError, match=rf"hf:{REPO} has no file {SHARDS[6]}"):
            fetch(hub, tmp_path / "out")
        (copy / SHARDS[6]).write_bytes(b"no shard at all")
        with pytest.raises(ContainerError, match=rf"hf:{REPO}/{SHARDS[6]} is truncated or no safetensors"):
            fetch(hub, tmp_path / "out")
        assert not any(hub.fetched(shard) for shard in SHARDS[:6])
        (copy / "config.json").unlink()
        with pytest.raises(ContainerError, match=r"has no config\.json: it is no checkpoint"):
            fetch(hub, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copies_of_the_embedding_are_compared_when_they_are_there(tmp_path: Path) -> None:
    """The MTP layer's lies in the last shard. A model whose copy differs is refused before its experts are fetched."""
    tensors = read_tensors(oracle_dir("deepseek_v3"))
    config = oracle_config("deepseek_v3")
    embedding = tensors["model.embed_tokens.weight"]
    last = config["num_hidden_layers"]
    copy = f"model.layers.{last}.embed_tokens.weight"
    assert copy in tensors, "the oracle has an MTP layer with a copy"
    for is_equal in (True, False):
        names = sorted(tensors)
        data = bytearray(embedding[2])
        data[-1] ^= 0 if is_equal else 1
        changed = {**tensors, copy: (embedding[0], embedding[1], bytes(data))}
        parts = {f"model-0000{i + 1}-of-00004.safetensors": {n: changed[n] for n in names[i::4]} for i in range(4)}
        source = write_checkpoint(tmp_path / f"in-{is_equal}", config, parts)
        with HubServer(source) as hub:
            out = tmp_path / f"out-{is_equal}"
            if is_equal:
                fetch(hub, out)
                assert (out / "colibri.json").exists()
                continue
            with pytest.raises(ContainerError, match="differs from"):
                fetch(hub, out)


def test_estimate_of_a_directory(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "cli.main", "estimate", str(oracle_dir(NAME)), "--at", str(tmp_path), "--memory", "20"],
        cwd=ROOT, check=False, capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "3 files, 3,664,352 bytes" in run.stdout and "give --disk" in run.stdout
    assert "huggingface_hub" not in run.stderr
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".colibri")] == []
