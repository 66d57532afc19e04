"""What must hold on a host before anything is changed there. Pure functions over facts; none of them reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .cache_groups import text_config
from .errors import FirstlightError
from .gpus import Gpu
from .host_facts import HostFacts
from .memory_fit import fit

# vLLM 0.20.1's wheel: manylinux_2_35, CUDA 13.0, Python 3.10 to 3.14
MIN_GLIBC = (2, 35)
MIN_DRIVER = 580
PYTHONS = ((3, 10), (3, 14))
MIN_COMPUTE_CAPABILITY = 8.0  # FLASH_ATTN, the one backend with non-causal attention for a DFlash drafter
# by how much of the card's share the prediction may be off: what is lacking within that is only warned of
_MEMORY_ERROR = 0.05
MACHINES = ("x86_64", "aarch64")


@dataclass(frozen=True)
class Problem:
    """One rule that does not hold: ``severity`` is ``error`` or ``warning``."""

    id: str
    severity: str
    where: str
    message: str
    fix: str

    def as_dict(self) -> dict[str, str]:
        """For module results."""
        return asdict(self)

    @property
    def text(self) -> str:
        """The line that a user reads."""
        return f"{self.where}: {self.message} Fix: {self.fix}"

    def as_error(self, more: str = "") -> FirstlightError:
        """The error that ends a run with it; ``more`` is said after the remedy."""
        return FirstlightError(self.message, where=self.where, fix=self.fix + more, kind=self.id)


@dataclass(frozen=True)
class Wanted:
    """What the deployment asks of the host.

    Attributes:
        platform: ``cuda`` or ``cpu``.
        tensor_parallel: GPUs (or CPU processes) that share the model.
        gpu_memory_utilization: share of each card.
        max_model_len: longest request in tokens.
        k: ``num_speculative_tokens``; 0 without speculation.
        min_disk_gib: folder to the free space in GiB that it needs.
    """

    platform: str
    tensor_parallel: int
    gpu_memory_utilization: float
    max_model_len: int
    k: int
    min_disk_gib: Mapping[str, float]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version) or "none"


def host_rules(host: HostFacts, wanted: Wanted) -> Iterator[Problem]:
    """Rules about the host alone."""
    if not host.systemd:
        yield Problem(
            "no-systemd", "error", "host", "systemd is not PID 1, and the server runs as a systemd unit.",
            "use a host (or a container) that boots systemd.",
        )  # fmt: skip
    if host.machine not in MACHINES:
        yield Problem(
            "machine-unsupported", "error", "host", f"no vLLM wheel is made for {host.machine}.",
            f"use one of {', '.join(MACHINES)}.",
        )  # fmt: skip
    if host.glibc < MIN_GLIBC:
        yield Problem(
            "glibc-too-old", "error", "host",
            f"glibc is {_dotted(host.glibc)} on {host.os_id} {host.os_version}; vLLM's wheel needs"
            f" {_dotted(MIN_GLIBC)}.",
            "use Debian 12, Ubuntu 22.04 or newer.",
        )  # fmt: skip
    if not PYTHONS[0] <= host.python[:2] <= PYTHONS[1]:
        yield Problem(
            "python-unsupported", "error", "vllm_install_python",
            f"the interpreter is {_dotted(host.python)}; vLLM needs {_dotted(PYTHONS[0])} to {_dotted(PYTHONS[1])}.",
            "install python3 and python3-venv, or name another interpreter of the host.",
        )  # fmt: skip
    for folder, need in wanted.min_disk_gib.items():
        free = host.disk_free_gib.get(folder, 0.0)
        if free < need:
            yield Problem(
                "disk-too-small", "error", folder, f"{free:.1f} GiB are free and {need:.1f} are needed.",
                f"free {need - free:.1f} GiB there, or put the folder on another disk.",
            )  # fmt: skip
    if wanted.platform == "cuda":
        yield from _gpu_rules(host, wanted)


def _gpu_rules(host: HostFacts, wanted: Wanted) -> Iterator[Problem]:
    if not host.gpus:
        yield Problem(
            "no-gpu", "error", "host", "nvidia-smi is not there or shows no GPU.",
            "install the NVIDIA driver (580 or newer), or set vllm_install_platform to cpu for a CPU build.",
        )  # fmt: skip
        return
    if len(host.gpus) < wanted.tensor_parallel:
        yield Problem(
            "too-few-gpus", "error", "vllm_server_tensor_parallel_size",
            f"{wanted.tensor_parallel} GPUs are asked for and {len(host.gpus)} are there.",
            f"set vllm_server_tensor_parallel_size to {len(host.gpus)}.",
        )  # fmt: skip
    driver = host.gpus[0].driver_version
    if int(driver.split(".")[0] or 0) < MIN_DRIVER:
        yield Problem(
            "driver-too-old", "error", "host", f"the NVIDIA driver is {driver}; CUDA 13.0 needs {MIN_DRIVER}.",
            f"upgrade the driver to {MIN_DRIVER} or newer and reboot.",
        )  # fmt: skip
    names = sorted({gpu.name for gpu in host.gpus[: wanted.tensor_parallel]})
    if len(names) > 1:
        yield Problem(
            "mixed-gpus", "warning", "host", f"the GPUs differ ({', '.join(names)}); the smallest sets the pace.",
            "serve on GPUs of one kind.",
        )  # fmt: skip
    for gpu in host.gpus[: wanted.tensor_parallel]:
        if wanted.k and float(gpu.compute_capability or MIN_COMPUTE_CAPABILITY) < MIN_COMPUTE_CAPABILITY:
            yield Problem(
                "gpu-too-old", "error", f"GPU {gpu.index}",
                f"{gpu.name} has compute capability {gpu.compute_capability}; a DFlash drafter needs FLASH_ATTN,"
                f" which needs {MIN_COMPUTE_CAPABILITY}.",
                "use an Ampere GPU or newer, or set drafter_enabled to false.",
            )  # fmt: skip


def model_rules(target: Mapping[str, Any], drafter: Mapping[str, Any] | None, wanted: Wanted) -> Iterator[Problem]:
    """Rules about target and drafter against the deployment; both are parsed ``config.json``."""
    config = text_config(target)
    tensor_parallel = wanted.tensor_parallel
    counted = [(owner, values.get("num_attention_heads"), values.get("num_key_value_heads"))
               for owner, values in (("target", config), ("drafter", drafter or {}))]  # fmt: skip

    def divides(ways: int, heads: object, kv_heads: object) -> bool:
        whole = not isinstance(heads, int) or heads % ways == 0
        # fewer heads of keys and values than GPUs are copied, so then the GPUs must be a multiple
        return whole and (
            not isinstance(kv_heads, int) or not kv_heads or max(kv_heads, ways) % min(kv_heads, ways) == 0
        )

    for owner, heads, kv_heads in counted:
        if not divides(tensor_parallel, heads, kv_heads):
            legal = [n for n in range(1, tensor_parallel + 1) if all(divides(n, h, kv) for _, h, kv in counted)]
            yield Problem(
                "tp-not-dividing-heads", "error", "vllm_server_tensor_parallel_size",
                f"the {owner} has {heads} attention heads and {kv_heads} of keys and values, which {tensor_parallel}"
                " GPUs cannot share.",
                f"set {legal[-1]}.",
            )  # fmt: skip
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and wanted.max_model_len > longest:
        yield Problem(
            "max-model-len-over-model", "error", "vllm_server_max_model_len",
            f"{wanted.max_model_len} exceeds the {longest} positions of the target.",
            f"set vllm_server_max_model_len to {longest} or less.",
        )  # fmt: skip
    drafted = (drafter or {}).get("max_position_embeddings")
    if isinstance(drafted, int) and wanted.max_model_len > drafted:
        yield Problem(
            "drafter-positions-too-few", "warning", "vllm_server_max_model_len",
            f"the drafter has {drafted} positions; requests beyond them are served without any drafting.",
            f"set vllm_server_max_model_len to {drafted} or use a drafter with more positions.",
        )  # fmt: skip


def memory_rules(
    gpus: Sequence[Gpu],
    wanted: Wanted,
    *,
    target: Mapping[str, Any],
    drafter: Mapping[str, Any] | None,
    weights_gib: float,
    graphs: tuple[int, int],
    batched_tokens: int,
) -> tuple[dict[str, float] | None, list[Problem]]:
    """The memory-fit verdict: the prediction (GiB of one GPU), and what is wrong with it."""
    if wanted.platform != "cuda" or not gpus:
        return None, []
    smallest = min(gpu.memory_total_mib for gpu in gpus[: wanted.tensor_parallel]) / 1024
    try:
        verdict = fit(
            target,
            gpu_total_gib=smallest,
            utilization=wanted.gpu_memory_utilization,
            weights_gib=weights_gib,
            tensor_parallel=wanted.tensor_parallel,
            max_model_len=wanted.max_model_len,
            k=wanted.k,
            drafter=drafter,
            graphs=graphs,
            batched_tokens=batched_tokens,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        problem = Problem(
            "memory-unknown", "warning", "target",
            f"its config.json does not say how large its cache is ({type(error).__name__}: {error}).",
            "see the start's own figures; nothing is known beforehand about this model.",
        )  # fmt: skip
        return None, [problem]
    figures = {name: round(value, 2) for name, value in asdict(verdict).items()}
    if verdict.fits:
        return figures, []
    close = verdict.cache + _MEMORY_ERROR * verdict.budget >= verdict.request_full
    problem = Problem(
        "memory-does-not-fit", "warning" if close else "error", "vllm_server_gpu_memory_utilization",
        f"of {smallest:.1f} GiB a GPU, {verdict.budget:.1f} may be used; weights take {verdict.weights:.1f} and"
        f" the rest of the engine {verdict.overhead:.1f}, which leaves {verdict.cache:.1f} for the cache, and one"
        f" request of {wanted.max_model_len} tokens needs {verdict.request_full:.1f}.",
        "use more or larger GPUs, a smaller or quantised target, fewer num_speculative_tokens, or a smaller"
        " vllm_server_max_model_len or vllm_server_max_num_seqs.",
    )  # fmt: skip
    return figures, [problem]
