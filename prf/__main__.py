"""``python -m prf``, the same as ``prf``."""

from prf.cli import _entry

_entry()
