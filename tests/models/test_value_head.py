# SPDX-License-Identifier: Apache-2.0
"""The value model over every kind of parallelism: values and gradients against the unsharded model, checkpoints."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.models.engine_world import Case, engine, padded_batch, rows_of_rank, save_sharp_model
from tests.models.gradients import Gradients, difference, replica_spread, whole_gradients
from tests.utils_dist import run_world
from verl.utils import tensordict_utils as tu
from verl.workers.config import McoreCriticConfig
from verl.workers.utils.losses import value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

CLIP = 0.3
VALUE = Case("value", loss="value", dtype="float64")
CASES = {
    "dp2": {},
    "dp2 flag, one micro-batch": {"per_token_loss": True, "micro_batch_size": 4},
    "dp2 distributed optimizer": {"dtype": "float32", "distributed_optimizer": True},
    "cp2": {"cp": 2},
    "cp2 flag, dynamic, z-loss": {"cp": 2, "per_token_loss": True, "token_budget": 12, "z_loss": 0.1},
    "cp2 dense, z-loss, single rows": {"cp": 2, "dense": True, "z_loss": 0.1, "micro_batch_size": 1},
    "cp2 sequences": {"cp": 2, "loss_agg_mode": "seq-mean-token-mean", "masked_rows": (1, 6)},
    "tp2 sp": {"tp": 2, "z_loss": 0.1},
    "tp2 sp flag": {"tp": 2, "per_token_loss": True, "micro_batch_size": 3},
    "tp2 without sp": {"tp": 2, "sequence_parallel": False, "model": "dense"},
    "pp2": {"pp": 2, "z_loss": 0.1},
    "pp2 flag, tied": {"pp": 2, "per_token_loss": True, "model": "tied"},
    "ep2": {"ep": 2, "z_loss": 0.1},
    "ep2 flag": {"ep": 2, "per_token_loss": True, "micro_batch_size": 1},
}
CASES_OF_FOUR = {
    "tp2 cp2": {"tp": 2, "cp": 2, "z_loss": 0.1},
    "tp2 pp2 flag": {"tp": 2, "pp": 2, "per_token_loss": True},
    "pp2 vpp2": {"pp": 2, "vpp": 2, "model": "deep", "micro_batch_size": 1},
    "pp2 cp2 distributed optimizer": {"pp": 2, "cp": 2, "dtype": "float32", "distributed_optimizer": True},
    "ep2 cp2 flag, dynamic": {"ep": 2, "cp": 2, "per_token_loss": True, "token_budget": 12},
    "dp4 overlapped": {"overlap_grad_reduce": True},
}


def as_cases(given: dict[str, dict[str, Any]]) -> dict[str, tuple[str, Case]]:
    """(model, case) by name."""
    return {
        name: (case.get("model", "moe"), replace(VALUE, **{k: v for k, v in case.items() if k != "model"}))
        for name, case in given.items()
    }


def value_batch(case: Case) -> TensorDict:
    """The controller's batch with returns and old values, which are NaN wherever nothing is trained."""
    batch = padded_batch(case.lengths, case.masked_rows, case.torch_dtype)
    generator = torch.Generator().manual_seed(11)
    unused = batch["response_mask"] == 0
    for name in ("values", "returns"):
        column = torch.randn(batch["response_mask"].shape, generator=generator, dtype=torch.float64)
        batch[name] = column.masked_fill(unused, float("nan")).to(case.torch_dtype)
    return batch


def rank_data(case: Case, built: Any) -> TensorDict:
    data = left_right_2_no_padding(tu.index_select_tensor_dict(value_batch(case), rows_of_rank(case, built)))
    if case.token_budget is not None:
        return tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=case.token_budget)
    return tu.assign_non_tensor(data, micro_batch_size_per_gpu=case.micro_batch_size)


def critic_loss(case: Case) -> Any:
    return partial(value_loss, config=McoreCriticConfig(loss_agg_mode=case.loss_agg_mode, cliprange_value=CLIP))


def reference(path: str, case: Case) -> tuple[Gradients, float, list[torch.Tensor]]:
    """Whole gradient, value loss and values of each row: one process, no padding, the loss written out."""
    plain = Case("reference", loss="value", dtype=case.dtype)
    batch = value_batch(case)
    width = batch["prompts"].shape[1]
    with engine(path, plain, optimizer=None) as built:
        from megatron.core.transformer.moe.router import TopKRouter

        (model,) = built.module
        model.train()
        seen: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, TopKRouter):
                gating = module.gating
                module.gating = lambda hidden, gating=gating: seen.append(gating(hidden)) or seen[-1]
        rows, weighted = [], []
        for row in range(batch.batch_size[0]):
            ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
            values = model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None], attention_mask=None)[0, :, 0]
            assert values.dtype == case.torch_dtype
            rows.append(values.detach())
            count = int(batch["attention_mask"][row, width:].sum())
            trained = batch["response_mask"][row, :count].bool()
            now = values[-count - 1 : -1][trained]
            old, target = (batch[name][row, :count][trained] for name in ("values", "returns"))
            held = torch.minimum(torch.maximum(now, old - CLIP), old + CLIP)
            loss = 0.5 * torch.maximum((now - target) ** 2, (held - target) ** 2)
            per_sequence = case.loss_agg_mode == "seq-mean-token-mean"
            weighted.append(loss.sum() / max(int(trained.sum()), 1) if per_sequence else loss.sum())
        tokens = int(batch["response_mask"].sum())
        total = sum(weighted) / (batch.batch_size[0] if case.loss_agg_mode == "seq-mean-token-mean" else tokens)
        squares = sum(logits.logsumexp(-1).square().sum() for logits in seen)
        z_loss = case.z_loss * squares / int(batch["attention_mask"].sum()) if case.z_loss else 0.0
        (total + z_loss).backward()
        own = {p: p.data for p in model.parameters()}
        for p in own:
            p.data = p.grad if p.grad is not None else torch.zeros_like(p.data)
        gradients = {name: t.detach().clone().double() for name, t in built.get_per_tensor_param()[0]}
        for p, data in own.items():
            p.data = data
    return gradients, float(total), rows


def measure(
    rank: int, world: int, paths: dict[str, str], given: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    known: dict[tuple, tuple] = {}
    for name, (kind, case) in as_cases(given).items():
        key = (kind, case.dtype, case.loss_agg_mode, case.masked_rows, case.z_loss)
        if key not in known:
            known[key] = reference(paths[kind], case)
        expected, expected_loss, rows = known[key]
        with engine(paths[kind], case) as built:
            data = rank_data(case, built)
            with built.eval_mode():
                output = built.infer_batch(data)["model_output"]
            error = max(
                (
                    (got - rows[row]).abs().max().item()
                    for got, row in zip(
                        output["values"].unbind() if output else [], rows_of_rank(case, built), strict=False
                    )
                ),
                default=0.0,
            )
            with built.train_mode():
                built.optimizer_zero_grad()
                step = built.forward_backward_batch(data, critic_loss(case))
                got = whole_gradients(built)
                whole, worst, parameter = difference(got, expected)
                results[name] = {
                    "values": error,
                    "whole": whole,
                    "worst": worst,
                    "parameter": parameter,
                    "loss": abs(step["loss"] - expected_loss) / expected_loss,
                    "replicas": replica_spread(built),
                    "head": float(got["score.weight"].norm()),
                    "clipped": step["metrics"]["critic/vf_clipfrac"].value,
                    "has values": bool(output),
                }
    return results


def save_tied(folder: str) -> str:
    """A dense model whose embedding is also its vocabulary head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from tests.models.exactness.models import _save_dense

    root = str(tmp_path_factory.mktemp("value"))
    return {
        "moe": save_sharp_model(os.path.join(root, "moe")),
        "dense": _save_dense(os.path.join(root, "dense")),
        "tied": save_tied(os.path.join(root, "tied")),
        "deep": save_sharp_model(os.path.join(root, "deep"), layers=4, hidden=16, moe_intermediate=12),
    }


@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_values_and_gradients_are_those_of_the_unsharded_model(paths: dict[str, str]) -> None:
    check(run_world(measure, 2, paths, CASES, timeout_s=290), CASES)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_so_they_are_where_two_kinds_of_parallelism_meet(paths: dict[str, str]) -> None:
    check(run_world(measure, 4, paths, CASES_OF_FOUR, timeout_s=290), CASES_OF_FOUR)


def check(by_rank: list[dict[str, dict[str, Any]]], cases: dict[str, dict[str, Any]]) -> None:
    assert all(by_rank[-1][name]["has values"] for name in cases)  # the last pipeline stage saw every layout
    for results in by_rank:
        assert set(results) == set(cases)
        for name, r in results.items():
            line = f"{name}: " + ", ".join(f"{k} {v:.1e}" if isinstance(v, float) else str(v) for k, v in r.items())
            print(line)
            limit = 1e-5 if cases[name].get("dtype") == "float32" else 1e-13
            assert max(r["whole"], r["worst"], r["loss"]) <= limit and r["values"] <= 10 * limit, line
            assert r["replicas"] == 0 and r["head"] > 1e-3 and 0 < r["clipped"] < 1, line


def in_layouts(rank: int, world: int, path: str, folder: str) -> dict[str, Any]:
    """Heads of fresh engines, a checkpoint that changes layouts, and an export that is read again."""
    results: dict[str, Any] = {}
    layouts = {"pp2": {"pp": 2}, "tp2": {"tp": 2}, "cp2": {"cp": 2}, "dp2": {}}
    saved: Gradients = {}
    for name, layout in layouts.items():
        case = replace(VALUE, dtype="float32", **layout)
        with engine(path, case) as built:
            fresh = {n: t.clone() for n, t in built.get_per_tensor_param()[0]}
            results[f"fresh {name}"] = fresh["score.weight"].tolist()
            assert "lm_head.weight" not in fresh
            if saved:
                built.load_checkpoint(folder)
            else:
                with built.train_mode():
                    built.train_batch(rank_data(case, built), critic_loss(case))
                built.save_checkpoint(folder)
                built.export_hf(os.path.join(folder, "hf"))
            now = {n: t.clone() for n, t in built.get_per_tensor_param()[0]}
            results[f"bias {name}"] = float(now["score.bias"])
            saved = saved or now
            results[f"difference {name}"] = max(float((now[n] - saved[n]).abs().max()) for n in saved)
    with engine(os.path.join(folder, "hf"), replace(VALUE, dtype="float32", cp=2), optimizer=None) as built:
        again = dict(built.get_per_tensor_param()[0])
        results["difference export"] = max(float((again[n] - saved[n]).abs().max()) for n in saved)
        data = rank_data(VALUE, built)
        with built.eval_mode():
            results["values"] = built.infer_batch(data)["model_output"]["values"].values().tolist()
        results["padded"] = list(no_padding_2_padding(built.infer_batch(data)["model_output"]["values"], data).shape)
    return results


@pytest.mark.gloo
def test_the_head_is_the_same_on_all_ranks_and_goes_into_checkpoints_and_exports(
    paths: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoModelForTokenClassification

    results = run_world(in_layouts, 2, paths["moe"], str(tmp_path / "checkpoint"), timeout_s=300)
    first = results[0]["fresh pp2"]
    assert max(map(abs, first[0])) > 1e-3
    for by_rank in results:
        assert all(by_rank[f"fresh {name}"] == first for name in ("pp2", "tp2", "cp2", "dp2"))
        assert all(by_rank[key] == 0 for key in by_rank if key.startswith("difference"))
        assert by_rank["bias pp2"] != 0
    model, info = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "checkpoint" / "hf", num_labels=1, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    batch = padded_batch()
    with torch.no_grad():
        expected = torch.cat(
            [model(row[mask.bool()][None]).logits[0, :, 0] for row, mask in zip(*columns(batch), strict=True)]
        )
    assert (torch.tensor(results[0]["values"]) - expected).abs().max() <= 1e-5


def columns(batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
    return batch["input_ids"], batch["attention_mask"]


def planted(rank: int, world: int, path: str) -> dict[str, Any]:
    """Gradient errors of two faults under sequence parallelism, and the type of a bfloat16 model's values."""
    from unittest import mock

    case = replace(VALUE, tp=2)
    expected, _, _ = reference(path, case)
    results: dict[str, Any] = {}
    for fault in ("head not marked", "gradients added up over tensor ranks"):
        with engine(path, case) as built:
            import megatron.core.tensor_parallel as tensor_parallel

            gather = tensor_parallel.gather_from_sequence_parallel_region
            if fault == "head not marked":
                for parameter in built._head.parameters():
                    parameter.sequence_parallel = False
            else:
                gather = _summing(gather)
            data = rank_data(case, built)
            with built.train_mode(), mock.patch.object(tensor_parallel, "gather_from_sequence_parallel_region", gather):
                built.optimizer_zero_grad()
                built.forward_backward_batch(data, critic_loss(case))
                got = whole_gradients(built)
            head = got["score.weight"] - expected["score.weight"]
            results[fault] = (difference(got, expected)[0], float(head.norm() / expected["score.weight"].norm()))
    case = replace(VALUE, cp=2, dtype="bfloat16")
    with engine(path, case) as built:
        data = rank_data(replace(case, dtype="float32"), built)
        with built.train_mode():
            norm = built.train_batch(data, critic_loss(case))["grad_norm"]
        with built.eval_mode():
            values = built.infer_batch(data)["model_output"]["values"]
        results["bfloat16"] = (str(values.dtype), float(norm), bool(values.values().isfinite().all()))
    return results


def _summing(gather: Any) -> Any:
    return lambda values, tensor_parallel_output_grad: gather(values, tensor_parallel_output_grad=True)


@pytest.mark.gloo
def test_planted_faults_are_seen_and_bfloat16_models_give_float32_values(paths: dict[str, str]) -> None:
    for results in run_world(planted, 2, paths["moe"], timeout_s=120):
        _, head = results["head not marked"]
        assert head > 0.1
        whole, head = results["gradients added up over tensor ranks"]
        assert whole > 0.5 and head > 0.5
        dtype, norm, finite = results["bfloat16"]
        assert dtype == "torch.float32" and 0 < norm < 1e3 and finite
