# SPDX-License-Identifier: Apache-2.0
"""The documentation builds without a warning, and what is built holds every page, entry and link target."""

import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.special_sanity.checks import REPO_ROOT

DOCS = REPO_ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md") if "_build" not in path.parts)
# One or more of every group of things that users import.
ENTRIES = """
    verl.protocol.DataProto.concat verl.utils.tensordict_utils.chunk_tensordict
    verl.workers.utils.padding.left_right_2_no_padding verl.utils.seqlen_balancing.rearrange_micro_batches
    verl.single_controller.base.decorator.register verl.single_controller.ray.base.RayWorkerGroup
    verl.single_controller.ray.resource_pool.RayResourcePool verl.single_controller.base.worker.Worker
    verl.algos.aggregation.agg_loss verl.algos.advantage_groups.compute_grpo_outcome_advantage verl.algos.kl.kl_penalty
    verl.algos.policy_loss_base.register_policy_loss verl.algos.value_loss.compute_value_loss
    verl.workers.utils.losses.ppo_loss verl.utils.metric.Metric.merge verl.workers.engine.base.BaseEngine.train_batch
    verl.workers.engine.base.EngineRegistry verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead
    verl.workers.engine.megatron.value_head.MegatronEngineWithValueHead
    verl.workers.engine.megatron.loss_scale.LossScale
    verl.models.mcore.packing.PackLayout.padding_mask verl.models.mcore.mtp_patch.prepare
    verl.workers.engine_workers.ActorRolloutRefWorker verl.workers.engine_workers.TrainingWorker
    verl.workers.config.engine.McoreEngineConfig verl.workers.config.model.HFModelConfig
    verl.workers.config.rollout.RolloutConfig verl.workers.config.actor.ActorConfig
    verl.workers.reward_manager.naive.NaiveRewardManager verl.trainer.ppo.reward.load_reward_manager
    verl.workers.rollout.base.BaseRollout verl.trainer.ppo.ray_trainer.RayPPOTrainer verl.trainer.sft_trainer.SFTTrainer
    verl.utils.memory_estimate.estimate_memory verl.trainer.dry_run.report.build_report
    verl.utils.tokenizer.hf_tokenizer verl.utils.dataset.rl_dataset.RLHFDataset verl.utils.tracking.Tracking
""".split()


def build(source: Path, target: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True, cwd=source, env=os.environ | {"NO_COLOR": "1"})


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(DOCS, target)
    warnings = [line for line in done.stderr.splitlines() if re.search(r"\b(WARNING|ERROR)\b", line)]
    assert done.returncode == 0, "\n".join(["", *warnings]) if warnings else done.stderr
    return target


def read_links(site: Path) -> tuple[dict[str, set[str]], list[tuple[str, str]]]:
    """Anchors of each built page, and every link from a page to one of the site."""
    anchors, links = {}, []
    for path in site.rglob("*.html"):
        page, text = str(path.relative_to(site)), path.read_text(encoding="utf-8")
        anchors[page] = {unescape(name) for name in re.findall(r'\bid="([^"]+)"', text)}
        for href in re.findall(r'<a [^>]*href="([^"]+)"', text):
            if not re.match(r"[a-z]+:", href):
                links.append((page, unquote(unescape(href))))
    return anchors, links


def broken_links(site: Path) -> list[str]:
    anchors, links = read_links(site)
    broken = []
    for page, href in links:
        name, _, anchor = href.partition("#")
        target = os.path.normpath(Path(page).parent / name) if name else page
        if not (site / target).exists() or (anchor and anchor not in anchors.get(target, {anchor})):
            broken.append(f"{page} -> {href}")
    return broken


@pytest.mark.timeout(240)
def test_every_page_and_every_entry_is_there(site):
    missing = [str(page) for page in PAGES if not (site / page.with_suffix(".html")).is_file()]
    assert not missing and len(PAGES) > 15
    ids = set().union(*read_links(site)[0].values())
    assert [name for name in ENTRIES if name not in ids] == []


def test_every_name_under_verls_import_path_of_the_algorithms_is_documented(site):
    from verl.trainer.ppo import core_algos

    last_names = {name.rpartition(".")[2] for name in set().union(*read_links(site)[0].values())}
    constants = {name for name in core_algos.__all__ if name.isupper()}
    missing = sorted(set(core_algos.__all__) - constants - last_names)
    assert not missing, f"docs/api/algos.md: add an automodule line for the file of {', '.join(missing)}"


def test_every_link_leads_somewhere(site):
    assert broken_links(site) == []
    links = read_links(site)[1]
    assert ("layouts.html", "objective.html#four-counts") in links
    assert any(page == "api/engine.html" and href.endswith("base.BaseEngine.initialize") for page, href in links)
    assert sorted(path.name for path in (site / "_images").glob("layouts_*.svg"))


def small_tree(folder: Path, index: str) -> Path:
    """Documentation of one page with this repository's settings."""
    docs = folder / "docs"
    (docs / "_static").mkdir(parents=True)
    (folder / "verl" / "version").mkdir(parents=True)
    shutil.copy(REPO_ROOT / "verl" / "version" / "version", folder / "verl" / "version")
    shutil.copy(DOCS / "conf.py", docs)
    (docs / "index.md").write_text(index, encoding="utf-8")
    return docs


def test_a_small_tree_without_a_fault_builds(tmp_path):
    page = "# Title\n\n## 1. One\n\n[a](#1-one)\n\n```{eval-rst}\n.. py:function:: ours\n\nUses :func:`ours`.\n```\n"
    done = build(small_tree(tmp_path, page), tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert broken_links(tmp_path / "site") == []


def test_planted_faults_make_the_build_fail(tmp_path):
    faults = {
        "[a](missing.md)": "missing.md",
        "[a](#no-heading)": "no-heading",
        "![a](missing.svg)": "missing.svg",
        "```{toctree}\nno_such_page\n```": "no_such_page",
        "```{eval-rst}\nSee :func:`verl.no_such_function`.\n```": "verl.no_such_function",
        "```{eval-rst}\n.. automodule:: verl.no_such_module\n```": "verl.no_such_module",
        "```{no_such_directive}\n```": "no_such_directive",
    }
    docs = small_tree(tmp_path, "# Title\n\n" + "\n\n".join(faults) + "\n")
    (docs / "forgotten.md").write_text("# In no toctree\n", encoding="utf-8")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    for word in [*faults.values(), "forgotten.md"]:
        assert word in done.stderr, (word, done.stderr)


def test_a_dead_anchor_in_a_built_page_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<p id="x"><a href="#x">y</a> <a class="r" href="#z">y</a> <a href="b.html">y</a>')
    assert broken_links(tmp_path) == ["a.html -> #z", "a.html -> b.html"]
