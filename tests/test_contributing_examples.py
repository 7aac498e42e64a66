# SPDX-License-Identifier: Apache-2.0
"""The examples of CONTRIBUTING.md hold in the tree: each is written to the file that the page names above it, in a copy
of the repository, entered where the page says, and put through the checks that a commit of it would meet.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.loading import load_script
from tests.special_sanity import checks
from verl.trainer.ppo import preflight_sources

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w/]+\.py)`[^\n]*:\n\n```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))
TESTS = [name for name in FILES if name.startswith("tests/")]
MODEL_TEST = "tests/models/test_bridge_house.py"
ESTIMATOR, LOSS = "compute_median_advantage", "compute_policy_loss_unclipped"
FACE, PAGE, AUTO = "verl/trainer/ppo/core_algos.py", "docs/api/algos.md", ".. automodule:: verl.algos."
SLOW = "lambda batch: slow_outcome(batch, lambda r, group, _: r - statistics.median(group))"
# "The places of a name": file, what is there, and what is put in front of it.
PLACES = [
    ("verl/algos/advantage.py", "\n__all__", f"from verl.algos.advantage_median import {ESTIMATOR}\n"),
    ("verl/algos/advantage.py", '    "get_adv_estimator_fn",\n', f'    "{ESTIMATOR}",\n'),
    ("verl/algos/policy_loss.py", "\n__all__", f"from verl.algos.policy_loss_unclipped import {LOSS}\n"),
    ("verl/algos/policy_loss.py", '    "get_policy_loss_fn",\n', f'    "{LOSS}",\n'),
    (FACE, "    compute_gae_advantage_return,\n", f"    {ESTIMATOR},\n"),
    (FACE, '    "get_adv_estimator_fn",\n', f'    "{ESTIMATOR}",\n'),
    (FACE, "    compute_policy_loss_vanilla,\n", f"    {LOSS},\n"),
    (FACE, '    "get_policy_loss_fn",\n', f'    "{LOSS}",\n'),
    ("verl/workers/config/names.py", '    "grpo_passk",\n', '    "grpo_median",\n'),
    ("verl/workers/config/names.py", '    "bypass_mode",\n', '    "unclipped",\n'),
    ("verl/algos/advantage_base.py", '    GRPO_PASSK = "', '    GRPO_MEDIAN = "grpo_median"\n'),
    ("docs/algorithms.md", "| `grpo_passk` |", "| `grpo_median` | `r -` median of the group | | |\n"),
    ("docs/algorithms.md", "| `bypass_mode` |", "| `unclipped` | `-A q` | `loss_agg_mode` | |\n"),
    (PAGE, f"{AUTO}advantage_returns\n", f"{AUTO}advantage_median\n"),
    (PAGE, f"{AUTO}policy_loss_bypass\n", f"{AUTO}policy_loss_unclipped\n"),
    ("verl/trainer/config/ppo_trainer.yaml", "grpo_passk, reinforce_plus_plus,", "grpo_median, "),
    ("verl/trainer/config/actor/megatron_actor.yaml", "bypass_mode; or", "unclipped, "),
    ("docs/start/dry_run.md", "grpo_passk, gae", "grpo_median, "),
    ("tests/algos/test_advantages_on_cpu.py", "}\n# grpo_passk refuses", f'    "grpo_median": {SLOW},\n'),
]
# In the copy: what test_option_names reads from a file, with one entry taken out at a time.
UNDO = """
import sys
from tests.algos import test_option_names_on_cpu as names
from tests.test_contributing_examples import PLACES
read = names.read
tests = [test for name, test in vars(names).items() if name.startswith("test_")]
def problems():
    found = []
    for test in tests:
        for kind in names.KINDS if "kind" in test.__code__.co_varnames[: test.__code__.co_argcount] else [None]:
            try:
                test(kind) if kind else test()
            except AssertionError as error:
                found.append(str(error))
    return found
assert problems() == [], problems()
for file, before, entry in PLACES:
    if entry.startswith(("from ", "..", "|")) or file.endswith((".yaml", "dry_run.md")):
        names.read = lambda name: read(name).replace(entry + before, before, 1) if name == file else read(name)
        found = problems()
        assert len(found) == 1 and file in found[0], (file, entry, found)
        print("noticed", file)
"""


# Own bridges are registered where megatron-bridge is imported, and where it is there already.
BOTH_WAYS = """
from verl.models.mcore import bridge
calls = []
bridge._register_own_bridges = lambda: calls.append(1)
assert bridge._import_auto_bridge() is bridge._import_auto_bridge() and len(calls) == 2, calls
"""


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tree, env=environment, capture_output=True, text=True, timeout=250
    )


def passes(done: subprocess.CompletedProcess) -> None:
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the repository with the examples in it, entered wherever the page says."""
    copy = tmp_path_factory.mktemp("tree")
    for folder in ("verl", "tests", "docs", "scripts"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "_build", "outputs"))
    for file in ("pyproject.toml", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, copy)
    for name, block in FILES.items():
        path = copy / name
        assert not path.exists(), f"{name} is there already"
        if not path.parent.is_dir():
            path.parent.mkdir()
            (path.parent / "__init__.py").write_text(checks.SPDX_LINE + "\n", encoding="utf-8")
        path.write_text(f"{checks.SPDX_LINE}\n{block}", encoding="utf-8")
    for name, before, entry in PLACES:
        text = (copy / name).read_text(encoding="utf-8")
        assert text.count(before) >= 1, (name, before)
        (copy / name).write_text(text.replace(before, entry + before, 1), encoding="utf-8")
    return copy


def test_every_kind_of_extension_has_its_files():
    sections = re.findall(r"^## (Add .+)$", TEXT, re.MULTILINE)
    assert sections == [
        "Add an advantage estimator",
        "Add a policy loss",
        "Add a reward",
        "Add an engine",
        "Add a model",
    ]
    assert len(FILES) == 2 * len(sections) == 2 * len(TESTS)
    assert TEXT.count("```python\n") == len(FILES), "a block of Python has no line `path`: above it"


def test_the_examples_pass_the_linters(tree):
    passes(run(tree, "-m", "ruff", "check", "--no-cache", *FILES))
    passes(run(tree, "-m", "ruff", "format", "--no-cache", "--diff", *FILES))


def test_the_examples_pass_mypy(tree):
    typed = [name for name in FILES if name not in TESTS]
    # With the cache of scripts/test.sh, which runs mypy first, it need not read torch again.
    if (ROOT / ".mypy_cache").is_dir():
        shutil.copytree(ROOT / ".mypy_cache", tree / ".mypy_cache")
    passes(run(tree, "-m", "mypy", *typed))


def test_the_examples_keep_the_rules_of_the_house(tree):
    own = {checks.module_name(name) for name in FILES if name not in TESTS}
    modules = {checks.module_name(path.relative_to(tree)) for path in (tree / "verl").rglob("*.py")}
    assert own <= modules
    for name in FILES:
        source = (tree / name).read_text(encoding="utf-8")
        problems = [problem for rule in checks.rules_for(Path(name)) for problem in rule(name, source)]
        problems += [] if name in TESTS else checks.check_floors(name, source, modules)
        assert problems == []


def test_the_examples_pass_their_tests_and_those_of_every_estimator_and_loss(tree):
    shared = [f"tests/algos/test_{name}_on_cpu.py" for name in ("option_names", "advantages", "policy_losses")]
    words = "option_names or median or unclipped or registered or anagrams or bigram"
    tests = [name for name in TESTS if name != MODEL_TEST]
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", words, *shared, *tests)
    passes(done)
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 50


def test_a_place_without_its_entry_is_noticed(tree):
    done = run(tree, "-c", UNDO)
    passes(done)
    assert done.stdout.count("noticed") == 9


@pytest.mark.slow
def test_the_example_of_a_model_is_registered_and_passes_the_checks_before_a_start(tree, tmp_path):
    passes(run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", MODEL_TEST))
    passes(run(tree, "-c", BOTH_WAYS))
    model = tmp_path / "model"
    passes(run(tree, "scripts/init_random_model.py", "--out", str(model)))
    config = (model / "config.json").read_text(encoding="utf-8")
    config = config.replace("Qwen3MoeForCausalLM", "HouseForCausalLM").replace('"qwen3_moe"', '"house"')
    (model / "config.json").write_text(config, encoding="utf-8")
    done = run(tree, "-m", "verl.trainer.main_ppo", "trainer.dry_run=True", f"actor_rollout_ref.model.path={model}")
    assert "data.train_files" in done.stdout and "megatron-bridge cannot load" not in done.stdout, done.stdout


def test_the_checks_before_a_start_know_an_own_bridge(tmp_path, monkeypatch):
    known = preflight_sources.supported_architectures()
    name = "verl/models/mcore/bridge_house.py"
    (tmp_path / Path(name).name).write_text(FILES[name], encoding="utf-8")
    monkeypatch.setattr(preflight_sources, "_OWN_BRIDGES", tmp_path)
    caches = (preflight_sources._bridge_files, preflight_sources.provider_fields)
    try:
        for cache in caches:
            cache.cache_clear()
        assert preflight_sources.supported_architectures() - known == {"HouseForCausalLM"}
        fields = set(preflight_sources.provider_fields("HouseForCausalLM"))
        assert fields >= set(preflight_sources.provider_fields("Qwen3MoeForCausalLM"))
    finally:
        for cache in caches:
            cache.cache_clear()


def test_the_engine_is_built_as_the_worker_builds_one():
    worker = ast.parse((ROOT / "verl/workers/engine_workers.py").read_text(encoding="utf-8"))
    call = next(n for n in ast.walk(worker) if isinstance(n, ast.Call) and ast.unparse(n.func) == "EngineRegistry.new")
    engine = ast.parse(FILES["verl/workers/engine/bigram/engine.py"])
    init = next(n for n in ast.walk(engine) if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    assert [word.arg for word in call.keywords] == [argument.arg for argument in init.args.args[1:]]


def test_the_page_lists_the_modules_and_types_of_a_title():
    script = load_script("check_pr_title.py")
    for word, known in (("Types", script.TYPES), ("Modules", script.MODULES)):
        listed = re.search(rf"^- {word}: (.*?)\.\s", TEXT, re.MULTILINE | re.DOTALL)[1]
        assert re.findall(r"`(\w+)`", listed) == list(known)
