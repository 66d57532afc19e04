"""Measures what firstlight promises about safety, on this machine, with no host: scores and counts, and their limits.

usage: report.py        exit status 1 when one falls short. Run by `make security`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "unit"), str(ROOT), str(ROOT / ".collections")]

import support_canary  # noqa: E402
import test_inputs  # noqa: E402
import test_sandbox_hostile_answers as corpus  # noqa: E402
import test_unit_file  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.action.preflight import typed  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.inputs import check_values  # noqa: E402
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_plan import parse_lock  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

LOCKS = ROOT / "roles" / "vllm_install" / "files" / "locks"


@dataclass(frozen=True)
class Row:
    """One line of the table. ``short`` says what fell short; empty when nothing did."""

    what: str
    measured: str
    wanted: str
    short: str = ""


def exposure() -> list[Row]:
    """systemd's own score of the rendered unit."""
    wanted = f"at most {test_unit_file.MOST_EXPOSED}"
    if not shutil.which("systemd-analyze"):
        missing = "systemd-analyze is not installed. Fix: apt-get install systemd"
        return [Row("exposure of the unit", "not measured", wanted, missing)]
    rows = []
    for name, overrides in (
        ("as shipped", {}),
        ("CPU build", {"vllm_install_platform": "cpu"}),
        ("addresses not limited", {"vllm_server_ip_allow": []}),
        ("models under /home", {"vllm_server_readable_paths": ["/home/models"]}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            score = test_unit_file.exposure(Path(folder), **overrides)
        short = "" if score <= test_unit_file.MOST_EXPOSED else "the unit is more exposed than promised"
        rows.append(Row(f"exposure of the unit, {name}", f"{score:.1f}", wanted, short))
    return rows


def answers() -> list[Row]:
    """Answers that attack, run as the smoke test would run them."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = list(pool.map(corpus.judge, [name for name, _, _ in corpus.ROWS]))
    wrong, contained = [], 0
    for (name, verdict, says), judged in zip(corpus.ROWS, found, strict=True):
        good = judged.name == verdict and says in judged.detail
        contained += good and verdict == "contained"
        if not good:
            wrong.append(f"{name}: {judged.name} ({judged.detail[:80]})")
    attacks = sum(verdict == "contained" for _, verdict, _ in corpus.ROWS)
    return [
        Row("hostile answers contained", str(contained), f"all {attacks}", "; ".join(wrong[:3])),
        Row("hostile answers judged as expected", str(len(corpus.ROWS) - len(wrong)), f"all {len(corpus.ROWS)}",
            "; ".join(wrong[:3])),
    ]  # fmt: skip


def canary() -> list[Row]:
    """Secrets planted in a run of the roles."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as release:
        texts = {**support_canary.played(Path(folder), "--check"), **support_canary.rendered(Path(release))}
        found = support_canary.leaks(texts)
    hidden = texts["Ansible's output"].count("VALUE_SPECIFIED_IN_NO_LOG_PARAMETER")
    return [
        Row("planted secrets found outside their file", str(len(found)), f"0 in {len(texts)} texts", "; ".join(found)),
        Row(
            "places where Ansible hid them",
            str(hidden),
            "at least 8",
            "" if hidden >= 8 else "the run did not use them",
        ),
    ]


def bad_inputs() -> list[Row]:
    """Every variable with every nonsense: one clear error that names it, or a harmless value."""
    refused = taken = 0
    wrong: list[str] = []
    for name in sorted(test_inputs.OPTIONS):
        for value in NONSENSE:
            try:
                accepted = typed(name, test_inputs.OPTIONS[name], value)
                check_values({**test_inputs.DEFAULTS, name: accepted}, test_inputs.OPTIONS)
            except FirstlightError as error:
                refused += 1
                if name not in error.message or not error.fix:
                    wrong.append(f"{name}={value!r}: {error.message[:80]}")
            except Exception as error:
                wrong.append(f"{name}={value!r}: {type(error).__name__}")
            else:
                taken += 1
                wrong += _harm(name, accepted)
    known = 0
    for name, value, message in test_inputs.BAD:
        try:
            test_inputs.check(**{name: value})
        except FirstlightError as error:
            known += message in error.message and error.where.startswith(name)
    total = len(test_inputs.OPTIONS) * len(NONSENSE)
    return [
        Row(f"nonsense in {len(test_inputs.OPTIONS)} variables: refused or harmless", str(refused + taken - len(wrong)),
            f"all {total}", "; ".join(wrong[:3])),
        Row("known bad values refused with their own message", str(known), f"all {len(test_inputs.BAD)}",
            "" if known == len(test_inputs.BAD) else "see tests/unit/test_inputs.py"),
    ]  # fmt: skip


def _harm(name: str, value: Any) -> list[str]:
    try:
        test_inputs.require_harmless(name, value)
    except AssertionError:
        return [f"{name}={value!r} was accepted"]
    return []


NONSENSE: list[Any] = [
    None, True, -1, 0, 65536, 2**63, float("nan"), float("inf"), "", " ", "\n", "\0", "a\nb", "%n", "%", '"', "'",
    "$(id)", "`id`", "; rm -rf /", "a|b", "relative/path", "/a/../b", "../..", "~", "{", '{"a": 1}', "[1, 2]", "a,b",
    "\x1b[31m", "1e999999999", "${HOME}", "/home/a b", "ünïcode", "a" * 5000, "fe80::1%;x", "};", "# x", [], [None],
    ["a\nb"], {"a": {"b": 1}}, {"": ""}, {"a b": "c"},
]  # fmt: skip


def locks() -> list[Row]:
    """What is installed on hosts."""
    rows = []
    for path in sorted(LOCKS.glob("*.txt")):
        try:
            pins = parse_lock(path.read_text(encoding="utf-8"), path.name)
            loose = re.findall(
                r"(?m)^(?:-i|--index-url|--extra-index-url|--trusted-host|-f|--find-links).*", path.read_text()
            )
            rows.append(
                Row(f"packages of lock {path.stem}, each pinned and hashed", str(len(pins)), "all",
                    f"it names {loose[0]}" if loose else "")
            )  # fmt: skip
        except FirstlightError as error:
            rows.append(Row(f"packages of lock {path.stem}", "not read", "all", error.message))
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {
    "exposure": exposure,
    "answers": answers,
    "bad_inputs": bad_inputs,
    "locks": locks,
}


def show(rows: list[Row], seconds: float) -> int:
    """Print the table, and below it what fell short; the exit status."""
    table = Table("what", "measured", "wanted", "", title="firstlight: safe by default")
    for row in rows:
        table.add_row(row.what, row.measured, row.wanted, "[red]short[/]" if row.short else "[green]ok[/]")
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    short = [row for row in rows if row.short]
    for row in short:
        console.print(f"{row.what}: {row.short}", style="red", markup=False)
    console.print(f"{len(rows) - len(short)} of {len(rows)} hold; {seconds:.0f} s")
    return 1 if short or not rows else 0


def main() -> int:
    """Measure, print, judge."""
    if sys.argv[1:] == ["canary"]:
        json.dump([asdict(row) for row in canary()], sys.stdout)
        return 0
    began = time.monotonic()
    # A process of its own: it mostly waits, and the sandbox forks, which threads beside it would not survive.
    planted = subprocess.Popen([sys.executable, __file__, "canary"], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    rows = [row for part in PARTS.values() for row in part()]
    told, _ = planted.communicate(timeout=300)
    rows[4:4] = [Row(**row) for row in json.loads(told)]
    return show(rows, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
