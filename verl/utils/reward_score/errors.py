# SPDX-License-Identifier: Apache-2.0
"""Errors for which no response of a data source could ever be scored; reward managers let them end the run."""

__all__ = ["MissingPackageError", "UnknownDataSourceError", "UnscorableError"]


class UnscorableError(ValueError):
    """Rows of this data source cannot be scored at all."""


class UnknownDataSourceError(UnscorableError, NotImplementedError):
    """No rule scores this `data_source`."""


class MissingPackageError(UnscorableError, ImportError):
    """The rule of this `data_source` needs a package that is not installed."""
