# SPDX-License-Identifier: Apache-2.0
"""The pages about rewards, data, rollout, checkpoints, performance, faults and migration say what the code does.

The tables of refused, moved and effectless keys are written into the migration page from the checks' own tables:
``python3 -m tests.docs.test_pages_on_cpu``.
"""

import ast
import json
import re
from pathlib import Path

import pytest

from tests.special_sanity.checks import REPO_ROOT
from tests.trainer.config.files import PROMPT, write_files, write_rows
from verl.trainer.ppo import preflight_tables as tables
from verl.trainer.ppo.preflight import validate_ppo_config
from verl.utils.config import compose_config, default_tree, flatten

DOCS = REPO_ROOT / "docs"
MIGRATION = DOCS / "migration.md"
NAMES = ("rewards", "data", "rollout", "checkpoints", "performance", "faq", "migration")
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}
_MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Where each group of keys stands in the two trees; the table of the checks that lists it goes by name.
_ENGINES = ("actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron", "critic.megatron", "engine")
_MODELS = ("actor_rollout_ref.model", "critic.model", "model")
_CHECKPOINTS = ("actor_rollout_ref.actor.checkpoint", "critic.checkpoint", "checkpoint")
WORDS = {_ENGINES: "ENGINE", _MODELS: "MODEL", _CHECKPOINTS: "CHECKPOINT"}
PLACES = {
    "ENGINE_REFUSED": _ENGINES,
    "ENGINE_NO_EFFECT": _ENGINES,
    "MODEL_REFUSED": ("actor_rollout_ref.model", "model"),
    "MODEL_NO_EFFECT": _MODELS,
    "CRITIC_MODEL_REFUSED": ("critic.model",),
    "CHECKPOINT_REFUSED": _CHECKPOINTS,
    "PPO_REFUSED": ("",),
    "PPO_NO_EFFECT": ("",),
    "SFT_REFUSED": ("",),
    "SFT_NO_EFFECT": ("",),
}


# ------------------------------------------------------------------ tables of the migration page
def shown(value: object) -> str:
    return "null" if value is None else f"`{value}`"


def placed(name: str, key: str) -> str:
    """The key with where it stands; a word of the page for three places and more."""
    places = PLACES[name]
    return ", ".join(f"`{f'{place}.{key}'.lstrip('.')}`" for place in ([WORDS[places]] if places in WORDS else places))


def refused_table() -> list[str]:
    rows = ["| key | only | instead |", "|---|---|---|"]
    for name in (name for name in PLACES if name.endswith("_REFUSED")):
        for key, (inert, instead) in getattr(tables, name).items():
            rows.append(f"| {placed(name, key)} | {shown(inert)} | {instead} |")
    return rows


def no_effect_table() -> list[str]:
    rows = ["| key | why |", "|---|---|"]
    for name in (name for name in PLACES if name.endswith("_NO_EFFECT")):
        rows += [f"| {placed(name, key)} | {why} |" for key, why in getattr(tables, name).items()]
    rows += [f"| `actor_rollout_ref.rollout.{key}` | for rollout servers |" for key in tables.ROLLOUT_SERVER_ONLY]
    for key, readers in tables.READ_BY_ESTIMATORS.items():
        rows.append(f"| `{key}` | read by {' and '.join(f'`{reader}`' for reader in readers)} only |")
    return [*rows, "| every key below `critic`, without a critic | there is none |"]


def moved_table() -> list[str]:
    rows = ["| key, group, or last part of either | advice |", "|---|---|"]
    return rows + [f"| `{key}` | {advice.replace('{parent}', 'GROUP')} |" for key, advice in tables.MOVED.items()]


TABLES = {"refused": refused_table, "no effect": no_effect_table, "moved": moved_table}


def with_tables(source: str) -> str:
    """The migration page with its three tables written anew."""
    return _MARKED.sub(lambda match: match[1] + "\n" + "\n".join(TABLES[match[2]]()) + "\n\n" + match[3], source)


def test_the_tables_of_keys_are_those_of_the_checks():
    assert [match[2] for match in _MARKED.finditer(PAGES["migration"])] == ["refused", "moved", "no effect"]
    assert with_tables(PAGES["migration"]) == PAGES["migration"], "python3 -m tests.docs.test_pages_on_cpu writes them"


def test_the_page_says_what_its_words_stand_for():
    said = PAGES["migration"].split("In the tables, ")[1].split("\n\n")[0].split(";")
    for places, word in WORDS.items():
        line = next(part for part in said if f"`{word}`" in part)
        assert set(re.findall(r"`([^`]+)`", line)) == {word, *places}


def test_no_table_of_the_checks_is_left_out():
    listed = {name for name in vars(tables) if name.endswith(("_REFUSED", "_NO_EFFECT"))}
    assert listed == set(PLACES)
    keys = {cfg: flatten(default_tree(cfg)) for cfg in ("ppo_trainer", "sft_trainer_engine")}
    known = {key for tree in keys.values() for key in tree}
    for name, places in PLACES.items():
        for place in places:
            for key in getattr(tables, name):
                full = f"{place}.{key}" if place else key
                is_there = full in known or any(have.startswith(f"{full}.") for have in known)
                # Fields of a free-form group are not in the tree; what refused keys the reference and SFT lack either.
                assert is_there or ".override_" in f".{full}" or place.startswith("actor_rollout_ref.ref"), full


def test_defaults_that_differ_are_those_of_the_tree():
    ppo = default_tree("ppo_trainer")
    assert ppo["model_engine"] == "megatron" and ppo["trainer"]["device"] is None
    assert default_tree("sft_trainer_engine")["engine"]["strategy"] == "megatron"
    assert ppo["actor_rollout_ref"]["actor"]["megatron"]["per_token_loss_guards"] is True


def test_the_imports_on_the_page_work():
    block, found = re.search(r"```python\n(.*?)```", PAGES["migration"], re.DOTALL)[1], {}
    exec(block, found)
    assert {"DataProto", "RayPPOTrainer"} <= set(found)


def test_the_script_that_is_moved_over_ends_as_the_page_says(tmp_path, caplog):
    files, a = write_files(tmp_path), "actor_rollout_ref"
    transformer = f"{a}.actor.megatron.override_transformer_config"
    common = [
        *("algorithm.adv_estimator=grpo", f"data.train_files={files.prompts}", f"data.val_files={files.prompts}"),
        *("data.train_batch_size=8", "data.max_prompt_length=1024", "data.max_response_length=2048"),
        *(f"{a}.model.path={files.model}", f"{a}.model.use_fused_kernels=True", f"{a}.actor.use_kl_loss=True"),
        *(f"{a}.actor.ppo_mini_batch_size=8", f"{a}.actor.use_dynamic_bsz=True"),
        *(f"{a}.actor.megatron.{size}_parallel_size=2" for size in ("tensor_model", "pipeline_model", "expert_model")),
        *(f"{a}.actor.megatron.context_parallel_size=2", f"{a}.actor.megatron.param_offload=True"),
        *(f"{a}.actor.megatron.grad_offload=True", f"{a}.actor.megatron.optimizer_offload=True"),
        *(f"+{transformer}.recompute_granularity=full", f"+{transformer}.recompute_method=uniform"),
        *(f"+{transformer}.recompute_num_layers=1", f"+{transformer}.moe_router_dtype=fp32"),
        *(f"{a}.rollout.tensor_model_parallel_size=4", f"{a}.rollout.gpu_memory_utilization=0.6", f"{a}.rollout.n=5"),
        *("trainer.n_gpus_per_node=8", "trainer.nnodes=1"),
    ]
    old = [f"{a}.rollout.name=vllm", "reward_model.reward_manager=dapo"]
    old.append("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True")
    with pytest.raises(ValueError) as refused:
        validate_ppo_config(compose_config("ppo_trainer", [*common, *old]), {})
    assert f"```text\n{refused.value}\n```" in PAGES["migration"]
    new = [f"{a}.rollout.name=hf", "reward.reward_manager.name=dapo"]
    new += [f"+reward.reward_kwargs.overlong_buffer_cfg.{setting}" for setting in ("enable=True", "len=512")]
    validate_ppo_config(compose_config("ppo_trainer", [*common, *new]), {})
    named = re.findall(r"([\w.]+)=\S+ \(", caplog.records[-1].getMessage())
    last_parts = ["use_fused_kernels", "gpu_memory_utilization", "tensor_model_parallel_size", "grad_offload"]
    assert [key.rpartition(".")[2] for key in named] == last_parts


# ------------------------------------------------------------------ tests that pages name
def named_tests(source: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[[^`]*\])?`", source)


@pytest.mark.parametrize("page", NAMES)
def test_the_tests_that_a_page_names_exist(page):
    found = named_tests(PAGES[page])
    if page == "faq":
        assert len(found) > 60
    for path, name in found:
        tree = ast.parse((REPO_ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"
    # A test without its file counts for the file named last before it.
    for name in re.findall(r"`(test_\w+)`", PAGES[page]):
        text = "".join((REPO_ROOT / path).read_text() for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGES[page]))
        assert f"def {name}(" in text, name


def test_every_question_has_an_answer_and_none_is_asked_twice():
    parts = re.split(r"^### (.+)$", PAGES["faq"], flags=re.MULTILINE)[1:]
    questions = dict(zip(parts[::2], parts[1::2], strict=True))
    assert len(questions) == len(parts) // 2 > 40
    for question, answer in questions.items():
        assert len(answer.split()) > 12, question
        assert named_tests(answer) or re.search(r"\]\(\w+\.md", answer), f"{question}: no test and no page"


# ------------------------------------------------------------------ defaults, names, folders
@pytest.mark.parametrize(
    ("page", "section", "tree", "below"),
    [
        ("rollout", "Sampling", "ppo_trainer", "actor_rollout_ref.rollout."),
        ("data", "Prompt rows", "ppo_trainer", ""),
        ("data", "Conversations", "sft_trainer_engine", ""),
    ],
)
def test_quoted_defaults_are_those_of_the_tree(page, section, tree, below):
    part = PAGES[page].split(f"## {section}")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|[^|]+\|$", part.split("default | meaning |")[1], re.MULTILINE)
    assert len(rows) > 5
    defaults = flatten(default_tree(tree))
    for key, value in rows:
        assert str(defaults[below + key]).replace("None", "null") == value.strip(), key


def test_reward_page_lists_managers_kwargs_and_data_sources():
    from verl.utils.reward_score import known_data_sources
    from verl.workers.config.reward import REWARD_MANAGERS, DapoScoringConfig, OverlongBufferConfig, ScoringConfig

    page = PAGES["rewards"]
    managers = page.split("## Managers")[1].split("\n## ")[0]
    first, second = managers.split("| key | default | meaning |")
    assert set(re.findall(r"^\| `(\w+)` \|", first, re.MULTILINE)) == set(REWARD_MANAGERS)
    assert set(re.findall(r"^\| `(\w+)` \|", second, re.MULTILINE)) == set(vars(DapoScoringConfig())) - {"_target_"}
    assert "| `timeout` | 300 |" in second and ScoringConfig().timeout == 300
    buffer = OverlongBufferConfig()
    assert f"`enable` ({buffer.enable}), `len`, `penalty_factor` ({buffer.penalty_factor})" in second
    rules = page.split("## Rules by data source")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", rules.split("| right is | score |")[1], re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)} == set(known_data_sources())


def test_the_score_function_on_the_page_runs():
    code = re.search(r"```python\n(.*?)```", PAGES["rewards"], re.DOTALL)[1]
    scope: dict = {}
    exec(code, scope)
    row = {"data_source": "mine", "ground_truth": 42}
    assert scope["compute_score"](solution_str=" 42", extra_info={"finished": True}, **row) == {
        "score": 1.0,
        "format": 1.0,
    }
    assert scope["compute_score"](solution_str="42", extra_info={"finished": False}, **row)["score"] == 0.0


def test_rollout_page_lists_the_server_keys():
    part = PAGES["rollout"].split("| accepted without effect |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `([\w.]+)` \|$", part, re.MULTILINE)) == tables.ROLLOUT_SERVER_ONLY
    val = default_tree("ppo_trainer")["actor_rollout_ref"]["rollout"]["val_kwargs"]
    said = "`n` (1), `do_sample` (False), `temperature` (0.0), `top_k` (-1), `top_p` (1.0)"
    assert said in PAGES["rollout"]
    assert all(f"`{key}` ({value})" in said for key, value in val.items() if key != "_target_")


def test_checkpoint_page_names_the_folders_and_parts_of_the_code():
    from verl.trainer.ppo.checkpointing import CONTROLLER_FILE, HF_FOLDER
    from verl.utils.checkpoint.megatron_checkpoint import _FOLDER
    from verl.utils.checkpoint_folder import MARKER
    from verl.workers.config.names import CHECKPOINT_CONTENTS

    page = PAGES["checkpoints"]
    tree = page.split("```text\n")[1].split("```")[0]
    for name in (MARKER, CONTROLLER_FILE, f"{_FOLDER}/", f"{HF_FOLDER}/", "extra_rank_0.pt", "global_step_20/"):
        assert name in tree, name
    parts = page.split("| part | holds |")[1].split("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", parts, re.MULTILINE)) == CHECKPOINT_CONTENTS
    trainer, sft = default_tree("ppo_trainer")["trainer"], default_tree("sft_trainer_engine")["trainer"]
    for tree in (trainer, sft):
        assert tree["save_freq"] == -1 and tree["resume_mode"] == "auto"
    modes = re.findall(
        r"^\| `(\w+)` \|", page.split("`trainer.resume_mode` | starts")[1].split("\n\n")[0], re.MULTILINE
    )
    assert tuple(modes) == tables.ONE_OF["ppo_trainer"]["trainer.resume_mode"]


def test_performance_page_quotes_the_benchmark():
    result = json.loads((REPO_ROOT / "scripts/bench/results/grpo_step.json").read_text())
    table = PAGES["performance"].split("| phase |")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE))
    assert {name: float(value) for name, value in rows.items()} == {
        name: spread["median"] for name, spread in result["milliseconds"].items()
    }
    said = f"{result['workers']} workers with context parallel size {result['context_parallel_size']}, medians of"
    assert said in PAGES["performance"] and f"{result['steps']}\nsteps" in PAGES["performance"].split(said)[1]


# ------------------------------------------------------------------ what is said of bad data
def problems_of(files, path: Path) -> str:
    arguments = [*files.ppo_arguments, f"data.train_files={path}"]
    with pytest.raises(ValueError) as refused:
        validate_ppo_config(compose_config("ppo_trainer", arguments), {})
    return str(refused.value)


def test_bad_files_are_called_what_the_page_says(tmp_path):
    part = PAGES["data"].split("| wrong | said |")[1].split("\n\n")[0]
    said = dict(re.findall(r"^\| ([^|`]+|[^|]*`[^|]*) \| (.+) \|$", part, re.MULTILINE))
    files = write_files(tmp_path)
    (tmp_path / "rows.csv").write_text("a,b\n")
    (tmp_path / "broken.parquet").write_text("no parquet")
    (tmp_path / "empty.jsonl").write_text("")
    bad = {
        "no such file": tmp_path / "trains.parquet",
        "a folder": tmp_path,
        "another suffix": tmp_path / "rows.csv",
        "not what the suffix says": tmp_path / "broken.parquet",
        "a column is missing": write_rows(tmp_path / "raw.jsonl", [{"question": "1+1"}] * 16),
        "`prompt` without `role` and `content`": write_rows(tmp_path / "text.jsonl", [PROMPT | {"prompt": "17"}] * 16),
        "`reward_model` without `ground_truth`": write_rows(
            tmp_path / "truth.jsonl", [PROMPT | {"reward_model": {"style": "rule"}}] * 16
        ),
        "no rows": tmp_path / "empty.jsonl",
        "fewer rows than a batch": write_rows(tmp_path / "short.parquet", [PROMPT] * 2),
        "a data source without a rule": write_rows(tmp_path / "who.jsonl", [PROMPT | {"data_source": "nobody"}] * 16),
    }
    assert set(bad) == set(said) - {"---"}, set(said)
    for wrong, path in bad.items():
        problem = problems_of(files, path)
        for words in re.findall(r"`([^`]+)`", said[wrong]):
            assert words in problem, f"{wrong}: {words!r} is not in {problem}"


@pytest.mark.parametrize("name", ["Prompt rows", "Conversations"])
def test_the_example_rows_are_right(name):
    row = json.loads(re.search(r"```json\n(.*?)\n```", PAGES["data"].split(f"## {name}")[1], re.DOTALL)[1])
    if name == "Prompt rows":
        assert set(row) >= {"prompt", "data_source", "reward_model"} and "ground_truth" in row["reward_model"]
    assert all({"role", "content"} <= set(message) for message in row.get("prompt") or row["messages"])


if __name__ == "__main__":
    MIGRATION.write_text(with_tables(PAGES["migration"]), encoding="utf-8")
