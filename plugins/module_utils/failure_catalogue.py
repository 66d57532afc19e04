"""The catalogue of server failures: the one place where each kind is described.

A kind has a stable id, a cause, a remedy in the names of firstlight's variables, and the wordings by which a log
points to it. Two more verdicts are no kinds of failure: ``none`` and ``unknown``.
"""

from __future__ import annotations

from .failure_catalogue_build import BUILD, VERSION
from .failure_catalogue_capacity import CAPACITY
from .failure_catalogue_config import CONFIG, NETWORK
from .failure_catalogue_engine import ENGINE, RUNTIME
from .failure_catalogue_files import DRAFTER, FILES, PERMISSION
from .failure_kinds import Kind

NONE = "none"
"""The verdict on a server that is well."""
UNKNOWN = "unknown"
"""The verdict when the log does not tell, or tells something that the catalogue does not know."""

KINDS: tuple[Kind, ...] = (
    *BUILD,
    *VERSION,
    *CAPACITY,
    *CONFIG,
    *NETWORK,
    *FILES,
    *PERMISSION,
    *DRAFTER,
    *ENGINE,
    *RUNTIME,
)
BY_ID: dict[str, Kind] = {kind.id: kind for kind in KINDS}
