# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random Qwen3-MoE in Hugging Face format: `python3 scripts/init_random_model.py --out DIR --seed 0`."""

import argparse
from collections.abc import Sequence

from verl.utils.tiny_model import save_tiny_qwen3_moe


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128, help="hidden size")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--experts-per-token", type=int, default=2)
    parser.add_argument("--moe-intermediate", type=int, default=128, help="width of one expert")
    parser.add_argument("--vocab", type=int, default=64, help="tokens, special ones included")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    sizes = vars(parser.parse_args(argv))
    folder = save_tiny_qwen3_moe(sizes.pop("out"), **sizes)
    print(f"wrote a random Qwen3-MoE to {folder}")


if __name__ == "__main__":
    main()
