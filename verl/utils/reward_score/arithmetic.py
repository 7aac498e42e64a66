# SPDX-License-Identifier: Apache-2.0
"""Score of the arithmetic task: the answer string, exactly."""

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1.0 if the response is exactly the answer and the response has ended, else 0.0.

    Args:
        solution_str: the decoded response, without special tokens. White space is not forgiven.
        ground_truth: the answer, for instance "240" (042, units first).
        extra_info: `finished` (from the reward manager) says whether the response ended with EOS; a response that was
            cut off at its length limit is not right. Without it the response counts as ended.
    """
    finished = (extra_info or {}).get("finished", True)
    return float(finished and solution_str == ground_truth)
