# SPDX-License-Identifier: Apache-2.0
"""What is proposed in place of a layout that does not fit: each value, put in alone, must do."""

import json
import random
import re
from pathlib import Path

import pytest

from verl.trainer.ppo.preflight_layout import check_layout
from verl.trainer.ppo.preflight_model import allows_layout, check_model

SIZES = ("tensor_model", "pipeline_model", "context", "expert_model")
FIXTURE = Path(__file__).resolve().parents[3] / "tests/fixtures/model_configs/Qwen3-30B-A3B/config.json"


def engine(tp=1, pp=1, cp=1, ep=1, etp=None) -> dict:
    sizes = dict(zip((f"{name}_parallel_size" for name in SIZES), (tp, pp, cp, ep), strict=True))
    rest = {"virtual_pipeline_model_parallel_size": None, "sequence_parallel": True, "override_transformer_config": {}}
    return sizes | {"expert_tensor_parallel_size": etp} | rest


def advice(errors: list[str]) -> list[str]:
    return [error.partition("; use ")[2] for error in errors]


@pytest.mark.parametrize(
    ("node", "ranks", "words"),
    [
        (engine(cp=3), 8, ["context_parallel_size=2 or 4, or 6 or 9 ranks"]),
        (engine(tp=8), 12, ["tensor_model_parallel_size=6 or 12, or 8 or 16 ranks"]),
        # Whole numbers of copies of the dense parts (16 ranks) and of the experts (12).
        (engine(4, 4, 1, 3, 1), 64, ["expert_model_parallel_size=2 or 4, or 48 or 96 ranks"]),
        (engine(4, 1, 1, 4), 8, ["expert_model_parallel_size=2, or expert_tensor_parallel_size=2, or 16 ranks"]),
        # Both are wrong, and neither follows from the other.
        (
            engine(1, 1, 3, 3, 1),
            8,
            ["context_parallel_size=2 or 4, or 6 or 9 ranks", "expert_model_parallel_size=2 or 4, or 6 or 9 ranks"],
        ),
        # No size alone does.
        (engine(3, 1, 3), 8, ["9 ranks"]),
    ],
)
def test_sizes_are_proposed_before_ranks(node: dict, ranks: int, words: list[str]) -> None:
    assert advice(check_layout(node, "engine", ranks, "ranks")) == words


def test_the_model_and_the_ranks_propose_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(FIXTURE.read_bytes())
    model, node = {"path": str(tmp_path)}, engine(2, 4, 1, 256, 1)
    layout = check_layout(node, "engine", 64, "ranks", allows_layout(model, "engine"))
    own = check_model("model", model, "engine", node, (8, "data.max_length=8"), 64)
    assert [found.partition(", or ")[0] for found in advice(layout)] == ["expert_model_parallel_size=16"]
    assert advice(own) == ["16"]
    # 4 heads of keys and values; 5 tensor ranks divide neither them nor the world.
    node = engine(5, 1, 1, 1, 1)
    layout = check_layout(node, "engine", 24, "ranks", allows_layout(model, "engine"))
    own = check_model("model", model, "engine", node, (8, "data.max_length=8"), 24)
    assert advice(layout) == ["tensor_model_parallel_size=4 or 8, or 20 or 25 ranks"]
    assert len(own) == 1 and "use 4 or 8" in own[0]


def test_every_proposed_value_does_alone(tmp_path: Path) -> None:
    """Random layouts, with a model and without: the sentence goes away, and there are no more of others."""
    (tmp_path / "config.json").write_text(json.dumps(json.loads(FIXTURE.read_text())))
    allows = allows_layout({"path": str(tmp_path)}, "engine")
    draw, tried = random.Random(0), 0
    for turn in range(300):
        node = engine(*(draw.choice((1, 2, 3, 4, 6, 8)) for _ in range(4)), draw.choice((None, 1, 2, 3)))
        ranks, model_allows = draw.choice((1, 4, 8, 12, 16, 24, 32, 64)), allows if turn % 2 else None
        errors = check_layout(node, "engine", ranks, "ranks", model_allows)
        for error in errors:
            kind = error.partition(":")[0]
            said = error.partition("; use ")[2]
            for name, values in re.findall(r"(\w+_parallel_size)=([\d or]*\d)", said):
                for value in values.split(" or "):
                    changed = check_layout(node | {name: int(value)}, "engine", ranks, "ranks", model_allows)
                    assert not any(left.startswith(kind) for left in changed), (error, name, value)
                    assert len(changed) <= len(errors), (error, name, value)
                    tried += 1
            for value in re.search(r"([\d or]*\d) ranks$", said)[1].split(" or "):
                if value.strip().isdigit():
                    assert check_layout(node, "engine", int(value), "ranks", model_allows) == [], (error, value)
                    tried += 1
    assert tried > 500
