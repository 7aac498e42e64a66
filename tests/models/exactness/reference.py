# SPDX-License-Identifier: Apache-2.0
"""The losses of docs/objective.md, written from their definitions for one process and one whole batch.

Nothing of the package's losses, counts or scaling is imported here: this is what they are checked against. Sequences
are run one at a time, without padding; per-sequence results come in lists.
"""

from dataclasses import dataclass

import torch

HORIZON = 12  # max_response_length of every check
CLIP, DUAL_CLIP = 0.2, 3.0
KL_COEF, ENTROPY_COEF = 0.1, 0.1


@dataclass
class Row:
    """One sequence: its predicted tokens [n], of which ``target`` tells those that count.

    ``log_prob`` and ``entropy`` carry the graph; the other columns are the batch's, 0 where ``target`` is False.
    """

    log_prob: torch.Tensor
    entropy: torch.Tensor
    target: torch.Tensor
    advantage: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor


def aggregate(rows: list[Row], losses: list[torch.Tensor], mode: str) -> torch.Tensor:
    """Section 1: sum of w * l / D."""
    tokens = sum(int(row.target.sum()) for row in rows)
    weight, divisor = {
        "token-mean": (lambda n: 1.0, tokens),
        "token-sum": (lambda n: 1.0, 1),
        "seq-mean-token-sum": (lambda n: 1.0, len(rows)),
        "seq-mean-token-sum-norm": (lambda n: 1.0 / HORIZON, len(rows)),
        "seq-mean-token-mean": (lambda n: 1.0 / max(n, 1), len(rows)),
    }[mode]
    parts = [loss[row.target].sum() * weight(int(row.target.sum())) for row, loss in zip(rows, losses, strict=True)]
    return sum(parts) / max(divisor, 1)


def policy_terms(row: Row, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Section 2: (loss, clipped?, bounded?, log ratio) of each token of a row.

    ``policy`` is PPO's surrogate with the dual clip, ``gspo`` that of whole sequences (arXiv 2507.18071, token form),
    ``sequence`` a surrogate whose every token has the gradient of the whole sequence's ratio.
    """
    log_ratio, n = (row.log_prob - row.old).clamp(-20, 20), max(int(row.target.sum()), 1)
    if kind == "sequence":
        log_ratio = (log_ratio[row.target].sum() / n).expand_as(log_ratio)
    if kind == "gspo":
        mean = (row.log_prob - row.old)[row.target].sum().detach() / n
        log_ratio = (mean + row.log_prob - row.log_prob.detach()).clamp(max=10)
    ratio, minus = log_ratio.exp(), -row.advantage
    loss = torch.maximum(minus * ratio, minus * ratio.clamp(1 - CLIP, 1 + CLIP))
    clipped = minus * ratio.clamp(1 - CLIP, 1 + CLIP) > minus * ratio
    if kind == "gspo":
        return loss, clipped, torch.zeros_like(clipped), log_ratio
    bounded = (row.advantage < 0) & (loss > minus * DUAL_CLIP)
    return torch.where(bounded, minus * DUAL_CLIP, loss), clipped, bounded, log_ratio


def kl_terms(row: Row) -> torch.Tensor:
    """Section 2: the low-variance estimate of the KL to the reference at each token."""
    x = (row.ref - row.log_prob).clamp(-20, 20)
    return (torch.expm1(x) - x).clamp(-10, 10)


def step_loss(rows: list[Row], loss: str, mode: str) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of a step, without the router's, and its metrics."""
    if loss == "sft":
        total = aggregate(rows, [-row.log_prob for row in rows], "token-mean")
        return total, {"loss": float(total), "sft/loss": float(total)}
    mode = "seq-mean-token-mean" if loss == "gspo" else mode  # part of the method
    terms = [policy_terms(row, loss) for row in rows]
    total = aggregate(rows, [term[0] for term in terms], mode)
    tokens = sum(int(row.target.sum()) for row in rows)
    metrics = {"actor/pg_loss": float(total)}
    names = {"actor/pg_clipfrac": 1, "actor/pg_clipfrac_lower": 2}
    names = {"sequence": {}, "gspo": {"actor/pg_clipfrac": 1}}.get(loss, names)
    for name, place in names.items():
        count = sum(int(term[place][row.target].sum()) for row, term in zip(rows, terms, strict=True))
        metrics[name] = count / tokens if tokens else float("nan")
    drift = sum(float((row.old - row.log_prob)[row.target].clamp(-20, 20).sum()) for row in rows)
    metrics["actor/ppo_kl"] = drift / tokens if tokens else float("nan")
    if loss == "entropy":
        entropy = aggregate(rows, [row.entropy for row in rows], mode)
        total, metrics["actor/entropy"] = total - ENTROPY_COEF * entropy, float(entropy)
    if loss == "kl":
        kl = aggregate(rows, [kl_terms(row) for row in rows], mode)
        total = total + KL_COEF * kl
        metrics |= {"actor/kl_loss": float(kl), "actor/kl_coef": KL_COEF}
    return total, metrics | {"loss": float(total)}


def z_loss(router_logits: list[list[torch.Tensor]], coef: float) -> torch.Tensor:
    """Section 2: ``router_logits[layer][row]`` is [j, experts]; all real tokens of the step count."""
    routed = sum(logits.shape[0] for logits in router_logits[0])
    squares = [torch.logsumexp(logits, -1).square().sum() for layer in router_logits for logits in layer]
    return coef * sum(squares) / routed


def balancing_loss(
    router_logits: list[list[torch.Tensor]],
    kind: str,
    coef: float,
    topk: int,
    steps: list[list[list[int]]],
    dense: bool,
) -> torch.Tensor:
    """Section 7: the load-balancing losses, which depend on the micro-batches.

    Args:
        steps: ``steps[k]`` holds the rows of the k-th micro-batch of every data-parallel rank.
        dense: BSHD; ``seq_aux_loss`` then looks at rows one by one, else at the pack as one sequence.
    """
    routed = sum(logits.shape[0] for logits in router_logits[0])
    total = router_logits[0][0].new_zeros(())
    for layer in router_logits:
        experts = layer[0].shape[1]
        probs = [logits.softmax(-1) for logits in layer]
        chosen = [torch.zeros_like(p).scatter(1, p.topk(topk, dim=1).indices, 1.0).detach() for p in probs]
        so_far = torch.zeros(experts, dtype=probs[0].dtype)
        for step in steps:
            groups = [[row for part in step for row in part]] if kind == "global_aux_loss" else step
            for group in groups:
                tokens = sum(probs[row].shape[0] for row in group)
                counts = sum(chosen[row].sum(0) for row in group)
                so_far = so_far + counts
                used = so_far * (tokens / (so_far.sum() / topk)) if kind == "global_aux_loss" else counts
                if kind == "seq_aux_loss" and dense:
                    mean_length = tokens / len(group)
                    pairs = sum((chosen[row].sum(0) * probs[row].sum(0)).sum() for row in group)
                    value = experts * pairs / (topk * mean_length**2) / len(group)
                else:
                    mean_probs = sum(probs[row].sum(0) for row in group) / tokens
                    value = experts * (used / (topk * tokens) * mean_probs).sum()
                total = total + coef * value * tokens / routed
    return total


def first_adam_step(
    weights: dict[str, torch.Tensor],
    gradients: dict[str, torch.Tensor],
    lr: float,
    eps: float,
    decay: float,
    clip: float,
) -> tuple[float, dict[str, torch.Tensor]]:
    """(norm before clipping, weights after one step of AdamW from a fresh state); vectors do not decay."""
    norm = sum(g.double().square().sum() for g in gradients.values()).sqrt().item()
    factor = min(1.0, clip / (norm + 1e-6))
    updated = {}
    for name, weight in weights.items():
        g = gradients[name] * factor
        shrunk = weight * (1 - lr * decay) if weight.dim() > 1 else weight
        updated[name] = shrunk - lr * g / (g.abs() + eps)
    return norm, updated
