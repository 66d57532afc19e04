"""Derives and checks a drafter's configuration. Pure: headers and parsed files in, a report out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from . import drafter_vllm_rules as rules
from .drafter_existing import compare_existing, keep_existing
from .drafter_family import Shape, detect_family, measure
from .drafter_fields import NEEDED, Sources, assemble, build_fields
from .drafter_report import DrafterReport, Field, Problem, Severity, report_of, sorted_problems
from .drafter_table import Row, choose, narrow, nearest, parse_rows, rows_of_shape
from .drafter_target import Target
from .drafter_tensors import check_quantised, check_tensors, expected_tensors, optional_tensors
from .drafter_values import FROM_WEIGHTS, KNOWN, ROW_CHOICE, check_taps, check_values
from .errors import FirstlightError
from .safetensors_header import Tensor

# vLLM before PATTERN_READ has no use for these, so rows that differ in nothing else serve alike there
_PATTERN = frozenset({"layer_types", "sliding_window", "use_sliding_window", "is_causal"})
# vLLM takes these from the target
_INERT = frozenset({"eos_token_id", "pad_token_id", "bos_token_id", "tie_word_embeddings", "max_window_layers"})


@dataclass(frozen=True)
class Request:
    """What to derive a configuration for.

    Attributes:
        tensors: all tensors of the drafter, by name.
        target: the target, None when it is not known.
        vllm_version: the release that will serve.
        max_model_len: the longest sequence served, in tokens; None for the target's own maximum.
        user: values given by the user, by field.
        families: the rows of the family table, parsed from YAML.
        existing: the config.json that came with the weights, None without one or to ignore it.
        existing_path: its path.
        where: the weights' path, for messages.
        names: words by which the drafter may be known, such as the last parts of its path.
    """

    tensors: Mapping[str, Tensor]
    target: Target | None
    vllm_version: str = rules.DEFAULT_VERSION
    max_model_len: int | None = None
    user: Mapping[str, Any] = field(default_factory=dict)
    families: Iterable[Mapping[str, Any]] = ()
    existing: Mapping[str, Any] | None = None
    existing_path: str = "config.json"
    where: str = "drafter"
    names: Sequence[str] = ()


def derive(request: Request) -> DrafterReport:
    """Derive the configuration and check the weights against it.

    Returns:
        the report; faults are in its problems, nothing is raised for bad input.
    """
    try:
        return _derive(request)
    except FirstlightError as error:
        return report_of(error)


def _derive(request: Request) -> DrafterReport:
    version = rules.parse_version(request.vllm_version)
    rows = parse_rows(request.families)
    try:
        family = detect_family(request.tensors, request.where)
    except FirstlightError as error:
        raise _told_apart(error, request) from error
    problems = rules.family_problems(family, version)
    try:
        shape = measure(request.tensors, family, request.where)
    except FirstlightError as error:
        if not problems:
            raise
        # packed weights hide their sizes; that this vLLM cannot run them is the better answer
        return DrafterReport(family, problems=(*problems, *report_of(error).problems))
    if request.target is None:
        fix = "give the folder of the target model, or its config.json"
        problems.append(Problem("target-missing", "error", "target", "no target is given.", fix))
        return DrafterReport(family, problems=sorted_problems(problems), facts=_facts(family, shape, None, {}))
    if shape.sink_bias:
        problems += rules.sink_problems(version)
    user, bad = check_values(request.user, "set")
    problems += bad
    taps, bad = _count_taps(family, shape, request.target, "embed_tokens.weight" in request.tensors)
    problems += bad
    existing, bad = compare_existing(request.existing, request.existing_path)
    problems += bad
    sources = Sources(family, shape, taps, request.target, user=user, existing=existing)
    sources, bad = _find_row(sources, rows, request.names, version)
    problems += bad
    return _report(request, sources, version, problems, rows)


def _told_apart(error: FirstlightError, request: Request) -> FirstlightError:
    """Whether the weights of an ordinary model are those of the target, or of some other one."""
    if error.kind != "target-weights":
        return error
    layers = [int(match[1]) for name in request.tensors if (match := re.search(r"\blayers\.(\d{1,6})\.", name))]
    embeddings = [item.shape for name, item in request.tensors.items() if name.endswith("embed_tokens.weight")]
    target = request.target
    if target is not None and (target.vocab_size, target.hidden_size) in embeddings:
        what = f"holds the weights of the target itself ({len(request.tensors)} tensors), not of a drafter for it."
        return FirstlightError(what, where=error.where, fix=error.fix, kind=error.kind)
    what = (
        f"holds the weights of another language model ({len(request.tensors)} tensors, "
        f"{max(layers, default=-1) + 1} layers), not of a DFlash drafter."
    )
    return FirstlightError(what, where=error.where, fix=error.fix, kind="wrong-model")


def _report(
    request: Request, sources: Sources, version: rules.Version, problems: list[Problem], rows: Sequence[Row]
) -> DrafterReport:
    family, shape, target = sources.family, sources.shape, sources.target
    fields = build_fields(sources)
    problems += _contradictions(fields, sources.user, "set")
    problems += _contradictions(fields, sources.existing, request.existing_path)
    problems += _missing(fields, sources, rows)
    if family == "laguna" and request.existing is None:
        message = "a Laguna drafter has a configuration of its own kind, which the weights and the table cannot give."
        fix = "put the published config.json beside the weights"
        problems.append(Problem("missing-config", "error", "config.json", message, fix))
    problems += _judge(fields, sources, version, request.max_model_len)
    problems += _check_list(request.tensors, sources)
    if sources.existing:
        problems += _against_table(sources, request.existing_path)
    config = assemble(fields, family)
    if request.existing is not None:
        config, bad = keep_existing(request.existing, config, sources.user, request.existing_path)
        problems += bad
    facts = _facts(family, shape, sources.taps, config)
    facts["row"] = sources.row.id if sources.row else ""
    facts["weight_bytes"] = sum(tensor.end - tensor.begin for tensor in request.tensors.values())
    facts["num_target_layers"] = target.num_hidden_layers
    return DrafterReport(family, config, fields, sorted_problems(problems), facts)


def _facts(family: str, shape: Shape, taps: int | None, config: Mapping[str, Any]) -> dict[str, Any]:
    block = config.get("block_size")
    # slot 0 of a DFlash block is the token already known; a DSpark block is drafted whole
    drafted = block if family == "dspark" or not isinstance(block, int) else block - 1
    return {
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_taps": taps,
        "method": "dspark" if family == "dspark" else "dflash",
        "num_speculative_tokens": drafted,
    }


def _count_taps(family: str, shape: Shape, target: Target, own_embeddings: bool) -> tuple[int | None, list[Problem]]:
    """How many layers ``fc`` takes, and whether these weights can belong to this target at all."""
    problems = []
    if shape.hidden_size != target.hidden_size and not own_embeddings and family != "laguna":
        message = (
            f"the drafter is {shape.hidden_size} wide and the target {target.hidden_size}; "
            "it uses the target's embeddings, so both must agree: this is the drafter of another model."
        )
        fix = f"give a drafter of hidden_size {target.hidden_size}, or the target that this one was made for"
        problems.append(Problem("wrong-target", "error", "hidden_size", message, fix))
    width = shape.fc_width
    if width is None:
        return None, problems
    if width == 0:
        message = "'fc.weight' is empty, so nothing of the target would reach the drafter."
        problems.append(Problem("empty-fc", "error", "fc.weight", message, "copy the drafter's weights again"))
        return None, problems
    taps, rest = divmod(width, target.hidden_size)
    if rest or taps > target.num_hidden_layers:
        if not problems:
            message = (
                f"'fc.weight' takes {width} values, which is no number of layers of the target "
                f"({target.num_hidden_layers} layers of {target.hidden_size})."
            )
            fix = "give the target that this drafter was made for"
            problems.append(Problem("wrong-target", "error", "fc.weight", message, fix))
        return None, problems
    return taps, problems


def _find_row(
    sources: Sources, rows: Sequence[Row], names: Sequence[str], version: rules.Version
) -> tuple[Sources, list[Problem]]:
    """The row of the table these weights belong to, and what is ambiguous about it."""
    if sources.taps is None and sources.shape.fc_width is not None:
        return sources, []  # of another target
    found = rows_of_shape(rows, sources.family, sources.shape, sources.taps, sources.target)
    wanted = sources.user.get(ROW_CHOICE)
    if wanted is not None:
        chosen = choose(found, wanted)
        if not chosen:
            fits = ", ".join(row.id for row in found) or "none"
            message = f"'{wanted}' is no row of the family table with the sizes of these weights (these are: {fits})."
            fix = f"give one of: {fits}" if found else "leave family out"
            return sources, [Problem("unknown-row", "error", ROW_CHOICE, message, fix)]
        return replace(sources, row=chosen[0]), []
    left = narrow(found, sources.target, names)
    if len(left) == 1:
        # a drafter without fc: the row says how wide it should be
        return replace(sources, row=left[0], taps=sources.taps or left[0].shape["num_taps"]), []
    if not left:
        return sources, []
    return _ambiguous(sources, left, version)


def _ambiguous(sources: Sources, rows: Sequence[Row], version: rules.Version) -> tuple[Sources, list[Problem]]:
    """Several rows fit: say what hangs on it. The first stands for all where nothing that counts differs."""
    candidates = [assemble(build_fields(replace(sources, row=row)), sources.family) for row in rows]
    keys = {key for config in candidates for key in config}
    differing = {key for key in keys if any(config.get(key) != candidates[0].get(key) for config in candidates)}
    counts = sorted(differing - _INERT)
    chosen = replace(sources, row=rows[0])
    if not counts:
        return chosen, []
    ids = ", ".join(row.id for row in rows)
    fix = f"say which: set family to one of {ids}"
    if set(counts) <= _PATTERN and version < rules.PATTERN_READ:
        message = (
            f"the weights fit several published drafters ({ids}). They differ in {', '.join(counts)}, which vLLM "
            f"{rules.text_of(version)} ignores; {rows[0].id} is assumed. From {rules.text_of(rules.PATTERN_READ)} on "
            "the number of accepted drafts hangs on it."
        )
        return chosen, [Problem("ambiguous-family", "warning", ROW_CHOICE, message, fix)]
    message = (
        f"the weights fit several published drafters ({ids}), which differ in {', '.join(counts)}; "
        "with the wrong choice next to no draft is accepted."
    )
    # nothing is taken from either: a guess would look like knowledge
    return sources, [Problem("ambiguous-family", "error", ROW_CHOICE, message, fix)]


def _contradictions(fields: Mapping[str, Field], given: Mapping[str, Any], origin: str) -> list[Problem]:
    """Given values that the weights or the target disprove."""
    problems = []
    for name in FROM_WEIGHTS:
        if name in given and name in fields and given[name] != fields[name].value:
            true = fields[name]
            source = "the weights" if true.source == "header" else "the target"
            message = f"{origin} gives {name} as {given[name]}, but by {source} it is {true.value}."
            fix = f"leave {name} out, or give {true.value}"
            problems.append(Problem("contradicts-weights", "error", name, message, fix))
    return problems


def _missing(fields: Mapping[str, Field], sources: Sources, rows: Sequence[Row]) -> list[Problem]:
    """One problem for each field that no source has."""
    needed = [*NEEDED, *(["selector_top_k"] if sources.family == "dflash2" else [])]
    if sources.family == "quantised":
        needed.append("quantization_config")
    near = "" if sources.row or sources.taps is None else nearest(rows, sources.shape, sources.taps)
    problems = []
    for name in needed:
        if name in fields:
            continue
        why = "the weights cannot tell it and no row of the family table has these sizes"
        if near and name == "mask_token_id":
            why += f" (nearest: {near})"
        fix = f"give {name} (--set {name}=VALUE, or drafter_set in the inventory): {KNOWN[name].text}"
        problems.append(Problem("missing-field", "error", name, f"{name} is not known: {why}.", fix))
    return problems


def _judge(
    fields: Mapping[str, Field], sources: Sources, version: rules.Version, max_model_len: int | None
) -> list[Problem]:
    """Rules about single values and about what this vLLM makes of them."""
    problems = []
    value = {name: item.value for name, item in fields.items()}
    taps, mask, types = value.get("target_layer_ids"), value.get("mask_token_id"), value.get("layer_types")
    if taps is not None:
        problems += check_taps(taps, sources.taps, sources.target.num_hidden_layers)
    if mask is not None and mask >= sources.target.vocab_size:
        message = f"mask_token_id {mask} is no token of the target, which has {sources.target.vocab_size}."
        fix = "give the id of the drafter's mask token"
        problems.append(Problem("bad-value", "error", "mask_token_id", message, fix))
    if types is not None and len(types) != sources.shape.num_hidden_layers:
        message = f"layer_types has {len(types)} entries for {sources.shape.num_hidden_layers} layers."
        problems.append(Problem("bad-value", "error", "layer_types", message, "give one entry a layer"))
    window = value.get("sliding_window") or value.get("swa_window_size")
    if "sliding_attention" in (types or ()) and not window:
        message = "layer_types has sliding_attention, but there is no sliding_window."
        problems.append(Problem("missing-field", "error", "sliding_window", message, "give sliding_window, in tokens"))
    own = value.get("max_position_embeddings")
    of_target = sources.target.values.get("max_position_embeddings")
    served = max_model_len or (of_target if isinstance(of_target, int) else own)
    served_is = "max_model_len" if max_model_len else "max_model_len (the target's own maximum)"
    if isinstance(served, int):
        problems += rules.pattern_problems(types, window, version, served, served_is)
        problems += rules.position_problems(own, served, served_is)
    return problems + _doubts(fields, sources, version)


def _doubts(fields: Mapping[str, Field], sources: Sources, version: rules.Version) -> list[Problem]:
    """Values in use that nobody vouches for."""
    problems = []
    taps = fields.get("target_layer_ids")
    if taps is not None and taps.source == "formula" and sources.row is None:
        message = (
            f"target_layer_ids {taps.value} follow the reference formula, but nothing confirms them; "
            "some published drafters use other layers."
        )
        fix = "compare them with the drafter's publication, and watch the acceptance after the start"
        problems.append(Problem("taps-unconfirmed", "warning", "target_layer_ids", message, fix))
    theta = fields.get("rope_theta")
    if theta is not None and theta.source == "target" and sources.row is None:
        message = f"rope_theta {theta.value} is the target's; that the drafter has the same is assumed."
        fix = "compare it with the drafter's publication; --set rope_theta=VALUE confirms or replaces it"
        problems.append(Problem("rope-assumed", "warning", "rope_theta", message, fix))
    types = fields.get("layer_types")
    if types is not None and types.source == "default" and version >= rules.PATTERN_READ:
        message = f"full attention is assumed in every layer; vLLM {rules.text_of(version)} goes by layer_types."
        fix = "give layer_types and sliding_window as published"
        problems.append(Problem("attention-assumed", "warning", "layer_types", message, fix))
    row = sources.row
    if row is not None:
        for name, reason in row.uncertain.items():
            if name in fields and fields[name].source == "table":
                message = f"{name} {fields[name].value} of {row.id} is not certain: {reason}."
                fix = f"compare it with the drafter's publication; --set {name}=VALUE confirms or replaces it"
                problems.append(Problem("uncertain-value", "warning", name, message, fix))
        fix = "compare with the drafter's publication"
        problems += [Problem("remark", "warning", "", f"{row.id}: {text}", fix) for text in row.remarks]
    if sources.family == "dspark":
        message = "a DSpark drafter is served by the speculative method 'dspark'; 'dflash' would not load it."
        problems.append(Problem("method", "warning", "method", message, "set method to dspark"))
    return problems


def _against_table(sources: Sources, path: str) -> list[Problem]:
    """Where the existing config.json and the table (or the formula) disagree on what decides acceptance."""
    without = build_fields(replace(sources, existing={}))
    problems = []
    for name in ("target_layer_ids", "mask_token_id", "block_size", "rope_theta", "layer_types", "sliding_window"):
        if name in sources.user or name not in sources.existing or name not in without:
            continue
        theirs, ours = sources.existing[name], without[name]
        if theirs == ours.value or ours.source == "default":
            continue
        # a published row outweighs a file of unknown origin; a formula or the target's value does not
        certain = sources.row is not None and name in {"target_layer_ids", "mask_token_id"}
        whose = sources.row.id if certain and sources.row else ours.note or ours.source
        message = f"{path} has {name} {theirs}, but {ours.value} is expected ({whose})."
        fix = f"give {name} yourself (--set, or drafter_set) to confirm either value, or discard the file"
        severity: Severity = "error" if certain else "warning"
        problems.append(Problem("config-differs", severity, name, message, fix))
    return problems


def _check_list(tensors: Mapping[str, Tensor], sources: Sources) -> list[Problem]:
    family, shape, target = sources.family, sources.shape, sources.target
    if family == "quantised":
        return check_quantised(tensors, shape)
    if family == "laguna":
        message = "the tensors of this family are not checked one by one."
        fix = "compare the file's sha256 with the publisher's"
        return [Problem("tensors-unchecked", "warning", "", message, fix)]
    taps = sources.taps or (
        sources.row.shape["num_taps"] if sources.row else len(sources.user.get("target_layer_ids", ()))
    )
    needed = expected_tensors(family, shape, taps * target.hidden_size, target.vocab_size)
    if shape.fc_width is not None and sources.taps is None:
        needed["fc.weight"] = tensors["fc.weight"].shape  # that its width is wrong has been said
    optional = optional_tensors(family, shape, target.vocab_size)
    return check_tensors(tensors, needed, optional, shape.dtype)
