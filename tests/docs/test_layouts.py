# SPDX-License-Identifier: Apache-2.0
"""The pages about layouts and the engine say what the code does: pictures, examples, the list of patches."""

import doctest
import inspect
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from tests.scripts.loading import load_script
from tests.special_sanity.checks import REPO_ROOT

draw = load_script("draw_layouts.py")
PAGES = sorted(path for path in (REPO_ROOT / "docs").rglob("*.md") if "```pycon" in path.read_text(encoding="utf-8"))


def test_the_pictures_are_those_that_the_code_draws(tmp_path):
    # In a process of its own, because it prepares this machine for Megatron.
    script = str(REPO_ROOT / "scripts" / "draw_layouts.py")
    environment = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    done = subprocess.run([sys.executable, script, "--out", str(tmp_path)], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    for name in draw.PICTURES:
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        ElementTree.fromstring(drawn)
        assert drawn == (draw.FOLDER / name).read_text(encoding="utf-8"), f"{name}: run python3 scripts/draw_layouts.py"


def test_a_changed_split_changes_the_picture(monkeypatch):
    before = draw.zigzag_picture(), draw.balance_picture()
    monkeypatch.setattr(draw, "zigzag_indices", lambda lengths, size, rank: draw.torch.arange(8) + 8 * rank)
    assert draw.balance_picture() != before[1] and "100 query-key pairs" in draw.balance_picture().split("zigzag")[1]
    monkeypatch.setattr(draw, "roll_left_within_sequences", lambda values, lengths: values.roll(-1))
    assert draw.zigzag_picture() != before[0]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_examples_of_a_page_give_what_it_says(path):
    blocks = re.findall(r"^( *)```pycon\n(.*?)^\1```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = "\n".join(re.sub(f"^{indent}", "", block, flags=re.MULTILINE) for indent, block in blocks)
    test = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    assert test.examples
    said = []
    outcome = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert outcome.failed == 0, "".join(said)


def test_every_patch_of_megatron_core_is_listed():
    from verl.models.mcore.patch import apply_patches

    applied = set(re.findall(r"^    (_\w+)\(\)$", inspect.getsource(apply_patches), re.MULTILINE))
    page = (REPO_ROOT / "docs" / "megatron_engine.md").read_text(encoding="utf-8")
    rows = page.partition("## What is mended in megatron-core")[2].partition("\n## ")[0]
    assert applied and set(re.findall(r"`(_\w+)`", rows)) == applied
