"""docs/failures.md as the catalogue has it. Run this file to write it anew."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "failures.md"
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / ".collections")]

from ansible_collections.firstlight.vllm.plugins.module_utils.failure_catalogue import KINDS  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.failure_kinds import AREAS  # noqa: E402

TITLES = {
    "build-env": "Build tools and drivers",
    "version": "Versions",
    "capacity": "Memory, disk, threads",
    "config": "Settings",
    "network": "Network and hub",
    "files": "Model files",
    "permission": "Permissions",
    "drafter": "The drafter",
    "engine": "The engine",
    "runtime": "While serving",
}

HEAD = """# Why a server failed

`firstlight diagnose LOGFILE...` reads logs of vLLM and gives each a verdict; a run of firstlight does the same with
the journal of a start that failed. A log may come from `journalctl`, `docker logs`, syslog or a file. With `--json` the
answer is a list of `{"file", "id", "line", "text", "cause", "remedy"}`, one for each log; `-` reads standard input.
The exit status is 0 when every log could be read, whatever its verdict, and 2 otherwise.

* `id` is one of the kinds below, `none` for a server that is well, or `unknown`.
* `line` and `text` are the line that decided, counted from 1.
* `remedy` names firstlight's variables, with the values to set where the log or the deployment give them;
  `--set max_num_seqs=16` tells what a log does not hold.

How a verdict is found:

* Of several starts in one log the last decides. A last start that is well means `none`, whatever came before; one that
  tells nothing leaves the word to the start before it.
* A server that became ready outlived what was logged before. What is logged afterwards counts when the server died of
  it, or when it proves that the engine is lost.
* The API server's general message comes last in every failed start and decides only when nothing else is there.
* Warnings decide only in a log that shows a failure; information does not decide, but for the few lines that are a
  failure in themselves.
* An error that is not in the catalogue makes the verdict `unknown`, with its line: no guess.
* That a drafter does nothing shows in the lines of `SpecDecoding metrics`: over at least 10 drafts no token after the
  first is accepted, or the mean acceptance length is below 1.5 with next to none accepted after the first. A log
  without such lines cannot tell; the counters of `/metrics` can, and the smoke test reads them.
"""


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for area in AREAS:
        parts.append(f"## {TITLES[area]}\n")
        parts.append("| kind | cause | remedy |\n|---|---|---|")
        rows = [kind for kind in KINDS if kind.area == area]
        parts.extend(f"| `{kind.id}` | {_cell(kind.cause)} | {_cell(kind.remedy)} |" for kind in rows)
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
