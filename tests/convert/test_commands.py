"""The commands as a user meets them: one sentence instead of a traceback, exit codes, what is printed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conversion.convert import VERSION
from shared.container.reader import Container
from tests.oracle import oracle_dir

Converted = Callable[[str, str], Path]
ROOT = Path(__file__).parents[2]


def colibri(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)


def fails(code: int, *arguments: object) -> str:
    run = colibri(*arguments)
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    return run.stderr


def test_help_is_fast_and_imports_no_numpy() -> None:
    script = (
        "import sys; sys.argv = ['colibri', '--help']; from cli.main import cli; cli.main(standalone_mode=False);"
        "print('numpy' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in ("chat", "run", "convert", "inspect", "verify", "quality", "plan", "profile", "synth"):
        assert f"\n  {name} " in run.stdout
    assert run.stdout.endswith("False\n")


def test_every_command_can_be_loaded() -> None:
    from click.testing import CliRunner

    from cli.main import COMMANDS, cli

    for name in COMMANDS:
        shown = CliRunner().invoke(cli, [name, "--help"])
        assert shown.exit_code == 0, shown.output
        assert f" {name} " in shown.output


def test_unknown_command_and_option() -> None:
    assert "No such command" in fails(2, "convrt")
    assert "--precision" in fails(2, "convert", "a", "b", "--precision", "int3")
    assert "Missing argument" in fails(2, "convert")


def test_convert_prints_the_plan_and_is_repeatable(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = colibri("convert", oracle_dir("glm_moe_dsa_fp8"), out)
    assert run.returncode == 0, run.stderr
    first = run.stdout.splitlines()[0]
    assert first.startswith("plan: glm_moe_dsa, 8 layers + MTP")
    assert "expert q4" in first
    assert "mtp q8" in first
    assert "F8_E4M3" in first
    assert "has no tokenizer.json: requests must give token ids" in run.stdout
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()}
    again = colibri("convert", oracle_dir("glm_moe_dsa_fp8"), out)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert "never overwritten" in fails(78, "convert", oracle_dir("glm_moe_dsa_fp8"), out, "--precision", "int8")
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.iterdir()} == before
    assert "Converter" not in again.stdout
    index = out / "colibri.json"
    index.write_text(index.read_text().replace(f'"version": "{VERSION}"', '"version": "0.1.0"'))
    again = colibri("convert", oracle_dir("glm_moe_dsa_fp8"), out)
    assert again.returncode == 0
    assert f"Converter 0.1.0 made it, this is {VERSION}" in again.stdout


def test_convert_refuses_with_a_sentence(tmp_path: Path) -> None:
    text = fails(78, "convert", tmp_path / "nowhere", tmp_path / "out")
    assert text.startswith("colibri: ")
    assert "does not exist" in text
    assert not (tmp_path / "out").exists()
    source = tmp_path / "in"
    shutil.copytree(oracle_dir("glm_moe_dsa"), source)
    (source / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in fails(78, "convert", source, tmp_path / "out")
    (source / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    assert "mystery" in fails(78, "convert", source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_convert_without_the_mtp_layer(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(oracle_dir("deepseek_v32"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    assert "--no-mtp" in fails(78, "convert", source, tmp_path / "out")
    run = colibri("convert", source, tmp_path / "out", "--no-mtp")
    assert run.returncode == 0, run.stderr
    assert Container.open(tmp_path / "out").spec.n_mtp == 0
    run = colibri("verify", tmp_path / "out", "--against", source)
    assert run.returncode == 0, run.stderr
    assert "is what it was made from" in run.stdout


def test_source_that_is_its_own_output(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(oracle_dir("deepseek_v3"), source)
    assert "another directory" in fails(78, "convert", source, source)


def test_tokenizer_and_template_are_copied_and_code_is_not(tmp_path: Path) -> None:
    source = tmp_path / "in"
    shutil.copytree(oracle_dir("deepseek_v3"), source)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "modeling_deepseek.py",
        "pytorch_model.bin",
    ):
        (source / name).write_text(name)
    run = colibri("convert", source, tmp_path / "out", "--precision", "f32")
    assert run.returncode == 0, run.stderr
    assert "token ids" not in run.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
    } <= names
    assert not names & {"modeling_deepseek.py", "pytorch_model.bin"}
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_inspect(converted: Converted) -> None:
    container = converted("glm_moe_dsa", "int4")
    text = colibri("inspect", container).stdout
    for word in (
        "glm_moe_dsa",
        "8 layers + MTP",
        "12 a layer, 4 chosen",
        "expert q4",
        Container.open(container).fingerprint,
    ):
        assert word in text
    facts = json.loads(colibri("inspect", container, "--json").stdout)
    assert facts["spec"]["hidden"] == 136
    assert facts["records"] == [[12288, 60], [24576, 12]]
    # All tensors of the checkpoint, the MTP layer's included.
    total = sum(1 for _ in facts["precision"])
    assert total == 7
    assert facts["n_parameters"] == 1_811_592
    assert "not a directory" in fails(78, "inspect", container / "nowhere")
    assert "colibri convert" in fails(78, "inspect", oracle_dir("glm_moe_dsa"))


def test_verify(converted: Converted, tmp_path: Path) -> None:
    out = tmp_path / "model"
    shutil.copytree(converted("deepseek_v32", "int8"), out)
    run = colibri("verify", out)
    assert run.returncode == 0
    assert "GB/s" in run.stdout
    assert "all checksums agree" in run.stdout
    container = Container.open(out)
    file = container.experts[3]
    with open(file.path, "r+b") as handle:
        handle.seek(file.offset_of(2) + 100)
        handle.write(b"\xff\xfe\xfd")
    text = fails(70, "verify", out)
    assert "layer 3 expert 2" in text
    assert "1 of " in text


def test_verify_compares_the_fingerprint(converted: Converted, tmp_path: Path) -> None:
    """It stands for the checksums: usage history, mirrors and kept memory are found by it alone."""
    out = tmp_path / "model"
    shutil.copytree(converted("deepseek_v32", "int8"), out)
    fingerprint = Container.open(out).fingerprint
    index = out / "colibri.json"
    index.write_text(index.read_text().replace(fingerprint, fingerprint[::-1]))
    text = fails(70, "verify", out)
    assert f"has fingerprint {fingerprint[::-1]!r}, its checksums give {fingerprint!r}" in text


def test_synth(tmp_path: Path) -> None:
    run = colibri("synth", tmp_path / "m", "--layers", 3, "--mtp", "--precision", "int8", "--seed", 4)
    assert run.returncode == 0, run.stderr
    assert "3 layers + MTP, int8, seed 4" in run.stdout
    container = Container.open(tmp_path / "m")
    assert container.spec.n_mtp == 1
    assert container.converter.arguments["seed"] == "4"
    assert "never overwritten" in fails(78, "synth", tmp_path / "m")


def test_synth_that_does_not_fit(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    layers = free // 5_000_000_000 + 10
    text = fails(78, "synth", tmp_path / "m", "--preset", "glm-5.2", "--layers", layers)
    assert "free" in text
    assert not list((tmp_path / "m").glob("*.safetensors*"))


def test_plan(converted: Converted) -> None:
    container = converted("glm_moe_dsa", "int4")
    run = colibri("plan", container, "--disk", 2, "--memory", 20)
    assert run.returncode == 0, run.stderr
    for word in (
        "dense part",
        "expert slots",
        "sum",
        "budget",
        "left",
        "expected",
        "at best",
        "every expert from the drive",
        "tok/s",
    ):
        assert word in run.stdout
    assert "at least 5 are needed" in fails(78, "plan", container, "--slots", 3)
    text = fails(78, "plan", container, "--ram", "100M")
    assert "missing" in text
    assert "the budget is 100.00 MiB" in text
    assert "800 elephants" in fails(78, "plan", container, "--ram", "800 elephants")
    assert "Did you mean 24G?" in fails(78, "plan", container, "--ram", 24)
    assert "Did you mean 24G?" in fails(78, "plan", container, "--assume", 24)


def test_plan_assumes_the_memory_that_is_asked_for(converted: Converted) -> None:
    container = converted("glm_moe_dsa", "int8")
    run = colibri("plan", container, "--ram", "4000G", "--disk", 2, "--memory", 20)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("note: 4,294,967,296,000 bytes are assumed, in /dev/shm too; now ")
    assert "\n4,294,967,296,000 bytes available (assumed), 4,294,967,296,000 in /dev/shm" in run.stdout
    text = fails(78, "plan", container, "--ram", "24G", "--assume", "16G")
    assert "ram = 24G is more than the 16G to assume" in text


def test_plan_of_a_checkpoint_before_it_is_converted(tmp_path: Path) -> None:
    source = oracle_dir("glm_moe_dsa")
    run = colibri("plan", source, "--precision", "int4")
    assert run.returncode == 0, run.stderr
    assert "expert slots" in run.stdout
    again = colibri("plan", source, "--disk", 2, "--memory", 20)
    assert again.returncode == 0, again.stderr
    assert "as if converted with --precision int4" in again.stdout
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mystery"}))
    assert "'mystery'" in fails(78, "plan", tmp_path)  # whatever the precision


def test_output_that_nobody_reads(converted: Converted) -> None:
    """A closed pipe ends the command quietly."""
    command = [sys.executable, "-m", "cli.main", "inspect", str(converted("glm_moe_dsa", "int4")), "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()


@pytest.mark.parametrize("command", ["inspect", "verify", "plan"])
def test_unreadable_container(converted: Converted, tmp_path: Path, command: str) -> None:
    out = tmp_path / "model"
    shutil.copytree(converted("deepseek_v3", "int4"), out)
    with open(out / "experts-002.safetensors", "r+b") as file:
        file.truncate(4242)
    assert "experts-002.safetensors is truncated" in fails(78, command, out)
