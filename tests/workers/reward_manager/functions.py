# SPDX-License-Identifier: Apache-2.0
"""Score functions that other processes can import."""

import os
import time


def by_text(solution_str, ground_truth, data_source, extra_info):
    """What the response asks for: r raises, s sleeps, k kills its process, i gives no number, d a dict, digits a
    score."""
    if solution_str == "r":
        raise RuntimeError("boom")
    if solution_str == "s":
        time.sleep(60)
    if solution_str == "k":
        os._exit(7)
    if solution_str == "i":
        return float("nan")
    if solution_str == "d":
        return {"score": 0.5, "process": os.getpid(), "index": extra_info["index"]}
    return float(solution_str)


# The tests' tokenizer knows digits and signs.
CODES = {"7": "r", "8": "s", "6": "k", "5": "i", "4": "d"}


def coded(solution_str, **kwargs):
    """`by_text` with digits for its letters."""
    return by_text(CODES.get(solution_str, solution_str), **kwargs)


def busy(solution_str, **_):
    """Computes for ever in one C call, which no thread can interrupt, if the response is not a number."""
    return float(solution_str) if solution_str.isdigit() else float(len(str(9 ** (9**9))))
