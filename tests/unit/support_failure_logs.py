"""Surroundings of a log's deciding lines: what a real server writes before and after them."""

# ruff: noqa: E501 - the lines of a log stay whole

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"
FAILURES = DATA / "failures"
LOGS = DATA / "logs"

CONFIGURED = [
    "(APIServer pid=11) INFO 05-12 09:10:01 [utils.py:299]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.20.1",
    "(APIServer pid=11) INFO 05-12 09:10:02 [utils.py:233] non-default args: {'model_tag': '/m/target', "
    "'port': 30000, 'model': '/m/target', 'max_model_len': 32768, 'max_num_batched_tokens': 32768, "
    "'max_num_seqs': 16, 'speculative_config': {'method': 'dflash', 'num_speculative_tokens': 15}}",
    "(APIServer pid=11) WARNING 05-12 09:10:02 [system_utils.py:294] Found ulimit of 20000 and failed to "
    "automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors like "
    "`OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n",
    "(APIServer pid=11) INFO 05-12 09:10:05 [model.py:555] Resolved architecture: Qwen3_5ForConditionalGeneration",
]
LOADING = [
    *CONFIGURED,
    "(EngineCore pid=22) INFO 05-12 09:10:20 [core.py:109] Initializing a V1 LLM engine (v0.20.1) with config: "
    "model='/m/target', speculative_config=None",
    "(Worker_TP0 pid=33) INFO 05-12 09:10:40 [gpu_model_runner.py:4777] Starting to load model /m/target...",
]
COMPILED = [
    *LOADING,
    "(Worker_TP0 pid=33) INFO 05-12 09:11:20 [gpu_model_runner.py:4879] Model loading took 27.1 GiB memory and 41 seconds",
    "(Worker_TP0 pid=33) INFO 05-12 09:12:20 [monitor.py:53] torch.compile took 49.70 s in total",
]
CACHED = [
    *COMPILED,
    "(EngineCore pid=22) INFO 05-12 09:12:30 [kv_cache_utils.py:1708] GPU KV cache size: 637,732 tokens",
]
SERVING = [
    *CACHED,
    "(APIServer pid=11) INFO 05-12 09:12:50 [api_server.py:602] Starting vLLM server on http://127.0.0.1:30000",
    "(APIServer pid=11) INFO:     Application startup complete.",
    '(APIServer pid=11) INFO:     127.0.0.1:45674 - "GET /health HTTP/1.1" 200 OK',
]

REFUSED = [
    "(APIServer pid=11)     For further information visit https://errors.pydantic.dev/2.13/v/value_error",
    "systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE",
]
FAILED_START = [
    "(EngineCore pid=22) ERROR 05-12 09:13:00 [core.py:1136] EngineCore failed to start.",
    "(EngineCore pid=22) ERROR 05-12 09:13:00 [core.py:1136] Exception: WorkerProc initialization failed due to an "
    "exception in a background process. See stack trace for root cause.",
    "(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    "systemd[1]: vllm.service: Main process exited, code=exited, status=1/FAILURE",
    "systemd[1]: vllm.service: Failed with result 'exit-code'.",
]
DIED = [
    "(EngineCore pid=22) ERROR 05-12 09:30:00 [core.py:1138] EngineCore encountered a fatal error.",
    "(APIServer pid=11) ERROR 05-12 09:30:00 [async_llm.py:704] vllm.v1.engine.exceptions.EngineDeadError: EngineCore "
    "encountered an issue. See stack trace (above) for the root cause.",
    '(APIServer pid=11) INFO:     127.0.0.1:45698 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error',
    "(APIServer pid=11) INFO:     Shutting down",
    "(APIServer pid=11) INFO:     Finished server process [11]",
    "systemd[1]: vllm.service: Deactivated successfully.",
]


def worker_error(*lines: str) -> list[str]:
    """Lines as a worker logs them in a traceback."""
    return [f"(Worker_TP1 pid=34) ERROR 05-12 09:12:59 [multiproc_executor.py:870] {line}" for line in lines]


def journal(lines: Sequence[str]) -> list[str]:
    """The same as ``journalctl -u`` prints them."""
    return [f"May 12 09:12:59 gpu-7 {'' if line.startswith('systemd[') else 'vllm[11]: '}{line}" for line in lines]
