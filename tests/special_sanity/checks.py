# SPDX-License-Identifier: Apache-2.0
"""House rules as functions from source text to violations; the tests apply them to the tree and to planted faults.

Every violation reads ``path:line: what is wrong``.
"""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

REPO_ROOT = Path(__file__).resolve().parent.parent.parent
LICENCE = "SPDX-License-Identifier: Apache-2.0"
SPDX_LINE = f"# {LICENCE}"
# What a program wants to read in the first line: the kernel, docker's builder, hydra.
BEFORE_LICENCE = ("#!", "# syntax=", "# @package ")
# Where our own sources are, besides the Python files of the root.
FOLDERS = ("verl", "tests", "scripts", "examples", "recipe", "docs", "docker", ".ci")
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)

# Floors of the house, by the longest prefix of the dotted module name. A module imports from its own floor or below.
FLOORS = {
    "verl.version": 1,
    "verl.utils": 1,
    "verl": 2,  # the package itself: it resolves DataProto
    "verl.base_config": 2,
    "verl.protocol": 2,
    "verl.single_controller": 2,
    "verl.workers.config": 2,
    "verl.algos": 3,
    "verl.models": 4,
    "verl.workers.utils": 4,
    "verl.workers.engine": 5,
    "verl.workers.engine_workers": 6,
    "verl.workers.critic_worker": 6,
    "verl.workers.rollout": 6,
    "verl.workers.reward_manager": 6,
    "verl.trainer.ppo": 7,
    "verl.trainer": 8,
}
# Empty packages that only hold others: they are imported on the way to any of their modules.
PASSAGES = {"verl.workers"}
# Modules that may name a device: the device layer, and the code that makes megatron-core run without one.
DEVICE_LAYER = {"verl/utils/device.py", "verl/utils/megatron/cpu_backend.py"}


def source_files(root: Path = REPO_ROOT) -> list[Path]:
    """Every file of a tree that a rule may look at, as paths from its root."""
    found = [*root.glob("*.py"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    names = (path.relative_to(root) for path in found if path.is_file())
    return sorted(name for name in names if not {"_build", "__pycache__"} & set(name.parts))


def rules_for(path: Path) -> list[Callable[[str | Path, str], list[str]]]:
    """The checks of a single text that a file must pass, by its path from the root.

    The licence line: what is run or read by a program of ours. Lengths: all Python. Docstrings and devices: all Python
    but the tests, whose names say what they promise and which may name what they test.
    """
    top, kind = path.parts[0], path.suffix
    is_config = kind == ".yaml" and top == "verl"
    rules = []
    if kind in (".py", ".sh", ".css") or path.name.startswith("Dockerfile") or top == ".ci" or is_config:
        rules.append(check_licence)
    if kind == ".py":
        rules.append(check_lengths)
    if kind == ".py" and top != "tests":
        rules += [check_docstrings, check_device_literals, check_no_dataproto_in_engine]
    if is_config:
        rules.append(check_yaml_documented)
    return rules


def module_name(path: str | Path) -> str:
    """Dotted name of the module at a path such as ``verl/utils/device.py`` or ``verl/utils/__init__.py``."""
    parts = list(Path(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int | None:
    """Floor of a dotted module name, or None when nobody has assigned one."""
    prefix = module
    while prefix:
        # "verl" is the floor of the package itself, not of every module that is yet to be placed.
        if prefix in FLOORS and (prefix != "verl" or module == "verl"):
            return FLOORS[prefix]
        prefix = prefix.rpartition(".")[0]
    return None


def imported_modules(path: str | Path, source: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything of verl that a module imports, in functions and under TYPE_CHECKING too.

    `modules` are the names of all modules of the tree: ``from a import b`` means the module ``a.b`` where there is one.
    """
    package = module_name(path) if Path(path).name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(source, str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in modules else base for a in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        for name in names:
            if name.split(".")[0] == "verl":
                yield node.lineno, name


def check_floors(path: str | Path, source: str, modules: set[str]) -> list[str]:
    """Imports that go up the floors, and modules that have no floor."""
    module = module_name(path)
    own = floor_of(module)
    if own is None:
        is_passage = module in PASSAGES and not ast.parse(source, str(path)).body
        return [] if is_passage else [f"{path}:1: no floor is assigned to {module}; give it one in FLOORS"]
    problems = []
    for line, name in imported_modules(path, source, modules):
        floor = floor_of(name)
        if floor is None:
            problems.append(f"{path}:{line}: imports {name}, which has no floor")
        elif floor > own:
            problems.append(f"{path}:{line}: floor {own} imports {name} of floor {floor}; import down only")
    return problems


def check_licence(path: str | Path, source: str) -> list[str]:
    """The first line names the licence, or the second below a line of BEFORE_LICENCE. Empty files need none."""
    lines = source.splitlines()
    if lines and lines[0].startswith(BEFORE_LICENCE):
        del lines[0]
    wanted = f"/* {LICENCE} */" if Path(path).suffix == ".css" else SPDX_LINE
    if not source or lines[:1] == [wanted]:
        return []
    return [
        f"{path}:1: no licence line; write {wanted!r} as line 1, or as line 2 below a '#!', '# syntax=', '# @package'"
    ]


def check_docstrings(path: str | Path, source: str) -> list[str]:
    """Public modules, functions, classes and methods say what they are for.

    A method of a class with bases may be an override that its base documents, so those are left out, as are the setters
    of properties.
    """
    tree = ast.parse(source, str(path))
    problems = []
    if tree.body and not ast.get_docstring(tree):
        problems.append(f"{path}:1: module has no docstring; say what it is for in its first string")
    for node in tree.body:
        if not isinstance(node, (*FUNCTION_NODES, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            problems.append(f"{path}:{node.lineno}: {node.name} has no docstring; write one, or begin its name with _")
        if isinstance(node, ast.ClassDef) and not node.bases:
            for method in node.body:
                if not isinstance(method, FUNCTION_NODES) or method.name.startswith("_"):
                    continue
                is_setter = any(ast.unparse(d).endswith(".setter") for d in method.decorator_list)
                if not is_setter and not ast.get_docstring(method):
                    name = f"{node.name}.{method.name}"
                    problems.append(
                        f"{path}:{method.lineno}: {name} has no docstring; write one, or begin its name with _"
                    )
    return problems


def _docstring_nodes(tree: ast.Module) -> set[int]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTION_NODES, ast.ClassDef, ast.Module)) and ast.get_docstring(node) is not None:
            found.add(id(node.body[0].value))
    return found


def check_device_literals(path: str | Path, source: str) -> list[str]:
    """No device or backend of one vendor as a string: "cuda", "cuda:0", f"cuda:{i}", "cpu:gloo,cuda:nccl", ..."""
    if str(path) in DEVICE_LAYER:
        return []
    tree = ast.parse(source, str(path))
    docstrings = _docstring_nodes(tree)
    problems = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        # Prose that mentions a device is fine; a value is one word, with indices and lists of backends.
        if re.fullmatch(r"[\w:,]+", node.value) and {"cuda", "nccl"} & set(re.split("[:,]", node.value.lower())):
            problems.append(f"{path}:{node.lineno}: literal {node.value!r}; ask verl.utils.device")
    return problems


def check_lengths(path: str | Path, source: str) -> list[str]:
    """No file above 600 lines, no function above 80."""
    problems = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        problems.append(f"{path}:1: {num_lines} lines, at most {MAX_FILE_LINES} are allowed; divide the file")
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, FUNCTION_NODES):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                problems.append(
                    f"{path}:{node.lineno}: {node.name} has {length} lines, "
                    f"at most {MAX_FUNCTION_LINES} are allowed; divide the function"
                )
    return problems


def check_no_dataproto_in_engine(path: str | Path, source: str) -> list[str]:
    """Engines work on TensorDicts: below engine_workers nothing knows DataProto."""
    if not str(path).startswith("verl/workers/engine/"):
        return []
    problems = []
    for node in ast.walk(ast.parse(source, str(path))):
        name = {
            ast.Name: lambda n: n.id,
            ast.Attribute: lambda n: n.attr,
            ast.alias: lambda n: n.name,
            ast.Constant: lambda n: n.value,  # an annotation in quotes
        }.get(type(node), lambda n: None)(node)
        if isinstance(name, str) and re.fullmatch(r"([\w.]+\.)?DataProto", name):
            problems.append(f"{path}:{node.lineno}: uses DataProto")
    return problems


def check_yaml_documented(path: str | Path, source: str) -> list[str]:
    """Every key with a value has a comment, on its line or right above it.

    Generated files are left out, and so is what hydra reads itself: ``defaults``, ``hydra`` and ``_target_``.
    """
    if Path(path).name.startswith("_generated_"):
        return []
    lines = source.splitlines()
    root = yaml.compose(source)
    problems = []
    for key, dotted in _leaf_keys(root, ""):
        line = key.start_mark.line
        above = lines[line - 1].strip().replace(SPDX_LINE, "") if line else ""
        if not above.startswith("#") and not re.search(r"\s#", lines[line]):
            problems.append(f"{path}:{line + 1}: {dotted} has no comment; say above it what it sets")
    return problems


def _leaf_keys(node: yaml.Node | None, prefix: str) -> Iterator[tuple[yaml.Node, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        dotted = f"{prefix}{key.value}"
        if key.value == "_target_" or dotted in ("defaults", "hydra"):
            continue
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from _leaf_keys(value, dotted + ".")
        else:
            yield key, dotted
