"""``colibri run``, ``chat`` and ``profile`` as processes, against the gateway with a made-up router."""

from __future__ import annotations

import http.server
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cli.main import main
from cli.profile.collect import Profiler
from shared.errors import ConfigError
from shared.memory.segments import COUNTERS, TRACE, Segment, unlink_run
from shared.run.client import Answer, Client, ServerError
from shared.step.counters import SEGMENT_BYTES, Counters
from shared.step.stages import Stage, StepKind, TraceRing
from shared.wire.endpoints import EXPERT_IO, ROUTER, SERVICES
from tests.support.fake_router import ROOT, FakeRouter, GatewayProcess, await_ready
from tests.support.waiting import wait_for

MS = 1_000_000


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    process = GatewayProcess(tmp_path_factory.mktemp("cli") / "run", run_id="clitest")
    process.wait_url()
    yield process
    process.close()


@pytest.fixture
def router(gateway: GatewayProcess) -> Iterator[FakeRouter]:
    fake = FakeRouter(gateway.endpoints, url=gateway.url)
    await_ready(gateway, fake)
    yield fake
    fake.close()


def colibri(*args: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *args],
        input=stdin,
        capture_output=True,
        cwd=ROOT,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


C_LOCALE = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LATIN = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("env", [{}, C_LOCALE, LATIN], ids=["plain", "c-locale", "latin-1"])
def test_run_writes_the_text_and_nothing_else(gateway: GatewayProcess, router: FakeRouter, env: dict[str, str]) -> None:
    done = colibri("run", "--url", gateway.url, "say 你好, 🙂 né", env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == "你好, 🙂 né\n".encode()


def test_run_reads_standard_input_and_options(gateway: GatewayProcess, router: FakeRouter) -> None:
    done = colibri(
        "run", "--url", gateway.url, "--raw", "--max-tokens", "3", "--temperature", "0", "--seed", "5", "--stop", "z", "--json",
        stdin="say été\n".encode(),
    )  # fmt: skip
    answer = json.loads(done.stdout)
    assert (answer["text"], answer["seed"], answer["finish_reason"]) == ("été", 5, "stop")
    assert answer["usage"]["completion_tokens"] == 3
    submit = router.submits[-1]
    assert (submit.prompt, submit.max_tokens, submit.sampling.temperature, submit.stop) == ("say été", 3, 0.0, ("z",))


def test_run_takes_token_ids(gateway: GatewayProcess, router: FakeRouter) -> None:
    done = colibri("run", "--url", gateway.url, "--ids", "7, 8 9", "--json")
    assert json.loads(done.stdout)["token_ids"] == [105, 100, 115]
    assert router.submits[-1].prompt_ids == (7, 8, 9)
    assert router.submits[-1].ignore_eos
    for args in (
        ["--ids", "7,x"],
        ["--ids", ""],
        ["--ids", "-1"],
        ["--ids", "1", "prompt"],
        ["--ids", "1", "--system", "s"],
    ):
        assert colibri("run", "--url", gateway.url, *args).returncode == 2


def test_run_survives_bytes_that_are_no_text(gateway: GatewayProcess, router: FakeRouter) -> None:
    done = subprocess.run(
        [sys.executable.encode(), b"-m", b"cli.main", b"run", b"--url", gateway.url.encode(), b"say a\xffb"],
        capture_output=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.stdout == "a�b\n".encode()


def test_run_finds_the_group_of_a_run_directory(gateway: GatewayProcess, router: FakeRouter) -> None:
    done = colibri("run", "--run-dir", str(gateway.run_dir), "say found")
    assert (done.stdout, done.returncode) == (b"found\n", 0)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["long"], "the prompt has 200 tokens but the context holds 100"),
        (["say x", "--stop", "y" * 10_000], "stop"),
        (["fail"], "layer 3, expert 17: NaN"),
    ],
)
def test_the_servers_words_reach_the_user(
    gateway: GatewayProcess, router: FakeRouter, args: list[str], words: str
) -> None:
    done = colibri("run", "--url", gateway.url, *args)
    assert done.returncode == 70
    assert words in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_a_server_that_is_not_there() -> None:
    done = colibri("run", "--url", "http://127.0.0.1:9", "x")
    assert done.returncode == 70
    assert b"no answer from the server at http://127.0.0.1:9" in done.stderr
    assert colibri("run", "--url", "ftp://x", "x").returncode == 78


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1",
        "http://127.0.0.1:99999",
        "ftp://127.0.0.1",
        "http://:80",
        "",
        "http://a b",
        "http://..",
        "http://\x1bx",
    ],
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the address of a server"):
        Client(url)


def test_an_address_with_a_name_too_long_for_any_machine() -> None:
    with pytest.raises(ConfigError, match="is not the address of a server"):
        Client(f"http://{'a' * 64}.example")
    assert Client("http://bücher.example:1").url == "http://bücher.example:1"


def test_profile_needs_a_group(tmp_path: Path) -> None:
    done = colibri("profile", "--run-dir", str(tmp_path))
    assert done.returncode == 78
    assert b"no group is running" in done.stderr


def test_chat_through_pipes_keeps_the_conversation(gateway: GatewayProcess, router: FakeRouter) -> None:
    lines = "say 你好\nlong\nsay a\\\nb\n"
    done = colibri(
        "chat", "--url", gateway.url, "--system", "be good", "--seed", "7", stdin=lines.encode(), env=C_LOCALE
    )
    assert done.stdout.decode() == "你好\na\nb\n"
    assert "error: the prompt has 200 tokens" in done.stderr.decode()
    assert histories(router) == [
        ["be good", "say 你好"],
        ["be good", "say 你好", "你好", "long"],
        ["be good", "say 你好", "你好", "say a\nb"],  # the turn that failed left no trace
    ]
    assert router.submits[-1].sampling.seed == 7


def histories(router: FakeRouter) -> list[list[str]]:
    return [[m["content"] for m in json.loads(submit.messages_json or b"")] for submit in router.submits]


def test_a_piped_line_is_text_whatever_it_begins_with(gateway: GatewayProcess, router: FakeRouter) -> None:
    lines = ["/quit", "/system be bad", "/etc/passwd is a file", "//", "/temp 99"]
    done = colibri("chat", "--url", gateway.url, stdin="\n".join(lines).encode())
    assert (done.returncode, done.stderr) == (0, b"")
    assert [history[-1] for history in histories(router)] == lines


def person(*lines: str, args: list[str]) -> subprocess.CompletedProcess[bytes]:
    """``colibri chat`` with a terminal for input, where these lines are typed."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, ("".join(f"{line}\n" for line in lines) + "\x04").encode())
        return subprocess.run(
            [sys.executable, "-m", "cli.main", "chat", *args], stdin=theirs, capture_output=True, cwd=ROOT, timeout=60
        )
    finally:
        os.close(ours)
        os.close(theirs)


def test_commands_are_for_a_person_at_a_terminal(gateway: GatewayProcess, router: FakeRouter) -> None:
    done = person(
        "say a",
        "/seed 7",
        "/reset",
        "/temp 0.5",
        "say c",
        "/nonsense",
        "/quit",
        "say never",
        args=["--url", gateway.url],
    )
    assert done.stdout.decode() == "a\n(forgotten)\nc\n"
    assert "there is no /nonsense" in done.stderr.decode()
    assert histories(router) == [["say a"], ["say c"]]
    assert (router.submits[-1].sampling.seed, router.submits[-1].sampling.temperature) == (7, 0.5)


def test_bad_values_are_refused_where_they_are_typed(gateway: GatewayProcess, router: FakeRouter) -> None:
    bad = [
        "/temp 99",
        "/temp -1",
        "/temp nan",
        "/temp inf",
        "/temp warm",
        "/temp 1,5",
        "/seed 1.5",
        "/seed x",
        f"/seed {1 << 64}",
    ]
    done = person("/temp 0.5", "/seed 3", *bad, "say a", args=["--url", gateway.url])
    assert done.stdout == b"a\n"
    said = done.stderr.decode().splitlines()
    assert len(said) == len(bad)
    assert all(line.startswith(command.split()[0] + ": ") for command, line in zip(bad, said, strict=True))
    assert "0<=x<=2" in said[0] and "Nothing was changed" in said[0]
    assert (router.submits[-1].sampling.seed, router.submits[-1].sampling.temperature) == (3, 0.5)


@pytest.mark.parametrize("command", ["run", "chat", "profile"])
@pytest.mark.parametrize("args", [["--temperature", "99"], ["--temperature", "nan"], ["--seed", str(1 << 64)]])
def test_bad_flags_are_refused_before_a_group_is_started(
    command: str, args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert colibri_here(command, "--run-dir", str(tmp_path / "run"), *args) == 2
    assert args[0] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def colibri_here(*args: str) -> int:
    """The exit code of a command that is refused: within this process, which is faster."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return int(ended.value.code or 0)


def test_the_argument_and_what_is_piped_in_are_joined(gateway: GatewayProcess, router: FakeRouter) -> None:
    done = colibri("run", "--url", gateway.url, "say this:", stdin="un été\r\nlong\n".encode(), env=C_LOCALE)
    assert done.stdout.decode() == "this:\n\nun été\nlong\n"
    assert colibri("run", "--url", gateway.url, "--raw", "-", stdin=b"say it\n").stdout == b"it\n"
    assert colibri("run", "--url", gateway.url, "say alone").stdout == b"alone\n"
    assert colibri("run", "--url", gateway.url, "", stdin=b"\n").returncode == 2
    assert [submit.prompt for submit in router.submits] == [None, "say it", None]


def test_a_closed_input_is_no_traceback(gateway: GatewayProcess, router: FakeRouter) -> None:
    command = f"exec {sys.executable} -m cli.main {{}} --url {gateway.url} {{}} <&-"
    run, chat, empty = (
        subprocess.run(["sh", "-c", command.format(*words)], capture_output=True, cwd=ROOT, timeout=60)
        for words in (("run", "'say x'"), ("chat", ""), ("run", ""))
    )
    assert (run.stdout, run.returncode) == (b"x\n", 0)
    for refused in (chat, empty):
        assert refused.returncode == 2
        assert b"Traceback" not in refused.stderr


def test_an_answer_can_not_steer_the_terminal(gateway: GatewayProcess, router: FakeRouter) -> None:
    text = "say \x1b[31mred\x07\x9b2J\u202egnp.exe\ttab 🙂"
    done = colibri("run", "--url", gateway.url, "--raw", "--json", text.replace("\x00", ""))
    assert json.loads(done.stdout)["text"] == text.removeprefix("say ")
    expected = "\\x1b[31mred\\x07\\x9b2J\\u202egnp.exe\ttab 🙂\n"
    assert colibri("run", "--url", gateway.url, "--raw", text).stdout.decode() == expected
    assert colibri("chat", "--url", gateway.url, stdin=text.encode()).stdout.decode() == expected


class EvilServer(http.server.BaseHTTPRequestHandler):
    """Every answer is an error that tries to clear the screen."""

    def do_POST(self) -> None:
        body = json.dumps({"error": {"message": "no\x1b[2J\x9d0;title\x07", "code": "x"}}).encode()
        self.send_response(400)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("args", [["run", "x"], ["chat"]])
def test_an_error_of_a_server_can_not_steer_the_terminal(args: list[str]) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), EvilServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = colibri(
            *args, "--url", f"http://127.0.0.1:{server.server_port}", stdin=b"hello\n" if args == ["chat"] else b""
        )
    finally:
        server.shutdown()
        server.server_close()
    assert b"no\\x1b[2J\\x9d0;title\\x07" in done.stderr
    assert b"\x1b" not in done.stderr


def test_what_was_typed_can_not_steer_the_terminal_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (
        ["inspect"],
        ["verify"],
        ["plan"],
        ["doctor"],
        ["bench", "store"],
        ["\x1b[2J"],
        ["run", "--ids", "1", "--url"],
    ):
        assert colibri_here(*command, str(tmp_path / "\x1b[2Jx")) in (2, 78)
        said = capsys.readouterr()
        assert "\\x1b[2J" in said.err
        assert "\x1b" not in said.err + said.out


def test_ctrl_c_stops_the_answer_not_the_chat(gateway: GatewayProcess, router: FakeRouter) -> None:
    chat = subprocess.Popen(
        [sys.executable, "-m", "cli.main", "chat", "--url", gateway.url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert chat.stdin is not None
    chat.stdin.write(b"slow " + b"x" * 90 + b"\n")
    chat.stdin.flush()
    wait_for(lambda: router.submits, "the turn", 20)
    time.sleep(0.3)
    chat.send_signal(signal.SIGINT)
    wait_for(lambda: router.aborts, "the abort")
    out, err = chat.communicate(b"say on\n", timeout=30)
    assert out.decode().splitlines()[-1] == "on"
    assert "[stopped]" in out.decode()
    assert err == b""
    history = [message["content"] for message in json.loads(router.submits[-1].messages_json or b"")]
    assert history[1].startswith("x")
    assert len(history[1]) < 90


def test_a_stream_without_end_marker_is_an_error(gateway: GatewayProcess, router: FakeRouter) -> None:
    answer = Answer()
    with pytest.raises(ServerError, match="expert 17"):
        list(Client(gateway.url).stream("/v1/completions", {"prompt": "fail"}, answer))
    assert answer.text == "half "


# ---- profile


@pytest.fixture
def segments(gateway: GatewayProcess) -> Iterator[tuple[TraceRing, Counters]]:
    made = [
        Segment.create("clitest", TRACE, TraceRing.HEAD_BYTES + 64 * 256),
        Segment.create("clitest", COUNTERS, SEGMENT_BYTES),
    ]
    yield TraceRing(made[0].buf), Counters(made[1].buf, EXPERT_IO)
    unlink_run("clitest")


def write_step(ring: TraceRing, kind: StepKind = StepKind.DECODE) -> None:
    now = time.monotonic_ns()
    for service, stage, layer, start, end, n_bytes in (
        (EXPERT_IO, Stage.IO_WAIT, 3, 1, 8, 0),
        (EXPERT_IO, Stage.EXPERT_FFN, 3, 8, 10, 0),
        (ROUTER, Stage.PLAN, -1, 0, 1, 0),
        (ROUTER, Stage.STEP, kind, 0, 10, 1),
    ):
        row = np.zeros(1, ring.dtype)
        row["start_ns"], row["end_ns"], row["stage"], row["layer"] = now + start * MS, now + end * MS, stage, layer
        row["bytes"] = n_bytes
        ring.append(SERVICES.index(service), row)


def test_profiler_sees_its_own_time_span_only(
    gateway: GatewayProcess, router: FakeRouter, segments: tuple[TraceRing, Counters]
) -> None:
    ring, counters = segments
    counters.add("hits", 100)
    write_step(ring)
    with Profiler(gateway.run_dir) as profiler:
        profiler.start()
        for _ in range(200):  # more rows than the ring holds: they must be collected on the way
            write_step(ring)
            time.sleep(0.0015)
        counters.add("hits", 3)
        report = profiler.stop()
    assert report.facts.n_lost == 0
    assert report.all.n_steps == 200
    assert report.facts.counter(EXPERT_IO, "hits") == 3
    with pytest.raises(ConfigError):
        Profiler(gateway.run_dir / "nowhere")


def test_profile_prints_table_json_and_trace(
    gateway: GatewayProcess, router: FakeRouter, segments: tuple[TraceRing, Counters], tmp_path: Path
) -> None:
    ring, _ = segments
    router.on_submit = lambda: write_step(ring)
    trace = tmp_path / "trace.json"
    done = colibri("profile", "--run-dir", str(gateway.run_dir), "--trace", str(trace), "--per-layer", "say hi")
    out = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "expert_io io_wait" in out
    assert "Bottleneck: waiting for experts from storage, 70% of decoding" in out
    assert len(json.loads(trace.read_text())["traceEvents"]) > 4
    done = colibri("profile", "--run-dir", str(gateway.run_dir), "--json", "say hi")
    report = json.loads(done.stdout)
    assert report["n_steps"] == 1
    assert report["difference"] == 0
    assert report["text"] == "hi"
    done = colibri("run", "--run-dir", str(gateway.run_dir), "--profile", "say hi")
    assert done.stdout.startswith(b"hi\n")
    assert b"Bottleneck" in done.stdout
