# SPDX-License-Identifier: Apache-2.0
"""What the installed megatron-core and megatron-bridge know, read from their source text.

Importing them takes many seconds and loads torch. Whatever cannot be read gives an empty answer, and then nothing is
checked against it.
"""

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Where verl.models.mcore.bridge looks for bridges of its own; each worker process imports them.
_OWN_BRIDGES = Path(__file__).resolve().parents[2] / "models" / "mcore"

__all__ = ["Field", "bridge_file", "ddp_fields", "optimizer_fields", "provider_fields", "supported_architectures"]


@dataclass(frozen=True)
class Field:
    """What a field of a dataclass may hold, as far as its annotation says.

    ``kinds`` are names out of bool, int, float, str and list, and ``words`` the texts it may hold; both None where the
    annotation is of another kind, so that anything may be right.
    """

    kinds: frozenset[str] | None = None
    words: tuple[str, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether a value of a yaml file may be right."""
        if self.kinds is None or value is None:
            return True
        kinds = self.kinds
        if isinstance(value, bool):
            return "bool" in kinds or not value  # False stands for None where megatron-core asks for a truth
        if isinstance(value, int):
            return bool(kinds & {"int", "float"}) or ("bool" in kinds and value in (0, 1))
        if isinstance(value, float):
            return "float" in kinds or ("int" in kinds and value.is_integer())
        if isinstance(value, str):
            # Lists may also be written as text, which megatron-core takes apart.
            return bool(kinds & {"str", "list"}) or value in self.words
        return "list" in kinds if isinstance(value, list) else False

    def or_else(self, other: "Field") -> "Field":
        """A field that holds what either may."""
        if self.kinds is None or other.kinds is None:
            return Field()
        return Field(self.kinds | other.kinds, tuple(dict.fromkeys(self.words + other.words)))

    def in_words(self) -> str:
        """What it may hold, for an error message."""
        names = {"bool": "True or False", "int": "a whole number", "float": "a number", "str": "text", "list": "a list"}
        kinds = (self.kinds or frozenset()) - ({"int"} if "float" in (self.kinds or ()) else set())
        return " or ".join([*self.words, *(names[kind] for kind in sorted(kinds))])


@functools.cache
def _package(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


@functools.cache
def _bridge_files() -> Mapping[str, Path]:
    """Hugging Face architecture -> the file, megatron-bridge's or ours, that registers it with megatron-bridge."""
    root = _package("megatron.bridge")
    if root is None:
        return {}
    found: dict[str, Path] = {}
    for file in [*sorted(root.glob("models/**/*bridge*.py")), *sorted(_OWN_BRIDGES.glob("bridge_*.py"))]:
        text = file.read_text(encoding="utf-8", errors="ignore")
        constants = dict(re.findall(r"^(\w+) = [\"'](\w+)[\"']$", text, re.MULTILINE))
        for name in re.findall(r"register_bridge\(\s*source=[\"']?(\w+)", text):
            found.setdefault(constants.get(name, name), file)
    return found


def supported_architectures() -> frozenset[str]:
    """Hugging Face architectures that the installed megatron-bridge or this package registers; empty if that cannot be
    told.
    """
    return frozenset(_bridge_files())


def bridge_file(architecture: str) -> Path | None:
    """The file that registers an architecture with megatron-bridge."""
    return _bridge_files().get(architecture)


@functools.cache
def _parsed(file: Path) -> ast.Module | None:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _class_fields(files: Iterable[Path], classes: tuple[str, ...] = ()) -> dict[str, Field]:
    """Annotated names in the bodies of these classes, or of all of the files' classes."""
    fields: dict[str, Field] = {}
    for file in files:
        for node in ast.walk(_parsed(file) or ast.Module(body=[], type_ignores=[])):
            if isinstance(node, ast.ClassDef) and (not classes or node.name in classes):
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        fields[part.target.id] = _field(part.annotation)
    return fields


def _field(annotation: ast.expr) -> Field:
    kinds: set[str] = set()
    words: list[str] = []
    return Field(frozenset(kinds), tuple(words)) if _read(annotation, kinds, words) else Field()


def _read(node: ast.expr, kinds: set[str], words: list[str]) -> bool:
    """Add what the annotation allows; False if it is of a kind that is not read."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _read(ast.parse(node.value, mode="eval").body, kinds, words)
    if isinstance(node, ast.Constant):
        return node.value is None
    if isinstance(node, ast.Name):
        name = node.id.lower()
        kinds.add(name)
        return name in ("bool", "int", "float", "str", "list")
    if isinstance(node, ast.BinOp):
        return _read(node.left, kinds, words) and _read(node.right, kinds, words)
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return False
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    match node.value.id:
        case "Optional" | "Union":
            return all(_read(part, kinds, words) for part in inner)
        case "List" | "list":
            kinds.add("list")
            return True
        case "Literal":
            values = [part.value for part in inner if isinstance(part, ast.Constant)]
            words += [value for value in values if isinstance(value, str)]
            return all(isinstance(value, str | None) for value in values) and len(values) == len(inner)
    return False


@functools.cache
def provider_fields(architecture: str) -> Mapping[str, Field]:
    """Fields of the transformer configuration of a model: megatron-core's, and those that its provider adds.

    For an architecture that is not registered, or by a bridge of ours, which may build on any other, those of all
    providers.
    """
    core, bridge, own = _package("megatron.core"), _package("megatron.bridge"), bridge_file(architecture)
    if own is not None and own.parent == _OWN_BRIDGES:
        own = None
    if core is None or bridge is None:
        return {}
    models = bridge / "models"
    is_latent = own is None or "MLA" in own.read_text(encoding="utf-8", errors="ignore")
    configs = [core / "model_parallel_config.py", core / "transformer" / "transformer_config.py"]
    common = [models / f"{name}.py" for name in ("gpt_provider", "model_provider", "transformer_config")]
    if is_latent:
        common.append(models / "mla_provider.py")
    files = sorted((own.parent if own else models).rglob("*.py"))
    names = ("ModelParallelConfig", "TransformerConfig", *["MLATransformerConfig"] * is_latent)
    known = _class_fields(configs, names)
    for more in (_class_fields(common), _class_fields(files) if own else {}):
        known |= {name: known[name].or_else(field) if name in known else field for name, field in more.items()}
    if not {"num_layers", "hidden_size", "tensor_model_parallel_size", "vocab_size"} <= set(known):
        return {}
    others = _assigned(files) | (set() if own else set(_class_fields(files)))
    return dict.fromkeys(others, Field()) | known


def _assigned(files: Iterable[Path]) -> set[str]:
    """Attributes that the files set on an object that they call provider."""
    text = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return set(re.findall(r"\bprovider\.(\w+) = ", text))


@functools.cache
def ddp_fields() -> Mapping[str, Field]:
    """Fields of megatron-core's ``DistributedDataParallelConfig``."""
    core = _package("megatron.core")
    file = core / "distributed" / "distributed_data_parallel_config.py" if core else None
    return _class_fields([file], ("DistributedDataParallelConfig",)) if file else {}


@functools.cache
def optimizer_fields() -> Mapping[str, Field]:
    """Fields of megatron-core's ``OptimizerConfig``."""
    core = _package("megatron.core")
    return _class_fields([core / "optimizer" / "optimizer_config.py"], ("OptimizerConfig",)) if core else {}


if __name__ == "__main__":
    print("\n".join(sorted(supported_architectures())))
