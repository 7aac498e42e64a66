# SPDX-License-Identifier: Apache-2.0
"""Every shell block of the documentation runs here, or says by whom it is run, or why not."""

import re
from pathlib import Path

import pytest

from tests.docs.shell_blocks import Block, all_documents, check_mark, find_blocks, run_block
from tests.special_sanity.checks import REPO_ROOT
from verl.utils.tiny_model import save_tiny_qwen3_moe

PAGES = {path: find_blocks(path, (REPO_ROOT / path).read_text(encoding="utf-8")) for path in all_documents()}
RUN_HERE = {path: [block for block in blocks if block.is_run_here] for path, (blocks, _) in PAGES.items()}
QUICKSTART = Path("docs/start/quickstart.md")
REWARD = "def compute_score(data_source, solution_str, ground_truth, **kwargs):\n    return float(len(solution_str))\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("shell_blocks") / "model")
    return save_tiny_qwen3_moe(folder, hidden=32, heads=2, experts=4, moe_intermediate=32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like the repository, so that what a block writes lands in it."""
    for entry in REPO_ROOT.iterdir():
        if entry.name not in (".git", "outputs", "checkpoints", "data"):
            (tmp_path / entry.name).symlink_to(entry)
    from examples.data_preprocess.arithmetic import main

    main(["--local_save_dir", str(tmp_path)])
    (tmp_path / "my_reward.py").write_text(REWARD)
    return tmp_path


def test_blocks_are_found():
    assert sum(len(blocks) for blocks, _ in PAGES.values()) >= 8
    assert any(RUN_HERE[path] for path in (Path("README.md"), QUICKSTART))


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_every_block_says_who_runs_it(path):
    blocks, problems = PAGES[path]
    problems += [problem for block in blocks if (problem := check_mark(block))]
    assert not problems, "\n".join(["", *problems])


@pytest.mark.ray
@pytest.mark.timeout(420)
@pytest.mark.parametrize("path", [path for path, blocks in RUN_HERE.items() if blocks], ids=str)
def test_the_blocks_of_a_page_run_one_after_the_other(path, folder, model):
    said = ""
    for block in RUN_HERE[path]:
        done = run_block(block, folder, {"/path/to/hf/model": model})
        assert done.returncode == 0, f"{block}\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        said += done.stdout
    if path == QUICKSTART:  # its table of metrics to look at
        metrics = re.findall(r"^\| `([\w/]+)`", (REPO_ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
        assert len(metrics) >= 4 and [name for name in metrics if f"{name}:" not in said] == []


def problems_of(text: str) -> list[str]:
    blocks, problems = find_blocks(Path("docs/x.md"), text)
    return problems + [problem for block in blocks if (problem := check_mark(block))]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("```sh\nls\n```", "mark commands as bash"),
        ("```console\n$ ls\n```", "mark commands as bash"),
        ("```Bash\nls\n```", "mark commands as bash"),
        ("```\nbash scripts/test.sh\n```", "a block without a language; mark commands as bash"),
        ("~~~\nls\n~~~", "a block without a language"),
        ("~~~sh\nls\n~~~", "mark commands as bash"),
        ("> ```sh\n> ls\n> ```", "mark commands as bash"),
        ("- ```sh\n  ls\n  ```", "mark commands as bash"),
        ("```text\n$ ls\n~~~", "nothing closes this block"),
        ("<!-- not run: no time -->\n~~~bash\nls\n~~~", "the reasons that count"),
        ("<!-- not run: no time -->\n````bash\nls\n````", "the reasons that count"),
        ("<!-- not run: takes long -->\n```bash\nls\n```", "the reasons that count"),
        ("<!-- not run -->\n```bash\nls\n```", "the reasons that count"),
        ("<!-- skipped -->\n```bash\nls\n```", "no such mark"),
        ("<!-- dry run only -->\n```bash\npython3 -m verl.trainer.main_ppo\n```", "no such mark"),
        ("<!-- dry run only: hours -->\n```bash\nls\n```", "starts none"),
        ("<!-- run by tests/no_such.py -->\n```bash\nbash scripts/test.sh\n```", "does not exist"),
        ("<!-- run by tests/conftest.py -->\n```bash\nbash scripts/test.sh\n```", "does not name scripts/test.sh"),
        ("<!-- run by tests/conftest.py -->\n```bash\nls\n```", "does not name any command"),
    ],
)
def test_a_block_that_nobody_runs_is_found(text, word):
    problems = problems_of(f"# Title\n\n{text}\n")
    assert len(problems) == 1 and word in problems[0], problems


@pytest.mark.parametrize(
    "text",
    [
        "```bash\nls\n```",
        "<!-- not run: needs a GPU -->\n```bash\nls\n```",
        "- item\n\n  <!-- not run: needs Docker -->\n  ```bash\n  ls\n  ```",
        "<!-- run by tests/scripts/test_diagnose_on_cpu.py -->\n```bash\npython3 scripts/diagnose.py\n```",
        "```text\n$ ls\n```",
        "````text\n```sh\nls\n```\n````",
        "~~~text\n```\n~~~",
        "`code`, ```code in a line```",
    ],
)
def test_a_block_that_somebody_runs_passes(text):
    assert problems_of(f"# Title\n\n{text}\n") == []


def test_a_mark_counts_right_above_the_block_only():
    (block,), _ = find_blocks(Path("x.md"), "<!-- not run: needs a GPU -->\n\n```bash\nfalse\n```\n")
    assert block.is_run_here and block.line == 3


@pytest.mark.parametrize(
    ("text", "commands"),
    [
        ("~~~bash\nls\n~~~", "ls\n"),
        ("````bash\nls\n\n  pwd\n````", "ls\n\n  pwd\n"),
        ("1. ```bash\n   ls\n     pwd\n   ```", "ls\n  pwd\n"),
        ("> ```bash\n> ls\n> ```", "ls\n"),
    ],
)
def test_every_form_of_a_shell_block_is_run(text, commands):
    (block,), problems = find_blocks(Path("x.md"), f"# Title\n\n{text}\n")
    assert block.is_run_here and (block.line, block.text, problems) == (3, commands, [])


def test_a_block_that_fails_is_seen_at_its_first_failing_command(tmp_path):
    block = Block(Path("x.md"), 1, "echo PLACE\nfalse\ntouch late\n", "")
    done = run_block(block, tmp_path, {"PLACE": "here"})
    assert done.returncode != 0 and done.stdout == "here\n" and not (tmp_path / "late").exists()
