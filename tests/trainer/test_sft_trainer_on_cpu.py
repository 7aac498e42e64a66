# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

import verl.utils.tensordict_utils as tu
from verl.trainer.sft_trainer import SFTTrainer, target_nll
from verl.utils.checkpoint_folder import MARKER
from verl.utils.config import compose_config


class FakeWorker:
    """One rank; its model gives every token the log-prob -0.5."""

    rank, world_size = 0, 1

    def __init__(self):
        self.engine = SimpleNamespace(
            get_data_parallel_rank=lambda: 0,
            get_data_parallel_size=lambda: 1,
            is_mp_src_rank_with_outputs=lambda: True,
        )
        self.batches, self.exports, self.loaded = [], [], []

    def train_batch(self, data):
        assert data.batch_size[0] == 8
        self.batches.append(data["input_ids"].values().tolist())
        metrics = {"sft/loss": 1.5, "grad_norm": 2.0, "lr": 1e-3, "worker_seconds": 0.1}
        return tu.assign_non_tensor_data(TensorDict({}, batch_size=[0]), "metrics", metrics)

    def infer_batch(self, data):
        ids = data["input_ids"]
        log_probs = torch.nested.nested_tensor_from_jagged(torch.full(ids.values().shape, -0.5), ids.offsets())
        return TensorDict({"log_probs": log_probs}, batch_size=data.batch_size)

    def save_checkpoint(self, path, global_step=0):
        open(f"{path}/weights", "w").write(str(global_step))

    def export_hf(self, path):
        self.exports.append(path)

    def load_checkpoint(self, path):
        self.loaded.append(open(f"{path}/weights").read())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    from tests.trainer.ppo.fakes import REPO_ROOT
    from verl.utils.tiny_model import build_character_tokenizer

    folder = tmp_path_factory.mktemp("sft")
    build_character_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3_moe"}')
    path = REPO_ROOT / "examples" / "data_preprocess" / "arithmetic.py"
    spec = importlib.util.spec_from_file_location("arithmetic", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = [module.make_sft_row(a, a + 1, False) for a in range(20)]
    with open(folder / "train.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


@pytest.fixture
def make_trainer(files, tmp_path, monkeypatch):
    monkeypatch.setattr(SFTTrainer, "_build_worker", lambda self: FakeWorker())
    monkeypatch.setattr(SFTTrainer, "_sum_over_world", lambda self, *v: v[0] if len(v) == 1 else list(v))

    def make(*overrides):
        return SFTTrainer(
            compose_config(
                "sft_trainer_engine",
                [
                    f"model.path={files / 'model'}",
                    f"data.train_files={files / 'train.jsonl'}",
                    "data.train_batch_size=8",
                    "data.num_workers=0",
                    "trainer.logger=[file]",
                    "trainer.total_epochs=3",
                    f"trainer.default_local_dir={tmp_path}",
                    *overrides,
                ],
            )
        )

    return make


def test_training_logs_and_saves(make_trainer, tmp_path, files):
    trainer = make_trainer("trainer.save_freq=4", "trainer.test_freq=6", f"data.val_files={files / 'train.jsonl'}")
    trainer.fit()
    assert trainer.total_steps == trainer.step == len(trainer.worker.batches) == 6
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    data = lines[-1]["data"]
    assert (data["train/loss"], data["train/grad_norm"], data["train/lr"]) == (1.5, 2.0, 1e-3)
    assert data["train/global_tokens"] == 8 * 10 and data["train/tokens_per_s"] > 0
    assert data["val/loss"] == pytest.approx(0.5) and "val/loss" not in lines[0]["data"]
    assert trainer.checkpoints.steps() == [4, 6] and (tmp_path / MARKER).read_text() == "6"
    assert trainer.worker.exports == [trainer.checkpoints.incomplete_path(6) + "/huggingface"]


def test_resumed_training_sees_the_batches_that_are_left(make_trainer, tmp_path):
    whole = make_trainer(f"trainer.default_local_dir={tmp_path / 'whole'}")
    whole.fit()
    first = make_trainer("trainer.save_freq=3", "trainer.total_training_steps=3")
    first.fit()
    second = make_trainer("trainer.save_freq=3")
    second.fit()
    assert second.worker.loaded == ["3"]
    assert first.worker.batches + second.worker.batches == whole.worker.batches


def test_validation_loss_does_not_depend_on_ranks_or_micro_batches(make_trainer, files):
    trainer = make_trainer(f"data.val_files={files / 'train.jsonl'}", "data.use_dynamic_bsz=False")
    trainer.build()
    for dp_size in (1, 2, 3):
        seen, widths = [], set()
        for dp_rank in range(dp_size):
            trainer.dp_rank, trainer.dp_size = dp_rank, dp_size
            batches = list(trainer._val_rows(rows_per_rank=5))
            widths.add(tuple(len(rows) for rows, _ in batches))
            seen += [row for rows, num_real in batches for row in rows[:num_real]]
        assert sorted(seen) == list(range(20))
        assert len(widths) == 1, "ranks would wait for each other"
        assert all(width % 4 == 0 for width in widths.pop())
        trainer.dp_rank, trainer.dp_size = 0, 1


def test_validation_fills_whole_rounds_of_virtual_stages(make_trainer, files):
    trainer = make_trainer(f"data.val_files={files / 'train.jsonl'}")
    trainer.build()
    engine = trainer.config.engine
    engine.pipeline_model_parallel_size, engine.virtual_pipeline_model_parallel_size = 3, 2
    for dynamic, multiple in ((True, 3), (False, 3 * trainer.config.data.micro_batch_size_per_gpu)):
        trainer.config.data.use_dynamic_bsz = dynamic
        assert all(len(rows) % multiple == 0 for rows, _ in trainer._val_rows(rows_per_rank=5))


def test_target_nll_counts_the_targets_of_the_rows_that_count():
    log_probs = torch.nested.nested_tensor(
        [torch.tensor([-1.0, -2.0, -4.0, 99.0]), torch.tensor([-8.0, 99.0]), torch.tensor([-16.0, 99.0])],
        layout=torch.jagged,
    )
    mask = torch.nested.nested_tensor(
        [torch.tensor([1, 0, 1, 1]), torch.tensor([0, 1]), torch.tensor([0, 1])], layout=torch.jagged
    )
    # The first token is predicted by nobody; the last position predicts nothing.
    assert target_nll(log_probs, mask, 2) == (2.0 + 4.0 + 8.0, 3.0)


def test_warmup_is_checked_when_the_number_of_steps_is_known(make_trainer):
    with pytest.raises(ValueError, match="optim.lr_warmup_steps=9"):
        make_trainer("optim.lr_warmup_steps=9", "optim.lr_decay_style=linear")
