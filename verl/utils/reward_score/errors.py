# SPDX-License-Identifier: Apache-2.0
"""Errors of scoring that end a run."""

__all__ = ["AllRowsFailedError", "MissingPackageError", "UnknownDataSourceError", "UnscorableError"]


class AllRowsFailedError(RuntimeError):
    """No row of a batch could be scored; the text has the reason of the first."""


class UnscorableError(ValueError):
    """Rows of this data source cannot be scored at all."""


class UnknownDataSourceError(UnscorableError, NotImplementedError):
    """No rule scores this `data_source`."""


class MissingPackageError(UnscorableError, ImportError):
    """The rule of this `data_source` needs a package that is not installed."""
