# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention (DeepSeek-V3, Moonlight) against plain transformers on the same weights, in float32.

Queries and keys are wider than values here, a part of them is rotated, and the router is a sigmoid with a correction
bias that is not zero.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.engine_world import Case, engine, loss_function, padded_batch, rank_batch, rows_of_rank
from tests.models.gradients import difference, replica_spread, whole_gradients
from tests.models.test_engine_against_transformers import by_hub_name, hf_log_probs, real_tokens
from tests.utils_dist import run_world
from verl.utils.tiny_model import save_tiny_deepseek_v3

CASES = {
    "cp2": {"cp": 2},
    "cp2 flag": {"cp": 2, "per_token_loss": True},
    "cp2 dense": {"cp": 2, "dense": True},
    "dp2 dynamic flag": {"per_token_loss": True, "token_budget": 24},
    "tp2": {"tp": 2},
    "ep2": {"ep": 2, "micro_batch_size": 4},
    "pp2": {"pp": 2},
}


def save_sharp_deepseek(folder: str, q_lora_rank: int | None) -> str:
    """Matrices scaled up, so that attention, routing and next tokens are far from uniform."""
    save_tiny_deepseek_v3(folder, hidden=32, kv_lora_rank=16, experts=4, moe_intermediate=24, q_lora_rank=q_lora_rank)
    path, generator = Path(folder) / "model.safetensors", torch.Generator().manual_seed(1)
    weights = {name: w * 4 if w.dim() > 1 else w for name, w in load_file(path).items()}
    for name, w in weights.items():
        if name.endswith("e_score_correction_bias"):
            weights[name] = 0.1 * torch.randn(w.shape, generator=generator)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def open_model(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")


def hf_gradient(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradient of the mean cross entropy of all responses, one sequence at a time, by hub name."""
    batch = padded_batch()
    total = 0.0
    for row in range(batch.batch_size[0]):
        mask = batch["response_mask"][row]
        length = int(batch["attention_mask"][row, batch["prompts"].shape[1] :].sum())
        log_prob = hf_log_probs(model, real_tokens(batch, row), 0.8)[-length:]
        total = total - log_prob[mask[:length].bool()].sum()
    (total / batch["response_mask"].sum()).backward()
    return by_hub_name(model)


def compare(rank: int, world: int, path: str) -> dict[str, tuple]:
    model = open_model(path)
    expected = hf_gradient(model)
    batch = padded_batch()
    results = {}
    for name, settings in CASES.items():
        case = Case(name, loss="sft", **settings)
        with engine(path, case) as built:
            data = rank_batch(case, built)
            with built.eval_mode(), torch.no_grad():
                rows = built.infer_batch(data)["model_output"].get("log_probs", torch.empty(0)).unbind()
                pairs = zip(rows, rows_of_rank(case, built), strict=False)
                errors = [
                    (got[:-1] - hf_log_probs(model, real_tokens(batch, row), 0.8)).abs().max().item()
                    for got, row in pairs
                ]
            with built.train_mode():
                built.optimizer_zero_grad()
                built.forward_backward_batch(data, loss_function(case))
                gradients = {n: g for n, g in whole_gradients(built).items() if "correction_bias" not in n}
                results[name] = (max(errors, default=None), *difference(gradients, expected), replica_spread(built))
    return results


def compare_both(rank: int, world: int, paths: list[str]) -> dict[str, tuple]:
    results = {}
    for path in paths:
        results |= {f"{Path(path).name}, {name}": found for name, found in compare(rank, world, path).items()}
    return results


@pytest.mark.gloo
@pytest.mark.timeout(240)
def test_log_probs_and_gradients_equal_transformers(tmp_path: Path) -> None:
    ranks = {"whole queries": None, "compressed queries": 24}
    paths = [save_sharp_deepseek(str(tmp_path / name), q_lora_rank) for name, q_lora_rank in ranks.items()]
    by_rank = run_world(compare_both, 2, paths, timeout_s=200)
    assert all(len(results) == 2 * len(CASES) for results in by_rank)
    assert all(error is not None for error, *_ in by_rank[1].values())  # the last pipeline stage saw every case
    for results in by_rank:
        for name, (error, whole, worst, parameter, spread) in results.items():
            line = f"{name}: log-probs {error}, gradient {whole:.1e}, worst {worst:.1e} ({parameter}), spread {spread}"
            print(line)
            assert (error or 0) <= 1e-5 and whole <= 1e-5 and worst <= 1e-5 and spread == 0, line
