"""Everything follows from one declaration: flags, help, template, checks and their sentences."""

from __future__ import annotations

import argparse
import tomllib
from typing import Annotated, Literal

import pytest

from shared.errors import ConfigError
from shared.run.config import GroupConfig, Passed, Settings, passed_on
from shared.run.settings import Setting, add_flags, checked, declared, template


class More(Settings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The worked example: a further setting of each kind is one line, and nothing else knows it."""

    shade: Annotated[Literal["dark", "light"], Setting("which shade, 100 % of it")] = "dark"
    limit: Annotated[Literal["off"] | int, Setting("how many", low=1, high=9)] = "off"
    pace_s: Annotated[float, Setting("seconds between steps", low=0.5, high=10)] = 1.5
    quiet: Annotated[bool, Setting("say nothing")] = False
    cache_bytes: Annotated[int, Setting("room for the cache", is_size=True, metavar="SIZE")] = 0
    place: Annotated[tuple[str, ...], Setting("a directory; repeatable", metavar="DIR")] = ()


def flags(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser.add_argument, declared(More))
    return vars(parser.parse_args(argv))


def test_a_new_setting_is_a_flag_with_help_a_template_line_and_a_check() -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_flags(parser.add_argument, declared(More))
    help_text = " ".join(parser.format_help().split())
    assert "--shade dark|light which shade, 100 % of it (default dark)" in help_text
    assert "--limit off|N how many (default off)" in help_text
    assert "--quiet say nothing" in help_text
    assert "--cache SIZE room for the cache" in help_text
    given = flags(
        "--shade", "light", "--limit", "3", "--pace-s", "2", "--quiet", "--cache", "3G", "--place", "a", "--place", "b"
    )
    made = More(**checked(More, {"limit": 4, "port": 9}, given))
    assert (made.shade, made.limit, made.pace_s, made.quiet, made.cache_bytes, made.place, made.port) == (
        *("light", 3, 2.0, True, 3 << 30, ("a", "b"), 9),
    )  # fmt: skip
    text = template(More, "head")
    assert '# shade = "dark"' in text and "which shade, 100 % of it (dark|light)" in text
    values = tomllib.loads("\n".join(line.removeprefix("# ") for line in text.splitlines() if " = " in line))
    assert More(**checked(More, values, {})) == More()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("shade", "grey", "shade: 'grey' can't be used; allowed are dark, light"),
        ("shade", 3, "shade: 3 can't be used; allowed are dark, light"),
        ("limit", "on", "limit: 'on' can't be used; allowed are off or 1 to 9"),
        ("limit", 10, "limit = 10: allowed are off or 1 to 9"),
        ("limit", True, "limit: True can't be used"),
        ("limit", 1.5, "limit: 1.5 can't be used"),
        ("pace_s", 0.1, "pace_s = 0.1: allowed are 0.5 to 10"),
        ("pace_s", float("nan"), "pace_s = nan: allowed are 0.5 to 10"),
        ("pace_s", "fast", "pace_s: 'fast' can't be used; allowed are 0.5 to 10"),
        ("quiet", "yes", "quiet: 'yes' can't be used; allowed are true and false"),
        ("cache", "3 elephants", "cache: '3 elephants' is not a size"),
        ("cache_bytes", 1 << 30, "unknown setting 'cache_bytes'; the settings are: "),
        ("place", "a", "place: 'a' can't be used; allowed are lists of texts"),
        ("place", [1], "allowed are lists of texts"),
        ("host", 1, "host: 1 can't be used; allowed are texts"),
        ("port", "9000", "port: '9000' can't be used; allowed are whole numbers 0 to 65,535"),
    ],
)
def test_the_file_is_checked_by_the_declaration(name: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(More, {name: value}, {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "x"),
        ("port", "-1"),
        ("port", "1e3"),
        ("port", "9" * 5000),
        ("port", "٣"),
        ("pace_s", "1e1"),
        ("pace_s", "nan"),
    ],
)
def test_a_flag_is_checked_by_the_declaration(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}: .*allowed are"):
        checked(More, {}, {name: text})


def test_a_declaration_that_says_too_little_is_an_error_of_ours() -> None:
    class Bare(Settings, frozen=True, kw_only=True):
        n: int = 0

    class NoRange(Settings, frozen=True, kw_only=True):
        n: Annotated[int, Setting("n")] = 0

    for struct in (Bare, NoRange):
        with pytest.raises(TypeError, match=r"^n is"):
            declared(struct)


def test_what_services_get_as_chosen_is_declared_once() -> None:
    settings = Settings(pilot="off", drain_s=3.0, kv_dtype="f32")
    passed = passed_on(settings)
    assert passed["pilot"] == "off" and passed["drain_s"] == 3.0
    assert set(passed) == set(Passed.__struct_fields__) <= set(GroupConfig.__struct_fields__)
