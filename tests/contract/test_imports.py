"""Who may import whom, and the one place for each danger. import-linter covers the layers, small walks the rest."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.main import COMMANDS
from deploy.loading import COMMON_MODULES, SINGLE_MODULES
from shared.model import family

ROOT = Path(__file__).parents[2]
PACKAGES = ("shared", "native", "conversion", "services", "deploy", "cli", "bench")

ONLY_IN = {
    "zmq": {"shared/wire/zeromq.py"},
    "ctypes": {"native/", "bench/peers/llama.py"},
    "mmap": {"shared/memory/segments.py", "conversion/writer.py"},
    "multiprocessing": set(),
    "pickle": set(),
    "supervisor": {"deploy/keeper.py"},
    "huggingface_hub": {"conversion/hub.py"},
    "httpx2": {"conversion/hub.py"},
}
"""Module -> the files (or folders) that may import it."""

IMPURE_MODULES = {
    "zmq",
    "threading",
    "socket",
    "asyncio",
    "subprocess",
    "selectors",
    "native",
    "shared.wire.bus",
    "shared.memory.segments",
    "time",
}
"""Sockets, threads, processes, memory of others, the clock."""


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path) -> set[str]:
    """Names of all modules a file imports, inside functions too, but not those for type checkers alone."""
    tree = tree_of(path)
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped |= {inner for statement in node.body for inner in ast.walk(statement)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("module", sorted(ONLY_IN))
def test_danger_has_one_place(module: str) -> None:
    allowed = ONLY_IN[module]
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if any(name == place or (place.endswith("/") and name.startswith(place)) for place in allowed):
            continue
        users = {found for found in imported(path) if found == module or found.startswith(f"{module}.")}
        assert not users, f"{name} imports {users}; only {sorted(allowed) or 'nobody'} may"


def pure() -> list[Path]:
    """Files of services whose docstring says that they are pure."""
    return [
        path
        for path in sources()
        if path.is_relative_to(ROOT / "services") and re.search(r"\bPure\b", ast.get_docstring(tree_of(path)) or "")
    ]


def test_what_decides_says_that_it_is_pure() -> None:
    named = {path.relative_to(ROOT / "services").with_suffix("").as_posix() for path in pure()}
    assert named >= {
        *(f"router/{name}" for name in ("flight", "scheduler", "drafting", "sequences", "group", "prompt_queue")),
        *(f"expert_io/{name}" for name in ("state", "slots", "visit", "guessing", "pilot", "filling", "copies")),
        *(f"gateway/{name}" for name in ("requests", "lobby", "bodies", "answers")),
    }


def test_what_is_pure_does_no_io() -> None:
    for path in (
        *pure(),
        *(ROOT / "services" / "expert_io" / f"{name}.py" for name in ("events", "states", "stories")),
    ):
        users = {m for m in imported(path) for bad in IMPURE_MODULES if m == bad or m.startswith(f"{bad}.")}
        assert not users, f"{path.relative_to(ROOT)} imports {users}"
        called = {ast.unparse(node.func) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)}
        assert not called & {"open", "print"}, f"{path.relative_to(ROOT)} opens or prints"


@pytest.mark.parametrize("name", ["shared/__init__.py", "services/__init__.py", "shared/container/__init__.py"])
def test_package_modules_import_nothing(name: str) -> None:
    """Otherwise importing one module would drag in the others, and the gateway would get numpy by accident."""
    assert not imported(ROOT / name)


def test_commands_write_through_the_terminal_module_alone() -> None:
    """Text of a model, a server or a file must not steer the terminal: ``shared/run/terminal.py`` is the one way out."""
    to_a_parent = ("bench/sharing.py", "bench/peers/llama.py")  # lines of JSON for the process that started them
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(("cli/", "deploy/", "bench/", "conversion/")) or name in to_a_parent:
            continue
        for node in ast.walk(tree_of(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            writes = ("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write")
            assert called not in writes, f"{name}:{node.lineno} writes by {called}"


def test_files_are_replaced_in_one_place() -> None:
    """``shared/kept.py`` writes and renames. The others listed only give a file that is there another name."""
    renaming = {"shared/kept.py", "shared/memory/warm_sets.py", "conversion/writer.py", "conversion/staging.py"}
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(tree_of(path)):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            is_rename = called in ("os.replace", "os.rename") or called.endswith(".rename")
            assert not is_rename or name in renaming, f"{name}:{node.lineno} renames by {called}"
            is_write = called.endswith((".write_text", ".write_bytes"))
            assert not is_write or name.startswith(("cli/", "bench/")), f"{name}:{node.lineno} writes by {called}"


LATE = {
    "deploy/loading.py": {m for m in (*COMMON_MODULES, *SINGLE_MODULES) if m.partition(".")[0] in PACKAGES},
    "cli/main.py": {target.partition(":")[0] for target, _ in COMMANDS.values()},
    "shared/model/family.py": {f"shared.model.families.{name}" for name in family.names()},
}
"""Who imports modules by names that are data -> these modules."""


def test_no_circle_of_imports() -> None:
    """For type checkers too: two modules that need each other are one subject, or a third one is missing."""
    modules = {}
    for path in (*sources(), *(ROOT / "models").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        name = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        modules[name] = path
    graph = {name: {m for m in needed(path, set(modules)) if m != name} for name, path in modules.items()}
    while True:  # what imports nothing that is left is in no circle
        free = {name for name, needs in graph.items() if not needs & graph.keys()}
        if not free:
            break
        graph = {name: needs for name, needs in graph.items() if name not in free}
    while True:  # and what nobody imports only hangs on one
        used = {need for needs in graph.values() for need in needs}
        if graph.keys() <= used:
            break
        graph = {name: needs for name, needs in graph.items() if name in used}
    assert not graph, f"these import each other: {sorted(graph)}"


def needed(path: Path, modules: set[str]) -> set[str]:
    """Those of ``modules`` that a file imports, wherever it does so, and the packages around them."""
    found: set[str] = set()
    place = path.relative_to(ROOT).as_posix()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{place}:{node.lineno}: name the module from its root"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            assert place.startswith("tests/") or place in LATE, f"{place}:{node.lineno}: add it to LATE"
    found |= LATE.get(place, set())
    own = path.relative_to(ROOT).parent.as_posix().replace("/", ".")
    packages = {name[:at] for name in found for at in range(len(name)) if name[at] == "."}
    return (found | {name for name in packages if not f"{own}.".startswith(f"{name}.")}) & modules


def test_native_imports_nothing_of_ours() -> None:
    for path in (ROOT / "native").rglob("*.py"):
        ours = {m for m in imported(path) if m.split(".")[0] in {*PACKAGES, "models"} - {"native"}}
        assert not ours, f"{path.name} imports {ours}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_gateway_process_has_neither_numpy_nor_kernels() -> None:
    found = loaded_by("import services.gateway.service, services.gateway.__main__")
    assert not found & {"numpy", "native", "native.library", "tokenizers", "jinja2", "safetensors", "rich"}


def test_messages_load_msgspec_and_nothing_else_of_weight() -> None:
    found = loaded_by("import shared.messages.router, shared.messages.control, shared.messages.gateway")
    assert not found & {"numpy", "zmq", "native", "asyncio", "shared.wire.bus", "shared.run.config"}


@pytest.mark.parametrize("service", ["router", "attention", "expert_io", "drafter"])
def test_engine_services_start_without_what_they_do_not_need(service: str) -> None:
    """Start-up time is import time."""
    found = loaded_by(f"import services.{service}.service")
    assert not found & {"rich", "click", "uvicorn", "starlette", "supervisor", "huggingface_hub", "psutil"}


def test_commands_start_without_what_only_a_terminal_or_a_tool_needs() -> None:
    found = loaded_by(
        "import cli.main, cli.run, cli.chat, cli.plan, cli.ram, cli.convert, cli.estimate, cli.doctor.command, "
        "deploy.up, deploy.launch"
    )
    assert not found & {"rich", "psutil", "pygments", "uvicorn", "starlette", "supervisor", "huggingface_hub"}


def test_import_contracts_hold() -> None:
    tool = Path(sys.executable).with_name("lint-imports")
    if not tool.exists():
        pytest.skip("import-linter is not installed (extra dev)")
    done = subprocess.run([str(tool)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def reaches_inside(path: Path) -> list[str]:
    """Where a test uses a private attribute of anything but itself."""
    own, system = {"self", "cls"}, {"os._exit"}
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
            whose = ast.unparse(node.value)
            if whose not in own and f"{whose}.{node.attr}" not in system:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {whose}.{node.attr}")
    return found


def test_tests_reach_into_private_fields_in_one_room() -> None:
    """``tests/support`` knows where things lie; a test says what it wants to see or spoil."""
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.parent.name != "support"]
    assert [place for path in paths for place in reaches_inside(path)] == []
