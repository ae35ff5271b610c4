"""Settings: the file, the flags, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.errors import ConfigError
from shared.run.config import GroupConfig, Settings, freeze, load_frozen, load_settings
from shared.run.sizes import parse_bytes


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_win_over_the_file_and_both_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", 'ram = "3G"\nslots = 20\nport = 9000\n')
    settings = load_settings(path, {"slots": 30, "threads": None})
    assert (settings.ram_bytes, settings.slots, settings.port, settings.threads) == (3 << 30, 30, 9000, 0)
    assert load_settings() == Settings()


def test_unknown_key_names_itself_and_all_settings(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", "slotz = 3\n")
    with pytest.raises(
        ConfigError, match=r"unknown setting 'slotz'; the settings are: .*\bslots\b.*\bram\b|.*\bram\b.*\bslots\b"
    ):
        load_settings(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('kv_dtype = "f16"', ["kv_dtype", "f32, bf16, int8"]),
        ('pilot = "maybe"', ["pilot", "on, off, random"]),
        ('slots = "many"', ["slots"]),
        ("slots = -1", ["slots", "0 to"]),
        ("port = 70000", ["port", "0 to 65,535"]),
        ('draft = "sometimes"', ["draft", "auto, off"]),
        ("draft = 99", ["draft", "0 to 8"]),
        ('ram = "much"', ["ram", "12G"]),
        ("ram = [1]", ["ram"]),
        ("ram = -5", ["ram = -5: allowed are 0 to "]),
        ("heartbeat_s = nan", ["0.05 to 60"]),
        ("port = ", ["not valid TOML"]),
    ],
)
def test_bad_values_name_the_key_and_what_is_allowed(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(write(tmp_path / "c.toml", text + "\n"))
    assert caught.value.exit_code == 78
    for word in words:
        assert word in str(caught.value)


def test_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_settings(tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("12G", 12 << 30),
        ("1.5GiB", 3 << 29),
        ("800m", 800 << 20),
        ("4194304", 4 << 20),
        ("7 B", 7),
        (5 << 20, 5 << 20),
        ("2TB", 2 << 40),
        ("0", 0),
        (0, 0),
        ("24B", 24),
        ("25769803776", 25769803776),
        ("1048576", 1 << 20),
    ],
)
def test_sizes(text: str | int, n_bytes: int) -> None:
    assert parse_bytes(text, "ram") == n_bytes


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("24", "24G"),
        (24, "24G"),
        ("12", "12G"),
        ("1.5", "1.5G"),
        ("8192", "8192M"),
        (4096, "4096M"),
        ("1048575", "1048575M"),
    ],
)
def test_a_small_number_without_a_unit_is_asked_back(text: str | int, meant: str, tmp_path: Path) -> None:
    for take in (
        lambda: parse_bytes(text, "size"),
        lambda: load_settings(None, {"ram": text}),
        lambda: load_settings(write(tmp_path / "c.toml", f"ram = {text!r}\n".replace("'", '"'))),
    ):
        with pytest.raises(ConfigError, match=rf"bytes\? Did you mean {meant}\?"):
            take()


@pytest.mark.parametrize(
    "text", ["", "G", "max", "-5G", "1e3G", "١٢G", "12GG", "12 G B", True, 1.5, None, ["12G"], "nan", "0.1B"]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ConfigError, match=r"^size\b.*12G"):
        parse_bytes(text, "size")  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["9" * 400, "9" * 400 + "T", "1048577T", 1 << 61])
def test_more_than_there_is(text: str | int) -> None:
    with pytest.raises(ConfigError, match="allowed are 0 to 1,152,921,504,606,846,976 bytes"):
        parse_bytes(text, "size")


def test_system_variables_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAM", "PORT", "HOST", "TEMP", "MODEL", "DRAFT"):
        monkeypatch.setenv(name, "/some/folder")
    assert load_settings() == Settings()


def make_config(run_dir: Path) -> GroupConfig:
    return GroupConfig(
        run_id="ab12", run_dir=str(run_dir), model_dir="/m", host="127.0.0.1", port=1, ram_bytes=1, n_slots=2, slot_bytes=3,
        n_threads=1, kv_dtype="f32", prefill_chunk=4, pilot="on", n_drafts=0, max_sequences=1, max_context=64, n_kv_blocks=1,
        n_frames=2, logit_rows=1,
    )  # fmt: skip


def test_frozen_configuration_comes_back_whole_and_private(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    freeze(config, tmp_path / "group.json")
    assert load_frozen(tmp_path / "group.json") == config
    assert (tmp_path / "group.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["group.json"]


def test_frozen_configuration_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "group.json"
    values = msgspec.to_builtins(make_config(tmp_path))
    path.write_bytes(msgspec.json.encode(values | {"new_field": 1}))
    with pytest.raises(ConfigError, match="new_field"):
        load_frozen(path)
    with pytest.raises(ConfigError, match="still running"):
        load_frozen(tmp_path / "absent.json")


def test_default_file_names_every_setting_with_its_default(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "deploy" / "colibri.toml").read_text()
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line]
    path = write(tmp_path / "all.toml", "\n".join(lines))
    assert load_settings(path) == Settings()
    names = {line.split(" = ")[0] for line in lines}
    assert names == {name.replace("ram_bytes", "ram") for name in Settings.__struct_fields__}
