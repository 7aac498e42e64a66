# SPDX-License-Identifier: Apache-2.0
"""One driver process commands groups of workers: base/ says how calls are spread, ray/ runs them on Ray.

Importing this package imports neither torch nor Ray.
"""
