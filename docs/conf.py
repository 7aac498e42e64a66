# SPDX-License-Identifier: Apache-2.0
"""Settings of the documentation: ``python3 -m sphinx -W -b html docs docs/_build/html``."""

import builtins
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "verl"
version = release = (ROOT / "verl" / "version" / "version").read_text(encoding="utf-8").strip()
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_title = f"verl {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"page_width": "1180px", "sidebar_width": "230px", "show_powered_by": False}
html_copy_source = False

# Links to a heading are those of GitHub, so that a page reads the same there.
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
default_role = "literal"

# A role that names something that is not in this documentation is an error, unless it is of another package.
nitpicky = True
OTHER_PACKAGES = {"hydra", "megatron", "numpy", "np", "omegaconf", "ray", "tensordict", "torch", "transformers"}
OTHER_NAMES = {"HydraException", "NestedTensor"}  # of those packages, written without the package


def is_not_ours(target: str) -> bool:
    """Whether a name belongs to Python or another package, or is private and so has no entry."""
    first = re.match(r"\w*", target)[0]
    if first in OTHER_PACKAGES | OTHER_NAMES or first in sys.stdlib_module_names or hasattr(builtins, first):
        return True
    return target.split(".")[-1].startswith("_")


def keep_property_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes what stands before a colon in a property's first line for its type; it is a shape, or a word."""
    if what == "property":
        lines[:] = inspect.getdoc(obj).splitlines()


def resolve_by_last_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Docstrings name things of other modules without the module: take the one object of that name, if it is one."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    domain = env.domains.python_domain
    found = [name for name in domain.objects if name == target or name.endswith(f".{target}")]
    entries = {name for name in found if not domain.objects[name].aliased} or set(found)
    if len(entries) == 1:
        name = entries.pop()
        from sphinx.util.nodes import make_refnode

        entry = domain.objects[name]
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, name)
    module = sys.modules.get(node.get("py:module") or "")
    is_constant = node.get("reftype") == "data" and hasattr(module, target)  # constants have no entries of their own
    return contnode if is_constant or is_not_ours(target) else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    from pygments.lexers.special import TextLexer

    app.connect("autodoc-process-docstring", keep_property_text, priority=600)
    app.connect("missing-reference", resolve_by_last_name)
    app.add_lexer("mermaid", TextLexer)  # GitHub draws these diagrams; here they are shown as they are written
