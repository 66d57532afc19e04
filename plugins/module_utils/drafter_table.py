"""The table of published drafters: which row do these weights belong to?

The table itself is data, ``roles/drafter/files/families.yml``; here it comes parsed, since a managed host cannot be
expected to read YAML.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .drafter_family import SIZES, Shape
from .drafter_target import Target
from .errors import FirstlightError


@dataclass(frozen=True)
class Row:
    """A published drafter.

    Attributes:
        id: the repository's name, with ``@revision`` where several revisions differ.
        family: as ``drafter_family.detect_family`` names it.
        provenance: where the values were read.
        target: the target's repository and what else tells it from others of the same sizes.
        shape: the drafter's sizes and its number of taps.
        taps: the published target_layer_ids.
        formula: whether these follow the reference formula.
        config: the other published values, by configuration field.
        uncertain: fields whose value was not read in the drafter's own configuration, with the reason.
        remarks: what else to know when serving with it.
    """

    id: str
    family: str
    provenance: str
    target: Mapping[str, Any]
    shape: Mapping[str, int]
    taps: tuple[int, ...]
    formula: bool
    config: Mapping[str, Any]
    uncertain: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def parse_rows(rows: Iterable[Mapping[str, Any]]) -> tuple[Row, ...]:
    """Turn the parsed table into rows.

    Raises:
        FirstlightError: kind ``bad-family-table``.
    """
    parsed = []
    for number, row in enumerate(rows, 1):
        try:
            parsed.append(_parse_row(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FirstlightError(
                f"row {number} of the family table is not complete: {type(error).__name__} {error}.",
                where="families",
                fix="compare it with the rows of roles/drafter/files/families.yml",
                kind="bad-family-table",
            ) from error
    return tuple(parsed)


def _parse_row(row: Mapping[str, Any]) -> Row:
    shape = {name: int(row["shape"][name]) for name in (*SIZES, "num_taps")}
    target = dict(row["target"])
    for name in ("num_hidden_layers", "vocab_size"):
        target[name] = int(target[name])
    return Row(
        id=str(row["id"]),
        family=str(row["family"]),
        provenance=str(row["provenance"]),
        target=target,
        shape=shape,
        taps=tuple(int(layer) for layer in row["target_layer_ids"]),
        formula=bool(row["formula"]),
        config=dict(row["config"]),
        uncertain=dict(row.get("uncertain") or {}),
        remarks=tuple(row.get("remarks") or ()),
    )


def rows_of_shape(rows: Sequence[Row], family: str, shape: Shape, taps: int | None, target: Target) -> list[Row]:
    """The rows with exactly these sizes (any number of taps for None), for a target with these layers and tokens."""
    backbone = "dflash" if family == "quantised" else family
    return [
        row
        for row in rows
        if row.family == backbone
        and all(row.shape[name] == getattr(shape, name) for name in SIZES)
        and taps in {None, row.shape["num_taps"]}
        and row.target["num_hidden_layers"] == target.num_hidden_layers
        and row.target["vocab_size"] == target.vocab_size
    ]


def narrow(rows: Sequence[Row], target: Target, drafter_names: Sequence[str]) -> list[Row]:
    """Use what tells targets of equal sizes apart: their architecture, then names in the paths.

    Returns:
        the rows that are left; several when nothing tells them apart.
    """
    kind, steps = target.values.get("model_type"), []
    if any(kind in row.target.get("model_type", ()) for row in rows):
        steps.append([row for row in rows if kind in row.target.get("model_type", (kind,))])
    if target.hybrid:
        steps.append([row for row in rows if row.target.get("hybrid") is not False])
    steps += [_named(rows, target.names), _named(rows, drafter_names)]
    if not target.hybrid:  # weaker than a name: the configuration may be a cut-down one
        steps.append([row for row in rows if not row.target.get("hybrid")])
    kept = list(rows)
    for step in steps:
        kept = [row for row in kept if row in step] or kept
    return kept


def choose(rows: Sequence[Row], wanted: str) -> list[Row]:
    """The rows that the user means by ``wanted``: an id, with or without its revision, or a repository."""
    plain = _plain(wanted)
    ids = {_plain(row.id): row for row in rows}
    if plain in ids:
        return [ids[plain]]
    last = _plain(wanted.rsplit("/", 1)[-1])
    return [row for row in rows if _plain(row.id.split("@")[0]) == last]


def _named(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """The rows whose target or drafter one of ``names`` carries; the longest name that fits wins."""
    parts = [_plain(name) for name in names]
    best: dict[int, list[Row]] = {}
    for row in rows:
        own = (_plain(str(row.target["repo"]).rsplit("/", 1)[-1]), _plain(row.id.split("@")[0]))
        length = max((len(name) for name in own if any(name in part for part in parts)), default=0)
        if length:
            best.setdefault(length, []).append(row)
    return best[max(best)] if best else []


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def nearest(rows: Sequence[Row], shape: Shape, taps: int) -> str:
    """For a drafter in no row: rows that differ in one size only, to point at a likely slip."""
    near = []
    for row in rows:
        sizes = {name: getattr(shape, name) for name in SIZES} | {"num_taps": taps}
        differing = [name for name, value in sizes.items() if row.shape[name] != value]
        if len(differing) == 1:
            name = differing[0]
            near.append(f"{row.id} has {name} {row.shape[name]}, this one {sizes[name]}")
    return "; ".join(near[:3])
