"""Errors that a user can mend."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input, told in one line: the flag, file or field, its value, what is allowed."""
