# SPDX-License-Identifier: Apache-2.0
"""Every link, file, script, module and config key that the documentation names exists."""

from pathlib import Path

import pytest

from tests.special_sanity import docs_links
from tests.special_sanity.checks import REPO_ROOT

DOCUMENTS = docs_links.documents()


def test_the_documents_are_found():
    assert {Path("README.md"), Path("CONTRIBUTING.md"), Path("docs/objective.md")} <= set(DOCUMENTS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_everything_named_exists(path):
    problems = docs_links.check_document(path, (REPO_ROOT / path).read_text(encoding="utf-8"))
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize(
    "text",
    [
        "[a](missing.md)",
        "[a](docs/objective.md#no-such-heading)",
        "[a](#nowhere)",
        "![a](docs/missing.svg 'title')",
        "[a]: missing.md",
        "[a](../../outside.md)",
        "see `scripts/missing.sh`",
        "see `verl/missing/`",
        "see `verl/trainer/missing_*.py`",
        "see `verl/missing/test_<name>.py`",
        "see `missing_script.py`",
        "see `requirements-missing.txt`",
        "```bash\nbash scripts/missing.sh\n```",
        "```bash\npython3 -m verl.trainer.missing\n```",
        "run scripts/missing.sh first",
        "`verl/algos/missing.py`:\n\n```text\nx = 1\n```",
        "write it to `verl/algos/missing.py`:\n\n```python\nx = 1\n```",
        "`tests/missing/test_x.py`, and more",
        "set `actor_rollout_ref.actor.megatron.context_parallel=2`",
        "set `megatron.context_parallel=2`",
        "the key `trainer.max_steps`",
        "`override_transformers_config.moe_z_loss_coeff=0.1`",
        "```bash\npython3 -m verl.trainer.main_ppo trainer.save_frequency=1\n```",
        "```bash\npython3 -m verl.trainer.sft_trainer trainer.max_ckpt=1 \\\n    trainer.total_epochs=1\n```",
    ],
)
def test_a_planted_fault_is_found(text):
    problems = docs_links.check_document(Path("README.md"), f"# Title\n\n{text}\n")
    assert len(problems) == 1, problems
    assert problems[0].startswith(("README.md:3: ", "README.md:4: "))


@pytest.mark.parametrize(
    "text",
    [
        "[a](LICENSE), [b](docs/objective.md#1-one-form), [c](#the-title), [d](https://example.org/x.md)",
        "see `scripts/test.sh`, `verl/utils/`, `verl/trainer/main_*.py`, `loss_scale.py`, `requirements.txt`",
        "```bash\npython3 -m verl.trainer.main_ppo data.train_files=x/train.parquet ~/verl/data.md\n```",
        "```text\n[a](missing.md)\n```",
        "`[a](missing.md)`",
        "the folder `outputs/quickstart/`, `/opt/scripts/x.sh`, `$HOME/docs/x.md`",
        "`tests/algos/test_<name>_on_cpu.py`, `verl/workers/engine/<backend>/`",
        "`verl/algos/mine.py`:\n\n```python\nx = 1\n```",
        "copy it to `scripts/mine.sh` <!-- not a file -->",
        "`trainer.save_freq=1`, `megatron.context_parallel_size`, `actor_rollout_ref.actor.megatron`, `data.pt`",
        "`+actor.megatron.override_transformer_config.moe_z_loss_coeff=1e-3`, `+reward.reward_kwargs.limit=2`",
        "`loss(config=x, y=2)`, `a.b == 2`, `https://x.org/?a.b=1`, `--key=1`, `hydra.run.dir=x`",
        "```bash\npython3 -m verl.trainer.main_ppo trainer.nnodes=1 hydra.run.dir=x x.y/trainer.z=1\n```",
        "<!-- not a key: trainer.no_such_key -->\n`trainer.no_such_key=1`, ```trainer.no_such_key=2```",
    ],
)
def test_what_exists_or_is_not_ours_passes(text):
    assert docs_links.check_document(Path("README.md"), f"# The title\n\n{text}\n") == []


@pytest.mark.parametrize("path", docs_links.scripts(), ids=str)
def test_everything_that_a_script_says_of_itself_exists(path):
    problems = docs_links.check_script(path, (REPO_ROOT / path).read_text(encoding="utf-8"))
    assert not problems, "\n".join(["", *problems])


def test_a_wrong_name_in_a_script_is_found():
    shell = "#!/usr/bin/env bash\n#   bash examples/missing.sh\nbash scripts/also_missing.sh\n"
    assert len(docs_links.check_script(Path("x.sh"), shell)) == 1
    python = '# SPDX\n"""Try `trainer.no_such_key=1`: python3 scripts/missing.py"""\nname = "scripts/x.py"\n'
    assert len(docs_links.check_script(Path("x.py"), python)) == 2


def test_headings_are_those_of_github():
    source = "# 1. One form\n## `agg_loss`, in *short*\n## Same\n## Same\n```\n# no heading\n```\n"
    assert docs_links.headings(source) == {"1-one-form", "agg_loss-in-short", "same", "same-1"}
