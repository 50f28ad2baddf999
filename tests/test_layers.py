"""A package imports only packages below it, and optional dependencies stay in modules of their own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "lemma").rglob("*.py"))

# From the ground up. Packages of one level do not know each other, except where they are named in NEIGHBOURS.
LAYERS = [
    {"core"},
    {"children"},
    {"config"},
    {"data"},
    {"models", "grading"},
    {"formats", "objectives"},
    {"engines", "environments", "rewards", "algorithms"},
    {"serving"},
    {"rollouts"},
    {"evaluation"},
    {"learning"},
    {"cluster"},
    {"runs"},
    {"stages"},
    {"recipe"},
    {"reporting", "planning"},
    {"reports", "doctor"},
    {"api"},
    {"cli"},
    {"__main__"},
]
NEIGHBOURS: set[tuple[str, str]] = set()
# What a plugin is a component of: it may use what that package may use.
PLUGINS = {
    "appworld": "environments",
    "foreign_configs": "cluster",
    "gguf": "models",
    "mlflow": "reporting",
    "openenv": "environments",
    "ray": "cluster",
    "reasoning_gym": "environments",
    "trackio": "reporting",
    "trl_world": "environments",
    "vary": "data",
}
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

OPTIONAL = {
    "wandb",
    "mlflow",
    "trackio",
    "bitsandbytes",
    "gguf",
    "ray",
    "deepspeed",
    "vllm",
    "liger_kernel",
    "reasoning_gym",
    "triton",
    "flash_attn",
}
# Modules that may import an optional dependency when they are imported; at module level only those that have the same
# one import these.
OWN_MODULES = {
    "triton": {
        "lemma.models.kernels",
        "lemma.models.joint_kernels",
        "lemma.models.adapter_kernels",
        "lemma.models.sharing_kernels",
        "lemma.engines.native.engine_kernels",
        "lemma.engines.native.sampling_kernels",
    },
    "vllm": {"lemma.engines.vllm.vllm_worker"},
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str | None:
    """The package of a module; of a plugin, the one that it belongs to."""
    parts = module.split(".")
    if parts[:2] == ["lemma", "plugins"]:
        return PLUGINS[parts[2]] if len(parts) > 2 else None
    return parts[1] if parts[0] == "lemma" and len(parts) > 1 else None


def plugin_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["lemma", "plugins"] and len(parts) > 2 else None


def imports(tree: ast.AST, *, only_module_level: bool = False) -> Iterator[tuple[str, int]]:
    """Modules that run when a file is imported, or, with its functions, when they are called. Types do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), only_module_level=only_module_level)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: imports inside lemma are absolute"
            assert node.module is not None
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif not (only_module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(node, only_module_level=only_module_level)


def layer_faults(module: str, source: str) -> list[str]:
    package = package_of(module)
    if package is None:
        return []
    faults = []
    for imported, line in imports(ast.parse(source)):
        other = package_of(imported)
        if other is None or other == package or other not in LEVEL:
            continue
        if LEVEL[other] >= LEVEL[package] and (package, other) not in NEIGHBOURS:
            faults.append(f"{module}, line {line}: {package} may not use {other}")
    return faults


def plugin_faults(module: str, source: str) -> list[str]:
    """Plugins that a module from outside of them imports before somebody has named them."""
    found = ((plugin_of(name), line) for name, line in imports(ast.parse(source), only_module_level=True))
    return [
        f"{module}, line {line}: import the plugin {plugin} inside the function that needs it"
        for plugin, line in found
        if plugin is not None and plugin != plugin_of(module)
    ]


def optional_faults(module: str, source: str) -> list[str]:
    faults = []
    for imported, line in imports(ast.parse(source), only_module_level=True):
        package = imported.split(".")[0]
        if package in OPTIONAL and module not in OWN_MODULES.get(package, set()):
            faults.append(f"{module}, line {line}: import {package} inside the function that needs it")
        if any(imported in own and module not in own for own in OWN_MODULES.values()):
            faults.append(f"{module}, line {line}: import {imported} inside the function that needs it")
    return faults


def test_every_package_has_a_level() -> None:
    packages = {package_of(module_of(path)) for path in FILES} - {None}
    assert packages <= set(LEVEL), "a new package needs a place in LAYERS"
    assert {"core", "config", "data", "models", "learning", "runs", "stages", "cli"} <= packages


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_go_down_only(path: Path) -> None:
    assert layer_faults(module_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_plugins_are_not_imported_on_the_common_path(path: Path) -> None:
    assert plugin_faults(module_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_optional_dependencies_stay_in_their_own_modules(path: Path) -> None:
    assert optional_faults(module_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lemma.core.types", "import lemma.config"),
        ("lemma.data.load_rows", "def f():\n    from lemma.learning import learner"),
        ("lemma.models.load_model", "from lemma import grading"),
        ("lemma.runs.run", "from lemma.recipe import Recipe"),
        ("lemma.reporting.sinks", "import lemma.cli.train"),
        ("lemma.plugins.openenv", "from lemma.rollouts import play"),
        ("lemma.plugins.vary.vary", "from lemma.models.policy import Policy"),
        ("lemma.data.load_rows", "def f():\n    from lemma.plugins.gguf import gguf"),
    ],
)
def test_an_import_upwards_is_found(module: str, source: str) -> None:
    assert len(layer_faults(module, source)) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lemma.runs.run", "from lemma.models.load_model import load\nimport torch"),
        ("lemma.cli.train", "from lemma.reporting import make_sink"),
        ("lemma.recipe", "from lemma.runs.run_options import RunOptions"),
        ("lemma.core.types", "if TYPE_CHECKING:\n    from lemma.learning import learner"),
    ],
)
def test_an_import_downwards_is_fine(module: str, source: str) -> None:
    assert layer_faults(module, source) == []


def twins(paths: list[Path]) -> list[str]:
    """Names that two files share; a command of the terminal may be called like what it calls."""
    seen: dict[str, Path] = {}
    named = [path for path in paths if path.name != "__init__.py" and path.parent.name != "cli"]
    return [f"{path} and {seen[path.name]}" for path in named if seen.setdefault(path.name, path) != path]


def test_a_name_belongs_to_one_file() -> None:
    assert twins(FILES) == []
    assert len(twins([Path("a/options.py"), Path("b/options.py"), Path("b/__init__.py"), Path("a/__init__.py")])) == 1


def test_a_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module_of(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {module_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {module: length for module, length in lengths.items() if length > 400} == {}


def test_an_algorithm_is_a_page() -> None:
    """What several share is in lemma/algorithms/parts, and what an algorithm is in the two files named here."""
    shared = {"__init__.py", "algorithm.py", "preference_algorithm.py"}
    folders = (ROOT / "lemma" / "algorithms", ROOT / "lemma" / "algorithms" / "preference")
    files = [path for folder in folders for path in folder.glob("*.py") if path.name not in shared]
    lengths = {path.stem: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lengths) >= 16
    assert {name: length for name, length in lengths.items() if length > 80} == {}
    assert lengths["grpo"] <= 60


def test_early_imports_of_plugins_are_found() -> None:
    assert plugin_faults("lemma.environments", "from lemma.plugins.openenv import OpenEnv")
    assert plugin_faults("lemma.plugins.trackio", "from lemma.plugins import mlflow")
    assert not plugin_faults("lemma.environments", "def f():\n from lemma.plugins.openenv import OpenEnv")
    assert not plugin_faults("lemma.plugins.gguf.gguf", "from lemma.plugins.gguf.gguf_file import Header")


def test_optional_imports_are_found() -> None:
    assert optional_faults("lemma.models.load_model", "try:\n    import bitsandbytes.nn\nexcept ImportError:\n    pass")
    assert optional_faults("lemma.models.load_model", "class A:\n    from vllm import LLM")
    assert optional_faults("lemma.models.load_model", "from lemma.models import kernels")
    assert not optional_faults("lemma.engines.native.engine_kernels", "from lemma.models.kernels import tanh")
    assert not optional_faults("lemma.models.load_model", "def f():\n import wandb\n from lemma.models import kernels")
