# SPDX-License-Identifier: Apache-2.0
"""Answering prompts and scoring responses: what is written, what the numbers are, and which commands are refused."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from tests.trainer.test_wrong_commands import ROOT, check, run
from verl.protocol import DataProto
from verl.trainer import main_eval, main_generation
from verl.utils.config import compose_config
from verl.utils.tiny_model import save_tiny_qwen3_moe


def row(i: int, source: str = "arithmetic", truth: str = "240") -> dict:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{17 + i}+2{i}="}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": i},
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("offline")
    save_tiny_qwen3_moe(str(folder / "model"), hidden=32, head_dim=8, experts=4, moe_intermediate=16)
    pd.DataFrame([row(i) for i in range(5)]).to_parquet(folder / "prompts.parquet")
    rows = [
        row(0) | {"responses": ["240", "240"], "finished": [True, False]},
        row(1) | {"responses": ["042", "1"], "finished": [True, True]},
        row(2, "aime2024", "33") | {"responses": ["Answer: 33", "Answer: 34"], "finished": [True, True]},
        row(3, "lighteval/MATH", "1/2") | {"responses": [r"\boxed{0.5}"] * 2, "finished": [True, True]},
    ]
    pd.DataFrame(rows).to_parquet(folder / "responses.parquet")
    pd.DataFrame([row(0, "nobody") | {"responses": ["1"]}]).to_parquet(folder / "unknown.parquet")
    pd.DataFrame([row(0) | {"responses": "240"}]).to_parquet(folder / "text.parquet")
    (folder / "mine.py").write_text(
        "def half(solution_str, ground_truth, data_source, extra_info, add=0.0):\n"
        "    if solution_str == '1':\n"
        "        raise RuntimeError('boom')\n"
        "    return {'score': 0.5 + add, 'acc': 'finished' in extra_info and extra_info['index'] == 0}\n"
    )
    return folder


def generation(files: Path, *changes: str) -> list[str]:
    return [
        *(f"data.path={files}/prompts.parquet", f"model.path={files}/model", f"data.output_path={files}/out.parquet"),
        *("data.n_samples=3", "data.batch_size=2", "rollout.prompt_length=8", "rollout.response_length=4"),
        *("rollout.dtype=float32", "trainer.n_gpus_per_node=1", "trainer.device=cpu", *changes),
    ]


def evaluate(files: Path, *changes: str) -> dict:
    config = compose_config(
        "evaluation", [f"data.path={files}/responses.parquet", f"data.output_path={files}/scores.json", *changes]
    )
    main_eval.prepare(config)()
    return json.loads((files / "scores.json").read_text())


def test_every_row_gets_its_responses_and_keeps_its_columns(files):
    main_generation.prepare(compose_config("generation", generation(files)))()
    frame = pd.read_parquet(files / "out.parquet")
    assert [info["index"] for info in frame["extra_info"]] == list(range(5))
    assert frame["responses"].map(len).tolist() == frame["finished"].map(len).tolist() == [3] * 5
    texts = [text for texts in frame["responses"] for text in texts]
    assert all(isinstance(text, str) for text in texts) and len(set(texts)) > 5
    assert not list(files.glob("*.part"))
    # Greedy answers belong to their prompts: one batch of all rows answers as batches of two do.
    greedy = ["rollout.do_sample=False", "data.n_samples=1"]
    answers = []
    for size in (2, 5):
        main_generation.prepare(compose_config("generation", generation(files, *greedy, f"data.batch_size={size}")))()
        answers.append([list(texts) for texts in pd.read_parquet(files / "out.parquet")["responses"]])
    assert answers[0] == answers[1]


class Parrot:
    """A worker group that answers with the last four tokens of the prompt."""

    world_size = 2

    def generate_sequences(self, prompts):
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        return DataProto.from_dict(
            {
                "prompts": ids,
                "responses": ids[:, -4:],
                "attention_mask": torch.cat([mask, torch.ones_like(ids[:, -4:])], dim=1),
            }
        )


def test_the_responses_of_a_row_are_those_to_its_prompt(files):
    config = compose_config("generation", generation(files))
    texts, finished = main_generation.generate_texts(config, main_generation.Prompts(config), Parrot())
    assert texts == [[f"+2{i}="] * 3 for i in range(5)]
    assert finished == [[False] * 3] * 5


def test_only_the_first_rows_are_answered_when_asked_so(files):
    main_generation.prepare(compose_config("generation", generation(files, "data.max_samples=2")))()
    assert len(pd.read_parquet(files / "out.parquet")) == 2


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_answer_as_one_does(files, tmp_path):
    answers = []
    for workers in (1, 2):
        greedy = ["rollout.do_sample=False", "data.n_samples=1", f"trainer.n_gpus_per_node={workers}"]
        command = generation(files, *greedy, f"hydra.run.dir={tmp_path}", "ray_kwargs.ray_init.num_cpus=2")
        subprocess.run([sys.executable, "-m", "verl.trainer.main_generation", *command], cwd=ROOT, check=True)
        answers.append([list(texts) for texts in pd.read_parquet(files / "out.parquet")["responses"]])
    assert answers[0] == answers[1]


def test_pass_rates_are_those_of_the_rows(files):
    results = evaluate(files)
    # Right: one of row 0's two (the other was cut off), none of row 1's.
    assert results["arithmetic"] == {
        "num_prompts": 2,
        "num_responses": 4,
        "mean": 0.25,
        "pass@1": 0.25,
        "pass@2": 0.5,
        "num_failures": 0,
    }
    assert (results["aime2024"]["mean"], results["aime2024"]["pass@1"], results["aime2024"]["pass@2"]) == (0, 0.5, 1)
    assert results["lighteval/MATH"]["mean"] == results["lighteval/MATH"]["pass@2"] == 1.0


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_a_function_of_the_users_own_scores_and_its_failures_are_counted(files, executor):
    own = [f"custom_reward_function.path={files}/mine.py", "custom_reward_function.name=half"]
    results = evaluate(files, *own, "+custom_reward_function.reward_kwargs.add=0.25", f"scoring.executor={executor}")
    assert results["arithmetic"]["num_failures"] == 1
    assert results["arithmetic"]["mean"] == (0.75 * 3 + 0) / 4
    assert results["arithmetic"]["pass@2"] == 0.5  # by acc, of row 0
    assert results["aime2024"]["mean"] == 0.75


@pytest.mark.parametrize(
    ("total", "right", "k", "value"), [(4, 0, 1, 0.0), (4, 1, 1, 0.25), (4, 1, 4, 1.0), (4, 2, 2, 5 / 6), (3, 3, 1, 1)]
)
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(total, right, k, value):
    assert main_eval.pass_at_k(total, right, k) == pytest.approx(value)


def test_evaluation_needs_neither_torch_nor_ray(files):
    program = (
        "import sys; from verl.trainer import main_eval; from verl.utils.config import compose_config\n"
        "main_eval.prepare(compose_config('evaluation', sys.argv[1:]))()\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, f"data.path={files}/responses.parquet"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert len(done.stdout.splitlines()) == 4


WRONG_GENERATION = [
    (["data.path=/no/such.parquet"], ["data.path", "/no/such.parquet"]),
    (["data.prompt_key=question"], ["no column 'question'", "prompt"]),
    (["rollout.prompt_length=3"], ["row 0", "6 tokens", "rollout.prompt_length=3"]),
    (["rollout.do_sample=False"], ["data.n_samples=3", "data.n_samples=1"]),
    (["data.output_path=out.json"], ["data.output_path=out.json", "out.parquet"]),
    (["data.n_sample=3"], ["data.n_sample", "data.n_samples"]),
    (["data.n_samples=0"], ["data.n_samples=0", "at least 1"]),
    (["model.path=/no/model"], ["model.path", "/no/model"]),
    (["trainer.n_gpus_per_node=64", "ray_kwargs.ray_init.num_cpus=2"], ["64 CPUs", "has 2"]),
]
WRONG_EVALUATION = [
    (["data.path=/no/such.parquet"], ["data.path", "/no/such.parquet"]),
    (["data.response_key=answers"], ["no column 'answers'"]),
    (["data.path={files}/unknown.parquet"], ["nobody", "set custom_reward_function.path"]),
    (["data.path={files}/text.parquet"], ["row 0", "'responses' must be a list of texts", "'240'"]),
    (["custom_reward_function.path={files}/mine.py"], ["custom_reward_function.name", "compute_score"]),
    (["scoring.timeout=0"], ["scoring.timeout=0 must be above 0"]),
    (["scoring.timeouts=1"], ["scoring.timeouts", "scoring.timeout"]),
]


def refusal(prepare, name: str, arguments: list[str]) -> str:
    with pytest.raises(ValueError) as caught:
        prepare(compose_config(name, arguments))
    return str(caught.value)


@pytest.mark.parametrize(("changes", "words"), WRONG_GENERATION, ids=lambda value: value[0])
def test_wrong_generation_is_refused_before_a_model_is_loaded(files, tmp_path, changes, words):
    command = ["-m", "verl.trainer.main_generation", *generation(files, *changes, f"hydra.run.dir={tmp_path}")]
    if changes[0].startswith(("data.path", "data.n_sample=", "rollout.prompt")):
        check(*run(command), words)
        return
    said = refusal(main_generation.prepare, "generation", generation(files, *changes))
    assert len(said.splitlines()) == 1 and all(word in said for word in words), said


@pytest.mark.parametrize(("changes", "words"), WRONG_EVALUATION, ids=lambda value: value[0])
def test_wrong_evaluation_is_refused(files, tmp_path, changes, words):
    changes = [change.replace("{files}", str(files)) for change in changes]
    arguments = [f"data.path={files}/responses.parquet", *changes]
    if changes[0].startswith(("data.path=/no", "scoring.timeouts")):
        check(*run(["-m", "verl.trainer.main_eval", *arguments, f"hydra.run.dir={tmp_path}"]), words)
        return
    said = refusal(main_eval.prepare, "evaluation", arguments)
    assert len(said.splitlines()) == 1 and all(word in said for word in words), said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reward_model": None}, "row 1 of column 'reward_model' must hold a ground_truth"),
        ({"finished": [True]}, "row 1 of column 'finished' must be a list of 2 values"),
        ({"finished": None}, "row 1 of column 'finished' must be a list of 2 values"),
        ({"extra_info": "abc"}, "row 1 of column 'extra_info' must hold an object, not 'abc'"),
        ({"responses": [None, "1"]}, "row 1 of column 'responses' must be a list of texts"),
        ({"responses": []}, "row 1 of column 'responses' has no response"),
    ],
)
def test_a_bad_row_of_responses_is_named(tmp_path: Path, change: dict, words: str) -> None:
    good = row(0) | {"responses": ["240", "1"], "finished": [True, False]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (good, good | change)))
    with pytest.raises(ValueError) as error:
        main_eval.prepare(compose_config("evaluation", [f"data.path={tmp_path}/rows.jsonl"]))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.max_samples=0"], "data.max_samples=0 keeps no row; use -1"),
        (["data.n_samples=0"], "data.n_samples=0 must be a whole number of at least 1"),
        (["data.output_path=null"], "data.output_path=None is empty"),
        (["data.output_path=''"], "data.output_path='' is empty"),
        (["data.output_path={files}/model.parquet/x.parquet"], "model.parquet is no folder"),
        (["data.prompt_key=null"], "data.prompt_key=None is empty"),
        (["data.path=''"], "data.path is empty"),
        (["rollout.temperature=nan"], "rollout.temperature=nan is not a finite number"),
        (["trainer.num_cpus_per_worker=0"], "trainer.num_cpus_per_worker=0 must be above 0"),
        (["model.path=5"], "model.path=5 is not a folder"),
    ],
)
def test_a_wrong_generation_is_refused_in_one_sentence(files: Path, changes: list[str], words: str) -> None:
    (files / "model.parquet").touch()
    changes = [change.replace("{files}", str(files)) for change in changes]
    with pytest.raises(ValueError) as error:
        main_generation.prepare(compose_config("generation", generation(files, *changes)))
    assert words in str(error.value) and "\n" not in str(error.value), error.value
