# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random model in Hugging Face format: `python3 scripts/init_random_model.py --out DIR --family qwen3`.

Families: qwen3_moe (the quickstart's), qwen2 (Qwen2.5), qwen3, deepseek_v3 (latent attention, MoE) and mimo (with
multi-token prediction; its folder holds model code, so open it with trust_remote_code=True). A size that is not given
is the family's own default.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's, whatever the environment has installed

from verl.utils.environment import use_environment  # noqa: E402

use_environment("torch")

from verl.utils.tiny_model import FAMILIES  # noqa: E402

SIZES = {
    "layers": "decoder layers",
    "hidden": "hidden size",
    "heads": "attention heads",
    "kv_heads": "key/value heads",
    "head_dim": "size of a head",
    "intermediate": "width of a dense layer",
    "experts": "experts of a MoE layer",
    "experts_per_token": "experts that a token goes to",
    "moe_intermediate": "width of one expert",
    "mtp_layers": "multi-token prediction layers",
    "vocab": "tokens, special ones included",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--family", choices=tuple(FAMILIES), default="qwen3_moe")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    for name, meaning in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=meaning)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    folder, family = given.pop("out"), given.pop("family")
    unknown = [name for name in given if name not in inspect.signature(FAMILIES[family]).parameters]
    if unknown:
        parser.error(f"--family {family} has no --{unknown[0].replace('_', '-')}")
    print(f"wrote a random {family} to {FAMILIES[family](folder, **given)}")


if __name__ == "__main__":
    main()
