"""One digest of anything that JSON can tell, which hosts have recorded: its values must never change."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest(value: Any) -> str:
    """Hex SHA-256 of the value's canonical JSON: sorted keys, no blanks, ASCII. What is not JSON counts as its text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
