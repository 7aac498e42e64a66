# SPDX-License-Identifier: Apache-2.0
"""The entry points: the loops that train, and the commands around them."""

import sys

# `python3 -m verl.trainer.X` imports this package first; until it has found X, its name is "-m".
if sys.argv[:1] == ["-m"]:
    from verl.utils.environment import refuse_other_python

    refuse_other_python()
