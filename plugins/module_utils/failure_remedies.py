"""Remedies in the numbers of one deployment: which variable to set, and to what.

The numbers come from the deciding line, from what the server logged of its own arguments, and from the deployment's
variables, in this order. Where they are missing, the catalogue's general remedy stands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .failure_kinds import Kind
from .log_lines import split_level
from .log_scan import Start
from .speculation_log import taps

AMPLE_BATCHED_TOKENS = 32768
"""``max_num_batched_tokens`` that leaves room for any sensible number of sequences and drafted tokens."""
_MOST_DEFAULT_SEQUENCES = 1024
_HIGH_UTILIZATION = 0.95
_ARGUMENTS = re.compile(r"non-default args: (\{.{1,20000}\})")
_CHUNKED = re.compile(r"max_num_batched_tokens=(\d+)")


@dataclass(frozen=True)
class Situation:
    """What is known beside the deciding line.

    Attributes:
        deployment: variables of the deployment, as `diagnose` takes them.
        start: what the log holds of the failed start.
        before: the line before the deciding one.
    """

    deployment: Mapping[str, object]
    start: Start
    before: str = ""

    @cached_property
    def arguments(self) -> dict[str, object]:
        """The server's own arguments that are no defaults, as it logged them; empty when it did not."""
        seen = self.start.first.get("arguments")
        found = _ARGUMENTS.search(seen.text) if seen else None
        if not found:
            return {}
        try:
            value = ast.literal_eval(found[1])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def get(self, name: str) -> object:
        """A setting by its name without prefix; None when it is not known."""
        if name in self.arguments:
            return self.arguments[name]
        speculative = self.arguments.get("speculative_config")
        if isinstance(speculative, dict) and name in speculative:
            return speculative[name]
        return self.deployment.get(name)

    def whole(self, name: str) -> int | None:
        """A setting that is a positive whole number; None when it is not known."""
        value = self.get(name)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def share(self, name: str) -> float | None:
        """A setting that is a share between 0 and 1; None when it is not known."""
        value = self.get(name)
        try:
            number = float(str(value))
        except ValueError:
            return None
        return number if 0 < number <= 1 else None

    @property
    def unit(self) -> str:
        """The unit's name, for commands."""
        return str(self.deployment.get("unit") or "vllm")


def remedy_for(kind: Kind, text: str, situation: Situation) -> str:
    """What to do about a failure of this deployment, as one or two sentences.

    Args:
        kind: the failure.
        text: the deciding line.
        situation: what else is known.
    """
    concrete = _CONCRETE.get(kind.id)
    return (concrete(text, situation) if concrete else None) or kind.remedy


def _numbers(pattern: str, text: str) -> tuple[int, ...] | None:
    found = re.search(pattern, text, re.IGNORECASE)
    return tuple(int(group) for group in found.groups()) if found else None


def _spec_batched_tokens(text: str, at: Situation) -> str | None:
    drafted, sequences = at.whole("num_speculative_tokens"), at.whole("max_num_seqs")
    if drafted is None:
        return None
    sequences = sequences or _sequences(text, at, drafted)
    if sequences is None:
        enough = max((drafted + 1) * _MOST_DEFAULT_SEQUENCES, AMPLE_BATCHED_TOKENS)
        return f"Set vllm_server_max_num_batched_tokens: {enough}, enough for any default of vllm_server_max_num_seqs."
    least = (drafted + 1) * sequences
    return (
        f"Set vllm_server_max_num_batched_tokens: {max(least, AMPLE_BATCHED_TOKENS)} (at least {least} = "
        f"{sequences} sequences x ({drafted} drafted tokens + 1)), or lower vllm_server_max_num_seqs."
    )


def _sequences(text: str, at: Situation, drafted: int) -> int | None:
    """The sequences that vLLM took by default, from the budget it had and what was left of it."""
    left = _numbers(r"is set to (-?\d+)", text)
    batched = at.whole("max_num_batched_tokens")
    chunked = at.start.first.get("chunked")
    if batched is None and chunked is not None:
        found = _CHUNKED.search(chunked.text)
        batched = int(found[1]) if found else None
    if left is None or batched is None:
        return None
    for slots in (drafted - 1, drafted):  # releases differ in whether the first drafted token needs a slot
        if slots > 0 and (batched - left[0]) % slots == 0:
            return (batched - left[0]) // slots
    return None


def _batched_tokens(text: str, at: Situation) -> str | None:
    found = (
        _numbers(r"max_num_seqs \((\d+)\)", text)
        or _numbers(r"max_model_len \((\d+)\)", text)
        or _numbers(r"block_size \((\d+)\)", text)
        or _numbers(r"max_tokens_per_mm_item \((\d+)\)", text)
    )
    if not found:
        return None
    drafted, sequences = at.whole("num_speculative_tokens"), at.whole("max_num_seqs")
    least = max(found[0], (drafted + 1) * sequences) if drafted and sequences else found[0]
    return f"Set vllm_server_max_num_batched_tokens: {least}, or more."


def _kv_too_small(text: str, at: Situation) -> str | None:
    found = _numbers(r"estimated maximum model length is (\d+)", text) or _numbers(r"in KV cache \((\d+)\)", text)
    if not found:
        return None
    now = at.share("gpu_memory_utilization")
    other = f", or raise vllm_server_gpu_memory_utilization above {now:g}" if now and now < _HIGH_UTILIZATION else ""
    return f"Set vllm_server_max_model_len: {found[0]}, or lower{other}."


def _over_model(text: str, _: Situation) -> str | None:
    found = _numbers(r"derived max_model_len \(\w+=(\d+)", text)
    return (
        f"Set vllm_server_max_model_len: {found[0]}, or declare rope scaling with hf-overrides in "
        "vllm_server_extra_args if the model supports it."
        if found
        else None
    )


def _no_cache_blocks(_: str, at: Situation) -> str | None:
    now = at.share("gpu_memory_utilization")
    if now is None:
        return None
    if now < _HIGH_UTILIZATION:
        return f"Set vllm_server_gpu_memory_utilization: {_HIGH_UTILIZATION} (now {now:g})."
    batched = at.whole("max_num_batched_tokens")
    half = f" (now {batched}; try {batched // 2})" if batched else ""
    return f"Lower vllm_server_max_num_batched_tokens{half}, or serve a quantised checkpoint."


def _free_memory(text: str, _: Situation) -> str | None:
    found = re.search(r"\((\d+\.?\d*)/(\d+\.?\d*) GiB\)", text)
    if not found or not float(found[2]):
        return None
    free, total = float(found[1]), float(found[2])
    share = int((free / total - 0.01) * 100) / 100
    if share <= 0:
        return None
    return (
        f"Another process holds {total - free:.1f} of {total:.1f} GiB: end it (nvidia-smi shows it), or set "
        f"vllm_server_gpu_memory_utilization: {share:g}."
    )


def _graph_memory(_: str, at: Situation) -> str | None:
    now, sequences = at.share("gpu_memory_utilization"), at.whole("max_num_seqs")
    if now is None:
        return None
    fewer = f" (now {sequences})" if sequences else ""
    return (
        f"Set vllm_server_gpu_memory_utilization: {max(now - 0.03, 0.01):.2f} (now {now:g}), or lower "
        f"vllm_server_max_num_seqs{fewer}; vllm_server_extra_args: {{enforce-eager: true}} as a stopgap."
    )


def _weights_memory(_: str, at: Situation) -> str | None:
    now = at.whole("tensor_parallel_size")
    if now is None:
        return None
    return (
        f"Set vllm_server_tensor_parallel_size: {2 * now} (now {now}) on a host with as many GPUs, or serve a "
        "quantised checkpoint."
    )


def _mamba(text: str, _: Situation) -> str | None:
    found = _numbers(r"Mamba cache blocks \((\d+)\)", text) or _numbers(r"to at most (\d+)", text)
    return f"Set vllm_server_max_num_seqs: {found[0]}, or lower." if found else None


def _heads(text: str, _: Situation) -> str | None:
    found = _numbers(r"heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)", text)
    found = found or _numbers(r"(\d+) is not divisible by (\d+)", text)
    if not found or found[1] < 1:
        return None
    fitting = next(size for size in range(found[1], 0, -1) if found[0] % size == 0)
    return f"Set vllm_server_tensor_parallel_size: {fitting}, a divisor of {found[0]}."


def _gpus(text: str, _: Situation) -> str | None:
    found = _numbers(r"available GPUs? \((\d+)\)", text) or _numbers(r"visible devices \((\d+)\)", text)
    found = found or _numbers(r"gpu count \((\d+)\)", text)
    if not found or not found[0]:
        return None
    return f"Set vllm_server_tensor_parallel_size: {found[0]}, as many GPUs as the process sees, or make more visible."


def _port(text: str, at: Situation) -> str | None:
    found = _numbers(r"\('[^']*', (\d+)", text)
    port = found[0] if found else at.whole("port")
    if port is None:
        return None
    return f"End the process that `ss -ltnp 'sport = :{port}'` shows, or set another vllm_server_port (now {port})."


_FIELD = re.compile(r"^[a-z]\w{1,60}(?:\.\w{1,60}){0,3}$")


def _field(at: Situation) -> str | None:
    """The field that a validation error is about: it stands alone on the line before."""
    name = split_level(at.before)[1].strip()
    return name if _FIELD.match(name) else None


def _flag(text: str, at: Situation) -> str | None:
    found = re.search(r"unrecognized arguments: (--[\w-]+)", text)
    if found:
        name = found[1].lstrip("-")
        return f"Remove or correct {name} in vllm_server_extra_args: this vLLM has no such option."
    if re.search(r"reasoning parser '", text, re.IGNORECASE):
        return "Set vllm_server_reasoning_parser to one that the message lists, or empty."
    if re.search(r"invalid tool call parser", text, re.IGNORECASE):
        return "Set vllm_server_tool_call_parser to one that the message lists, or empty."
    field = _field(at)
    if field and "Input should" in text:
        return f"Correct vllm_server_{field} (or {field.replace('_', '-')} in vllm_server_extra_args)."
    found = re.search(r"argument -{1,2}([\w-]+)", text)
    return (
        f"Correct {found[1]} in vllm_server_extra_args (or the variable of that name), as the message says."
        if found
        else None
    )


def _speculation(text: str, at: Situation) -> str | None:
    field = _field(at)
    if field and "Unexpected keyword" in text:
        return f"Remove {field} from speculative-config in vllm_server_extra_args: this vLLM has no such key."
    if field and "Input should" in text:
        return f"Correct {field} of speculative-config (vllm_server_extra_args); the method for DFlash is dflash."
    if "num_speculative_tokens` was provided" in text:
        return "Set vllm_server_num_speculative_tokens: 15 (the drafter's block size minus one)."
    return None


def _variable(_: str, at: Situation) -> str | None:
    seen = at.start.last.get("variable")
    found = re.search(r"(?:getenv\(|environ\[|environ\.get\()\s*['\"](\w+)", seen.text) if seen else None
    return f"Give {found[1]} a number in vllm_server_environment, or remove it there." if found else None


def _path(wording: str) -> Callable[[str, Situation], str | None]:
    def remedy(text: str, _: Situation) -> str | None:
        found = re.search(r"['\"`](/[^'\"`]{1,300})['\"`]", text)
        return wording.format(path=found[1]) if found else None

    return remedy


def _low_acceptance(text: str, at: Situation) -> str | None:
    wanted, shown = at.get("auxiliary_layers"), taps(text)
    if shown is None and "taps" in at.start.first:
        shown = taps(at.start.first["taps"].text)
    if not isinstance(wanted, (list, tuple)) or shown is None:
        return None
    if tuple(wanted) == shown:
        return (
            "The taps in the log are the right ones: check mask_token_id (drafter_set) and the drafter's weights, and "
            "start once with an empty compile cache."
        )
    return (
        f"The log shows the taps {list(shown)} where {list(wanted)} are right: run firstlight again, so that it writes "
        "the drafter's config.json, or set target_layer_ids in drafter_set; the compile cache must not be reused."
    )


def _start_timeout(text: str, _: Situation) -> str | None:
    found = _numbers(r"Waited (\d+) ?s", text)
    return f'Set vllm_server_environment: {{VLLM_ENGINE_READY_TIMEOUT_S: "{3 * found[0]}"}}.' if found else None


def _replay(_: str, at: Situation) -> str | None:
    sequences = at.whole("max_num_seqs")
    if sequences is None or sequences == 1:
        return None
    return (
        "Set vllm_server_cudagraph_mode: PIECEWISE. If it is set already, set vllm_server_extra_args: {enforce-eager: "
        f"true}}, or vllm_server_max_num_seqs: {max(sequences // 2, 1)} (now {sequences}), and move to a newer vLLM "
        "(vllm_install_version)."
    )


def _journal(wording: str) -> Callable[[str, Situation], str | None]:
    return lambda _, at: wording.format(unit=at.unit)


_CONCRETE: dict[str, Callable[[str, Situation], str | None]] = {
    "spec-batched-tokens-too-small": _spec_batched_tokens,
    "batched-tokens-too-small": _batched_tokens,
    "kv-cache-too-small": _kv_too_small,
    "max-model-len-over-model": _over_model,
    "no-memory-for-cache-blocks": _no_cache_blocks,
    "free-memory-below-utilization": _free_memory,
    "gpu-oom-graph-capture": _graph_memory,
    "gpu-oom-weights": _weights_memory,
    "mamba-cache-too-small": _mamba,
    "tp-not-dividing-heads": _heads,
    "tp-exceeds-gpus": _gpus,
    "port-in-use": _port,
    "flag-rejected": _flag,
    "env-var-malformed": _variable,
    "spec-config-invalid": _speculation,
    "cache-dir-not-writable": _path(
        "Make {path} writable for the service user (vllm_server_user), or point HF_HOME elsewhere in "
        "vllm_server_environment if it is the hub's cache."
    ),
    "model-dir-invalid": _path(
        "Check that {path} exists, is readable by the service user and holds a config.json; below /home or /root it "
        "needs vllm_server_readable_paths."
    ),
    "model-json-broken": _path("Fetch {path} again from the hub at the same revision."),
    "weights-missing": _path("Put the *.safetensors files of the model into {path}."),
    "drafter-low-acceptance": _low_acceptance,
    "engine-start-timeout": _start_timeout,
    "cudagraph-replay-fault": _replay,
    "systemd-start-limit": _journal(
        "Read the first failed start (journalctl -u {unit} -b), mend that, then run systemctl reset-failed {unit}."
    ),
    "engine-wrapper-only": _journal(
        "Read the whole start (journalctl -u {unit} -b: the Worker and EngineCore lines before the first ERROR); if "
        "there are none, look in journalctl -k for a killed process."
    ),
}
