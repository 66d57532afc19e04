"""Why a server failed in the smoke test: what it wrote to the journal explains more than how its requests ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from .diagnose import diagnose
from .errors import FirstlightError
from .failure_catalogue import NONE, UNKNOWN
from .smoke_run import SmokeFailure
from .systemd import Systemd

#: Failures in which the server itself went wrong, so that its journal is worth reading.
SERVER_FAULTS = frozenset(
    {
        "died-under-load",
        "failed-under-load",
        "counters-stuck",
        "engine-dead",
        "request-rejected",
        "server-error",
        "server-refused",
        "server-reset",
        "server-restarted",
        "server-timeout",
    }
)
_LAST_WORDS_S = 1.0  # a dying engine writes its traceback while the request is already refused


def explain(
    failure: SmokeFailure,
    unit: str,
    invocation_id: str = "",
    *,
    systemd: Systemd | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The failure as results carry it, with the journal's cause in front where the journal tells one.

    Args:
        failure: how the smoke test failed.
        unit: name of the unit, without ``.service``; empty leaves the journal alone.
        invocation_id: the start that was tested; empty for the unit's present one, which after a restart is another.
        systemd: of the host.
        sleep: waits for the journal to be complete.

    Returns:
        ``id``, ``cause``, ``remedy``, ``seen``.
    """
    told = failure.as_failure()
    if not unit or failure.kind not in SERVER_FAULTS:
        return told
    host = systemd or Systemd()
    try:
        sleep(_LAST_WORDS_S)
        host.sync_journal()
        name = f"{unit}.service"
        start = invocation_id or host.show(name).invocation_id
        entries, _ = host.journal_lines(start, None, unit=name)
    except FirstlightError as error:
        return {**told, "seen": [*told["seen"], f"the journal could not be read: {error.what}"]}
    verdict = diagnose(entry.text for entry in entries)
    if verdict.id == NONE:
        return {**told, "seen": [*told["seen"], f"the journal of {name} shows no failure of the server"]}
    seen = [*([f"journal: {verdict.text}"] if verdict.text else []), *told["seen"]]
    if verdict.id == UNKNOWN:
        return {**told, "seen": seen}
    return {
        "id": verdict.id,
        "cause": f"{verdict.cause} It showed in the smoke test: {told['cause']}",
        "remedy": verdict.remedy or told["remedy"],
        "seen": seen,
    }
