# SPDX-License-Identifier: Apache-2.0
"""A name that the configuration accepts is a name that the code knows and the pages tell, and the other way round.

CONTRIBUTING.md lists the places where a new estimator or loss is entered. Here each of them is compared with
verl/workers/config/names.py, and a failure says which file lacks what.
"""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import verl.trainer.ppo.core_algos as core_algos
from verl.algos import advantage, policy_loss
from verl.algos.kl import kl_penalty
from verl.algos.registry import Registry
from verl.workers.config.names import ADV_ESTIMATORS, KL_PENALTIES, POLICY_LOSSES

ROOT = Path(__file__).resolve().parents[2]
NAMES_FILE = "verl/workers/config/names.py"
KINDS = {
    "advantage": (ADV_ESTIMATORS, "ADV_ESTIMATORS", advantage.ADV_ESTIMATOR_REGISTRY, advantage),
    "policy_loss": (POLICY_LOSSES, "POLICY_LOSSES", policy_loss.POLICY_LOSS_REGISTRY, policy_loss),
}
TABLES = {"advantage": "## 1. Advantage estimators", "policy_loss": "## 2. Policy losses"}
COMMENTS = {
    "advantage": ("verl/trainer/config/ppo_trainer.yaml", "adv_estimator"),
    "policy_loss": ("verl/trainer/config/actor/megatron_actor.yaml", "loss_mode"),
}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def differences(place: str, found, known) -> str:
    """What to change at a place so that it names what names.py does; empty if it does."""
    lacks, more = sorted(set(known) - set(found)), sorted(set(found) - set(known))
    said = [f"add {', '.join(lacks)}"] if lacks else []
    said += [f"take out {', '.join(more)}, or add it to {NAMES_FILE}"] if more else []
    return f"{place}: {'; '.join(said)}" if said else ""


def names_in_table(text: str, heading: str) -> list[str]:
    """The names in the first column of the table below a heading."""
    section = text.partition(heading)[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def names_in_comment(text: str, key: str) -> list[str]:
    """The names that the comment above a yaml key lists between its colon and the word module:function."""
    lines = text.splitlines()
    end = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
    start = end
    while lines[start - 1].strip().startswith("#"):
        start -= 1
    comment = " ".join(line.strip(" #") for line in lines[start:end])
    listed = comment.partition(":")[2].partition("; or module:function")[0]
    return [name.strip() for name in re.sub(r"\([^)]*\)", "", listed).split(",")]


def files_of(kind: str) -> list[str]:
    """The modules of a kind, without the one that brings them together."""
    return sorted(path.stem for path in (ROOT / "verl/algos").glob(f"{kind}_*.py"))


def missing_exports(registry: Registry, face: ModuleType) -> list[str]:
    functions = {registry.get(name).__name__ for name in registry.names()}
    return [
        f"{module.__name__.replace('.', '/')}.py: import {name} and put it into __all__"
        for module in (face, core_algos)
        for name in sorted(functions - set(module.__all__))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_is_imported_and_on_the_page_of_the_reference(kind):
    for stem in files_of(kind):
        assert f"from verl.algos.{stem} import" in read(f"verl/algos/{kind}.py"), (
            f"verl/algos/{kind}.py: import from verl.algos.{stem}; without it nothing in that file is registered"
        )
        line = f".. automodule:: verl.algos.{stem}\n"
        assert line in read("docs/api/algos.md"), f"docs/api/algos.md: add the line {line.strip()}"


@pytest.mark.parametrize("kind", KINDS)
def test_registries_hold_what_the_configuration_accepts(kind):
    known, constant, registry, _ = KINDS[kind]
    unknown = sorted(set(registry.names()) - set(known))
    assert not unknown, f"{NAMES_FILE}: add {', '.join(unknown)} to {constant}"
    unregistered = sorted(set(known) - set(registry.names()))
    assert not unregistered, f"{', '.join(unregistered)} of {constant} in {NAMES_FILE}: no function is registered so"
    assert len(known) == len(set(known)), f"{NAMES_FILE}: a name stands twice in {constant}"


def test_the_enumeration_of_estimators_has_every_name():
    members = {member.value for member in core_algos.AdvantageEstimator}
    problem = differences("verl/algos/advantage_base.py, AdvantageEstimator", members, ADV_ESTIMATORS)
    assert not problem, problem


@pytest.mark.parametrize("kind", KINDS)
def test_every_registered_function_is_exported(kind):
    problems = missing_exports(*KINDS[kind][2:])
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_algorithms_has_every_name(kind):
    found = names_in_table(read("docs/algorithms.md"), TABLES[kind])
    problem = differences(f"docs/algorithms.md, first column of the table of {TABLES[kind]!r}", found, KINDS[kind][0])
    assert not problem, problem


@pytest.mark.parametrize("kind", KINDS)
def test_the_comment_at_the_key_has_every_name(kind):
    file, key = COMMENTS[kind]
    problem = differences(f"{file}, comment above {key}", names_in_comment(read(file), key), KINDS[kind][0])
    assert not problem, problem


def test_the_refusal_shown_by_the_page_of_the_dry_run_has_every_estimator():
    page, expected = " ".join(read("docs/start/dry_run.md").split()), ", ".join(ADV_ESTIMATORS)
    shown = re.search(r"'gppo' is not known; choose one of (.*?), or module:function", page)[1]
    assert shown == expected, f"docs/start/dry_run.md, in the refusal of 'gppo': choose one of {expected}"


def test_a_name_that_is_missing_or_too_much_is_found():
    table = "## 1. A\n\n| name | x |\n|---|---|\n| `a`, `b_c` | `d` |\n\n## 2. B\n\n| `e` | |\n"
    assert names_in_table(table, "## 1. A") == ["a", "b_c"] and names_in_table(table, "## 2. B") == ["e"]
    comment = "x:\n\n  # Names: a (the only, one), b,\n  # c; or module:function for one of your own.\n  key: a\n"
    assert names_in_comment(comment, "key") == ["a", "b", "c"]
    assert differences("file", ["a", "x"], ["a", "b"]) == f"file: add b; take out x, or add it to {NAMES_FILE}"
    assert differences("file", ["b", "a"], ["a", "b"]) == ""
    face = ModuleType("verl.algos.face")
    face.__all__ = []
    registry = Registry("thing", "a.key")
    registry.register("n")(advantage.compute_gae_advantage_return)
    said = "verl/algos/face.py: import compute_gae_advantage_return and put it into __all__"
    assert missing_exports(registry, face) == [said]


def test_every_accepted_kl_type_is_computed():
    for name in KL_PENALTIES:
        assert kl_penalty(torch.ones(2), torch.ones(2), name).tolist() == [0.0, 0.0]


def test_the_face_exports_what_it_promises():
    assert all(hasattr(core_algos, name) for name in core_algos.__all__)
