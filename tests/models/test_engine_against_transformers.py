# SPDX-License-Identifier: Apache-2.0
"""The Megatron engine over CP, DP, TP, PP and EP against plain transformers on the same weights, in float32."""

from pathlib import Path

import pytest
import torch

from tests.models.engine_world import (
    Case,
    engine,
    loss_function,
    padded_batch,
    rank_batch,
    rows_of_rank,
    save_sharp_model,
)
from tests.models.gradients import difference, replica_spread, whole_gradients
from tests.utils_dist import run_world
from verl.utils import tensordict_utils as tu

LAYOUTS = {
    "dp2": {},
    "cp2": {"cp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2},
    "cp2 dense": {"cp": 2, "dense": True},
    "cp2 distributed optimizer": {"cp": 2, "distributed_optimizer": True},
}


def hf_log_probs(model: torch.nn.Module, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[j - 1]: log-probs of the second to the last token."""
    return log_probs_of(model(ids[None]).logits, ids, temperature)


def hf_sum_pi_squared(model: torch.nn.Module, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """[j - 1]: sums of squared probabilities of the distributions behind the second to the last token."""
    return torch.softmax(model(ids[None]).logits[0, :-1] / temperature, -1).square().sum(-1)


def log_probs_of(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    return torch.log_softmax(logits[0, :-1] / temperature, -1).gather(1, ids[1:, None])[:, 0]


def real_tokens(batch: torch.Tensor, row: int) -> torch.Tensor:
    return batch["input_ids"][row][batch["attention_mask"][row].bool()]


def log_prob_errors(rank: int, world: int, path: str) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch = padded_batch()
    errors = {}
    for name, layout in LAYOUTS.items():
        case = Case(name, **layout)
        with engine(path, case) as built:
            data = tu.assign_non_tensor(rank_batch(case, built), calculate_sum_pi_squared=True)
            with built.eval_mode():
                output = built.infer_batch(data)["model_output"]
            if not output:
                continue
            rows = output["log_probs"].unbind()
            squares = output["sum_pi_squared"].unbind()
            with torch.no_grad():
                errors[name] = max(
                    (got[:-1] - hf_log_probs(model, real_tokens(batch, row), 0.8)).abs().max().item()
                    for got, row in zip(rows, rows_of_rank(case, built), strict=True)
                )
                errors[name] = max(
                    errors[name],
                    *(
                        (got[:-1] - hf_sum_pi_squared(model, real_tokens(batch, row), 0.8)).abs().max().item()
                        for got, row in zip(squares, rows_of_rank(case, built), strict=True)
                    ),
                )
            assert not output["log_probs"].requires_grad
    return errors


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_sharp_model(str(Path(tmp_path_factory.mktemp("sharp")) / "model"))


@pytest.mark.gloo
def test_log_probs_equal_transformers_in_every_layout(model_path: str) -> None:
    by_rank = run_world(log_prob_errors, 2, model_path)
    assert set(by_rank[1]) == set(LAYOUTS)  # the last pipeline stage saw every layout
    worst = {name: max(errors.get(name, 0.0) for errors in by_rank) for name in LAYOUTS}
    print({name: f"{error:.1e}" for name, error in worst.items()})
    assert max(worst.values()) <= 1e-5, worst


def hf_update_gradient(path: str, z_coef: float) -> tuple[dict[str, torch.Tensor], float]:
    """Gradient of one clipped policy loss and the routers' z-loss over the whole batch, written out, by hub name.

    The loss returned is the policy's.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
    batch = padded_batch()
    total, num_tokens = 0.0, batch["response_mask"].sum()
    squares, num_routed = 0.0, batch["attention_mask"].sum()
    for row in range(batch.batch_size[0]):
        mask = batch["response_mask"][row].bool()
        response = int(batch["attention_mask"][row, batch["prompts"].shape[1] :].sum())
        ids = real_tokens(batch, row)
        output = model(ids[None], output_router_logits=True)
        squares = squares + sum(logits.logsumexp(-1).square().sum() for logits in output.router_logits)
        log_prob = log_probs_of(output.logits, ids, 0.8)[-response:]
        ratio = (log_prob - batch["old_log_probs"][row, :response]).clamp(-20, 20).exp()
        advantage = batch["advantages"][row, :response]
        token_loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        token_loss = torch.where(advantage < 0, torch.minimum(token_loss, -3 * advantage), token_loss)
        total = total + token_loss[mask[:response]].sum()
    loss = total / num_tokens
    (loss + z_coef * squares / num_routed).backward()
    return by_hub_name(model), loss.item()


def by_hub_name(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under the names of the saved checkpoint: one matrix per expert."""
    named = {}
    for name, p in model.named_parameters():
        gradient = p.grad.double()
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, both in enumerate(gradient):
                gate, up = both.chunk(2)
                named[f"{stem}.{expert}.gate_proj.weight"], named[f"{stem}.{expert}.up_proj.weight"] = gate, up
        elif leaf == "down_proj" and gradient.dim() == 3:
            named |= {f"{stem}.{expert}.down_proj.weight": one for expert, one in enumerate(gradient)}
        else:
            named[name] = gradient
    return named


UPDATES = {
    "cp1 dp2": Case("cp1 dp2"),
    "cp2": Case("cp2", cp=2),
    "cp2 flag": Case("cp2 flag", cp=2, per_token_loss=True),
    "dp2 flag": Case("dp2 flag", per_token_loss=True),
    "cp2 one micro-batch": Case("cp2 one micro-batch", cp=2, micro_batch_size=8),
    "cp2 dynamic": Case("cp2 dynamic", cp=2, token_budget=12),
    "dp2 dynamic distributed optimizer": Case("dp2 dynamic", token_budget=24, distributed_optimizer=True),
    "cp2 z-loss": Case("cp2 z-loss", cp=2, z_loss=0.1),
    "cp2 z-loss flag": Case("cp2 z-loss flag", cp=2, z_loss=0.1, per_token_loss=True),
    "dp2 z-loss dense dynamic": Case("dp2 z-loss", z_loss=0.1, token_budget=24, dense=True),
    "tp2 z-loss flag": Case("tp2 z-loss", tp=2, z_loss=0.1, per_token_loss=True, micro_batch_size=4),
    "ep2 z-loss": Case("ep2 z-loss", ep=2, z_loss=0.1, micro_batch_size=1),
    "pp2 z-loss": Case("pp2 z-loss", pp=2, z_loss=0.1),
}


def update_gradients(rank: int, world: int, path: str) -> dict[str, tuple]:
    by_coefficient = {coef: hf_update_gradient(path, coef) for coef in sorted({c.z_loss for c in UPDATES.values()})}
    results = {}
    for name, case in UPDATES.items():
        expected, expected_loss = by_coefficient[case.z_loss]
        with engine(path, case) as built, built.train_mode():
            data = rank_batch(case, built)
            built.optimizer_zero_grad()
            output = built.forward_backward_batch(data, loss_function(case))
            whole, worst, parameter = difference(whole_gradients(built), expected)
            loss_error = abs(output["loss"] - expected_loss) / abs(expected_loss)
            results[name] = (whole, worst, parameter, loss_error, replica_spread(built))
    return results


@pytest.mark.gloo
def test_gradient_of_one_policy_update_equals_transformers(model_path: str) -> None:
    for results in run_world(update_gradients, 2, model_path):
        assert set(results) == set(UPDATES)
        for name, (whole, worst, parameter, loss_error, spread) in results.items():
            line = f"{name}: {whole:.1e}, worst {worst:.1e} ({parameter}), loss {loss_error:.1e}, replicas {spread:.1e}"
            print(line)
            assert whole <= 1e-5 and worst <= 1e-5 and loss_error <= 1e-5 and spread == 0, line
