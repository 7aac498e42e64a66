# SPDX-License-Identifier: Apache-2.0
"""Losses, penalties and advantage estimators: functions of tensors, with no communication and no device inside."""
