"""Remedies in the numbers of one deployment: what to set, to which value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .failure_kinds import Kind
from .log_scan import Start


@dataclass(frozen=True)
class Situation:
    deployment: Mapping[str, object]
    start: Start


def remedy_for(kind: Kind, text: str, situation: Situation) -> str:
    return kind.remedy
