"""What is refused where it is given: flags of ``colibri-up`` and arguments of ``colibri``, within this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import pytest

from cli import prompt
from cli.main import main
from deploy.up import _check_combination, make_parser
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--status", "--stop"], "--status and --stop ask for different things"),
        (["--daemon", "--stop"], "--daemon and --stop ask for different things"),
        (["--status", "--drop-warm"], "--status and --drop-warm"),
        (["--json"], "--json is the form of --status"),
        (["--keep-warm"], "together with --stop"),
        (["--stop", "--keep-warm", "--drop-warm"], "--keep-warm and --drop-warm"),
        ([""], "MODEL is empty"),
        (["--run-dir", ""], "--run-dir is empty"),
        (["--mirror", "a", "--mirror", ""], "--mirror is empty"),
    ],
)
def test_flags_that_contradict_each_other_start_nothing(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _check_combination(make_parser().parse_args(flags))


@pytest.mark.parametrize("flags", [[], ["--stop", "--drop-warm"], ["--stop", "--keep-warm"], ["--status", "--json"]])
def test_flags_that_go_together(flags: list[str]) -> None:
    _check_combination(make_parser().parse_args(flags))


@pytest.mark.parametrize("flags", [["--frob"], ["a", "b"], ["--port"], ["--st"]])
def test_a_wrong_flag_is_one_sentence(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(flags)
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.err.startswith("colibri-up: ") and len(said.err.splitlines()) == 1
    assert "--help" in said.err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["ram", "12"], 78, "Did you mean 12G?"),
        (["ram", "0"], 78, "more than 0 bytes"),
        (["mirror", "plan", "m", "d", "--size", "12"], 78, "Did you mean 12G?"),
        (["mirror", "stage", "m", "d", "--size", "0"], 78, "more than 0 bytes"),
        (["bench", "decode", "m", "--ram", "12"], 78, "Did you mean 12G?"),
        (["bench", "prefill", "m", "--limit", "8"], 78, "Did you mean 8G?"),
        (["plan", ""], 2, "it is empty"),
        (["inspect", ""], 2, "it is empty"),
        (["inspect", "m", "--mirror", ""], 2, "it is empty"),
        (["ram", "--run-dir", ""], 2, "it is empty"),
        (["run", "--ids", "1", "--model", ""], 2, "it is empty"),
        (["run", "--ids", "1", *(["--stop", "x"] * 5)], 2, "4 times"),
        (["run", "--ids", "1", "--profile", "--url", "u"], 2, "--run-dir instead of --url"),
        (["plan", "a" * 256], 2, "longer than a path may be"),
        (["mirror", "stage", "m", "a/" * 2048], 2, "longer than a path may be"),
        (["profile", "--trace", "a" * 256], 2, "longer than a path may be"),
        (["run", "--ids", "1", "--run-dir", "a" * 256], 2, "longer than a path may be"),
        (["plan", "m", "--disk", "nan"], 2, "not a finite number"),
        (["plan", "m", "--memory", "inf"], 2, "not a finite number"),
        (["mirror", "plan", "m", "d", "--disk", "0"], 2, "--disk"),
        (["profile", "--seconds", "nan"], 2, "not a finite number"),
        (["profile", "--seconds", "1e30"], 2, "--seconds"),
        (["bench"], 2, "Commands:"),
        (["nonsense"], 2, "No such command"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_opened(
    args: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(*args) == code
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_result_that_could_not_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, words in ((tmp_path / "no" / "x", "does not exist"), (tmp_path, "is a directory")):
        assert exit_code("profile", "--trace", str(path)) == 2
        assert words in capsys.readouterr().err
    assert exit_code("cache-sim", str(tmp_path / "t"), "--plot", str(tmp_path / "no" / "x.svg")) == 2


def exit_code(*args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    return int(ended.value.code or 0)


def test_input_that_does_not_end_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    said: list[str] = []

    def complain(text: str) -> None:
        said.append(text)
        os.write(writing, b"late\n")
        os.close(writing)

    monkeypatch.setattr(prompt, "PATIENCE_S", 0.05)
    monkeypatch.setattr(prompt, "complain", complain)
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert prompt.read_prompt("say") == "say\n\nlate"
    assert "waiting for text on standard input (add </dev/null" in said[0]


def test_input_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/zero") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(click.UsageError, match="has more than"):
            prompt.read_prompt("say")
