"""Modules import from their own layer or a lower one; only `ops` and `optimize` know kernels."""

import ast
from pathlib import Path

import manyheads

ROOT = Path(manyheads.__file__).parent
LAYERS = [
    "errors config fileio tokenizer phrasebook",
    "kernels ops",
    "data nn",
    "models baselines presets",
    "train decode optimize",
    "evaluate tasks exchange",
    "run recipes loading finetune summary engines distill plugins sizing prepare",
    "view web serve lab",
    "commands cli __main__ __init__",
]
LAYER = {name: number for number, names in enumerate(LAYERS, start=1) for name in names.split()}
KNOW_KERNELS = {"kernels", "ops", "optimize"}


def imported_packages(path: Path) -> set[str]:
    """The top-level names inside `manyheads` that a file imports, also within functions."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "manyheads":
            modules += [f"manyheads.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules.append(node.module)
        elif isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
    inside = [name.split(".")[1] for name in modules if name.startswith("manyheads.")]
    return {name for name in inside if name != "__version__"}


def test_imports_never_go_up() -> None:
    upward = []
    for path in sorted(ROOT.rglob("*.py")):
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        assert package in LAYER, f"{package} has no layer: add it to LAYERS"
        for other in imported_packages(path):
            if LAYER[other] > LAYER[package]:
                upward.append(f"{path.relative_to(ROOT)} imports {other}")
            if other == "kernels" and package not in KNOW_KERNELS:
                upward.append(f"{path.relative_to(ROOT)} imports kernels instead of ops")
    assert not upward, "\n".join(upward)


def test_the_phrasebook_imports_nothing_else() -> None:
    for path in (ROOT / "phrasebook").glob("*.py"):
        assert imported_packages(path) <= {"phrasebook"}, path.name
