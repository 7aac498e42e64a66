# SPDX-License-Identifier: Apache-2.0
"""What a command would do, and everything that is wrong with it, without starting anything.

``trainer.dry_run=True`` on any command: no Ray, no torch, no weights, nothing written; see docs/start/dry_run.md.
`report.build_report` is the content, `render.as_text` and `render.as_json` its two forms, `command.run_command` the
command line.
"""
