"""A drafter from its weights to a folder that vLLM can serve with: inspect, then write. For module and command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import drafter_vllm_rules as rules
from .canonical_json import digest
from .drafter_derive import Request, derive
from .drafter_existing import describes_drafter
from .drafter_place import Placement, make_folder, place, plan_placement
from .drafter_report import DrafterReport, Problem, report_of, sorted_problems
from .drafter_target import Target, read_target
from .drafter_weights import Weights, read_json, read_weights
from .errors import FirstlightError
from .files import write_atomically

CONFIG_NAME = "config.json"
PUBLISHED_NAME = "config.json.published"  # what stood there before firstlight changed it
MARKER_NAME = ".firstlight.json"  # digests of what firstlight wrote, to tell it from what others wrote
_MAX_CONFIG_BYTES = 1_000_000


@dataclass(frozen=True)
class Job:
    """What to inspect, and where to put it.

    Attributes:
        path: the drafter's safetensors file, index or folder.
        target: the target's folder or config.json; empty when not known.
        dest: the folder for config.json and weights; empty for the weights' own folder.
        vllm_version: the release that will serve.
        max_model_len: the longest sequence served, in tokens; None for the target's maximum.
        user: values given by the user.
        families: the family table, parsed.
        keep_existing: whether a config.json that firstlight did not write is kept.
        writing: whether ``dest`` is to be written; if not, what else lies there is no error.
        versioned: whether to write into a folder below ``dest`` that is named by configuration and weights, so that
            what an earlier release serves from is never changed under it, and going back finds it as it was.
    """

    path: str
    target: str = ""
    dest: str = ""
    vllm_version: str = rules.DEFAULT_VERSION
    max_model_len: int | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    families: Iterable[Mapping[str, Any]] = ()
    keep_existing: bool = True
    writing: bool = True
    versioned: bool = False


@dataclass(frozen=True)
class Plan:
    """What was found and what there is to do.

    Attributes:
        report: of the inspection; when it is not usable nothing is written.
        dest: the folder.
        placements: one a file of weights.
        before: the text of dest/config.json as it is, None when there is none.
        after: the text it shall have.
        bytes_read: of the weights.
    """

    report: DrafterReport
    dest: str
    placements: tuple[Placement, ...] = ()
    before: str | None = None
    after: str = ""
    bytes_read: int = 0

    @property
    def changed(self) -> bool:
        """Whether anything is to be done."""
        return self.before != self.after or not all(item.done for item in self.placements)


def inspect(job: Job) -> Plan:
    """Derive, check and plan; changes nothing and raises nothing for bad input."""
    dest = job.dest
    try:
        dest = dest or _folder_of(job.path)
        return _inspect(job, dest)
    except FirstlightError as error:
        return Plan(report_of(error), dest)
    except (OSError, ValueError) as error:
        # a folder on the way may not be entered, a name is too long or holds a NUL
        fault = FirstlightError(f"{error}.", where=job.path[:200], fix="check path, target and dest", kind="unreadable")
        return Plan(report_of(fault), dest)


def _inspect(job: Job, dest: str) -> Plan:
    weights = read_weights(job.path)
    target = read_target(job.target) if job.target else None
    existing, existing_path, warnings = _find_existing(weights, job, dest)
    report = derive(_request(job, weights, target, existing, existing_path))
    problems = [*report.problems, *warnings]
    if job.versioned and report.usable:
        dest = str(Path(dest, version_name(report, weights)))
    placements: list[Placement] = []
    try:
        placements = plan_placement(weights, dest) if job.writing else []
    except FirstlightError as error:
        problems += report_of(error).problems
    except OSError as error:
        problems.append(Problem("unreadable", "error", dest, f"{error}.", "make the folder accessible"))
    report = replace(report, problems=sorted_problems(problems))
    before = _text_of(Path(dest, CONFIG_NAME))
    after = json.dumps(report.config, indent=2) + "\n"
    if before is not None and _same_document(before, report.config):
        after = before  # only the layout differs
    return Plan(report, dest, tuple(placements), before, after, weights.bytes_read)


def version_name(report: DrafterReport, weights: Weights) -> str:
    """Name of the folder of one configuration with one set of weights: 12 hexadecimal digits."""
    stats = [(Path(name).name, (found := Path(name).stat()).st_size, found.st_mtime_ns) for name in weights.files]
    return digest({"config": report.config_digest, "weights": stats})[:12]


def _request(
    job: Job, weights: Weights, target: Target | None, existing: Mapping[str, Any] | None, existing_path: str
) -> Request:
    return Request(
        tensors=weights.tensors,
        target=target,
        vllm_version=job.vllm_version,
        max_model_len=job.max_model_len,
        user=job.user,
        families=job.families,
        existing=existing,
        existing_path=existing_path,
        where=job.path,
        names=Path(job.path).absolute().parts[-4:],
    )


def apply(plan: Plan) -> tuple[Placement, ...]:
    """Do what the plan says, the configuration last.

    Returns:
        the placements as they were done.

    Raises:
        FirstlightError: the report is not usable, or the file system refuses.
    """
    if not plan.report.usable:
        raise failure(plan.report)
    try:
        make_folder(plan.dest)
        done = tuple(place(item) for item in plan.placements)
        if plan.before != plan.after:
            _write_config(plan)
    except OSError as error:
        raise FirstlightError(
            f"the drafter could not be written: {error}.",
            where=plan.dest,
            fix="check free space and permissions of that folder",
            kind="write-failed",
        ) from error
    return done


def _write_config(plan: Plan) -> None:
    path, marker = Path(plan.dest, CONFIG_NAME), Path(plan.dest, MARKER_NAME)
    known = _own_digests(Path(plan.dest))
    if plan.before is not None and not _is_own(plan.before, known):
        published = Path(plan.dest, PUBLISHED_NAME)
        if not published.exists():
            write_atomically(published, plan.before)
    # written before the file it vouches for, so that a crash between the two never makes ours look like another's
    digests = [plan.report.config_digest, *known][:2]
    write_atomically(marker, json.dumps({"config_digests": digests}) + "\n")
    write_atomically(path, plan.after)


def failure(report: DrafterReport) -> FirstlightError:
    """All errors of a report as one."""
    errors = report.errors
    first = errors[0]
    rest = "".join(f" Also: {problem.message} Fix: {problem.fix}." for problem in errors[1:6])
    more = f" And {len(errors) - 6} more." if len(errors) > 6 else ""  # noqa: PLR2004
    where = first.field or "drafter"
    what = first.message.removeprefix(f"{where}: ")
    return FirstlightError(what, where=where, fix=f"{first.fix}.{rest}{more}".removesuffix("."), kind=first.id)


def _find_existing(weights: Weights, job: Job, dest: str) -> tuple[dict[str, Any] | None, str, list[Problem]]:
    """The config.json to respect: one that is not firstlight's own, first in ``dest``, then beside the weights."""
    if not job.keep_existing:
        return None, "", []
    home = str(Path(weights.files[0]).parent)
    for folder in dict.fromkeys((dest, home)):
        known = _own_digests(Path(folder))
        for name in (CONFIG_NAME, PUBLISHED_NAME):
            path = str(Path(folder, name))
            if not Path(path).exists():
                continue
            document, _ = read_json(path, _MAX_CONFIG_BYTES, "bad-config")
            if digest(document) in known:
                continue
            beside = folder == home and not Path(job.path).is_dir()
            if beside and not describes_drafter(document):
                message = f"{path} describes another model and is left alone."
                fix = "put the drafter into a folder of its own"
                severe = folder == dest and job.writing  # it would have to be overwritten
                return None, "", [Problem("wrong-model", "error" if severe else "warning", path, message, fix)]
            return document, path, []
    return None, "", []


def _own_digests(folder: Path) -> list[str]:
    try:
        document, _ = read_json(str(Path(folder, MARKER_NAME)), _MAX_CONFIG_BYTES, "bad-marker")
    except FirstlightError:
        return []
    digests = document.get("config_digests")
    return [item for item in digests if isinstance(item, str)] if isinstance(digests, list) else []


def _is_own(text: str, known: list[str]) -> bool:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and digest(document) in known


def _same_document(text: str, config: Mapping[str, Any]) -> bool:
    try:
        return bool(json.loads(text) == config)
    except (ValueError, RecursionError):
        return False


def _text_of(path: Path) -> str | None:
    try:
        # asked first: reading a FIFO would never end
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError:
        return None


def _folder_of(path: str) -> str:
    given = Path(path).absolute()
    return str(given if given.is_dir() else given.parent)
