"""What goes wrong while profiling."""

from __future__ import annotations


class ProfileError(RuntimeError):
    """One line for the user: the flag, file or server, what was found and what is allowed."""


class Drained(RuntimeError):
    """The load's requests have come to their end; the cell is to be visited again with new ones."""
