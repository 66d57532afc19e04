"""Verdicts on logs: the collected ones with their labels, whole ones of real servers, and the shapes logs come in."""

# ruff: noqa: E501 - the lines of a log stay whole

from __future__ import annotations

import csv
import io
import json

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import Verdict, diagnose, diagnose_unit
from ansible_collections.firstlight.vllm.plugins.module_utils.log_lines import read_lines
from support_failure_logs import (
    CONFIGURED,
    DIED,
    FAILED_START,
    FAILURES,
    LOADING,
    LOGS,
    REFUSED,
    SERVING,
    journal,
    worker_error,
)

NOT_TELLING = "undecidable"


def _labels() -> list[tuple[str, str]]:
    with (FAILURES / "expected.tsv").open(encoding="utf-8") as table:
        return [(row["file"], row["kind"]) for row in csv.DictReader(table, delimiter="\t")]


def _file(*parts: str) -> Verdict:
    with FAILURES.parent.joinpath(*parts).open("rb") as stream:
        return diagnose(read_lines(stream))


@pytest.mark.parametrize(("file", "kind"), _labels())
def test_a_collected_log_gets_its_label(file: str, kind: str) -> None:
    assert _file("failures", file).id == ("unknown" if kind == NOT_TELLING else kind)


def test_every_collected_log_has_a_label() -> None:
    assert {path.name for path in FAILURES.glob("*.log")} == {file for file, _ in _labels()}


def _alternatives() -> dict[str, list[str]]:
    with (FAILURES / "kinds.tsv").open(encoding="utf-8") as table:
        rows = csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {row["id"]: row["decisive_text"].split(" || ") for row in rows}


@pytest.mark.parametrize(("file", "kind"), [pair for pair in _labels() if pair[1] not in ("none", NOT_TELLING)])
def test_the_deciding_line_is_named_with_its_number(file: str, kind: str) -> None:
    verdict = _file("failures", file)
    lines = (FAILURES / file).read_text(encoding="utf-8").split("\n")
    assert verdict.line is not None
    assert verdict.text == lines[verdict.line - 1]
    later = lines[verdict.line - 1 : verdict.line + 2]  # some are told by a frame, just above the words
    assert any(words.lower() in line.lower() for words in _alternatives()[kind] for line in later)


WHOLE = {
    "cpu/ok-qwen3-eager.log": ("none", None),
    "cpu/ok-qwen3-tp2.log": ("none", None),
    "gpu-0.20.1-27b-defaults-refused.log": ("spec-batched-tokens-too-small", 64),
    "gpu-0.20.1-27b-dummy-dies-under-load.log": ("cudagraph-replay-fault", 339),
    "gpu-0.20.1-27b-dummy-no-speculation-ok.log": ("none", None),
    "gpu-0.20.1-dflash-tp2-ok.log": ("none", None),
    # the drafter did nothing in these two, but their logs hold no line of acceptance: the counters must tell
    "gpu-0.20.1-dflash-tp2-shifted-taps.log": ("none", None),
    "gpu-0.20.1-dflash-tp2-stale-compile-cache.log": ("none", None),
    "gpu-0.20.1-no-speculation-ok.log": ("none", None),
    "gpu-0.20.1-spec-batched-tokens-too-small.log": ("spec-batched-tokens-too-small", 64),
}


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_a_whole_log_of_a_real_server_gets_its_verdict(name: str) -> None:
    verdict = _file("logs", name)
    assert (verdict.id, verdict.line) == WHOLE[name]


def test_shifted_taps_are_seen_when_the_right_ones_are_known() -> None:
    with (LOGS / "gpu-0.20.1-dflash-tp2-shifted-taps.log").open("rb") as stream:
        verdict = diagnose(read_lines(stream), {"auxiliary_layers": [2, 6]})
    assert verdict.id == "drafter-low-acceptance"
    assert "(1, 5)" in verdict.text
    assert "[1, 5]" in verdict.remedy
    assert "[2, 6]" in verdict.remedy
    with (LOGS / "gpu-0.20.1-dflash-tp2-ok.log").open("rb") as stream:
        assert diagnose(read_lines(stream), {"auxiliary_layers": [2, 6]}).id == "none"


FAILING = [*LOADING, *worker_error("RuntimeError: Cannot find any model weights with `/m/target`"), *FAILED_START]


def test_line_ends_colours_and_envelopes_do_not_matter() -> None:
    plain = diagnose(FAILING)
    assert plain.id == "weights-missing"
    shapes = {
        "crlf": [f"{line}\r\n" for line in FAILING],
        "colours": [f"\x1b[0;36m{line[:20]}\x1b[0m{line[20:]}" for line in FAILING],
        "docker json": [json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "x"}) for line in FAILING],
        "journal json": [json.dumps({"MESSAGE": line, "_PID": "1"}) for line in FAILING],
        "journal bytes": [json.dumps({"MESSAGE": list(line.encode())}) for line in FAILING],
        "compose": [f"vllm-1  | {line}" for line in FAILING],
        "kubernetes": [f"2026-05-12T09:12:59.1Z stderr F {line}" for line in FAILING],
        "iso journal": [f"2026-05-12T09:12:59+00:00 gpu-7 vllm[11]: {line}" for line in FAILING],
        "syslog": journal(FAILING),
        "quoted": [f"> {line}" for line in FAILING],
    }
    for shape, lines in shapes.items():
        verdict = diagnose(lines)
        assert (verdict.id, verdict.line, verdict.remedy) == (plain.id, plain.line, plain.remedy), shape


def test_bytes_that_are_no_text_are_read_over() -> None:
    raw = b"\xff\xfe\x00junk\n" + "\n".join(FAILING).encode() + b"\n\x80"
    verdict = diagnose(read_lines(io.BytesIO(raw)))
    assert (verdict.id, verdict.line) == ("weights-missing", diagnose(FAILING).line + 1)  # type: ignore[operator]


def test_lines_are_counted_as_an_editor_counts_them() -> None:
    bars = "".join(
        f"\rCapturing CUDA graphs (decode, FULL):  {n}%|█| {n}/100 [00:01<00:01,  2.0it/s]" for n in range(100)
    )
    verdict = diagnose(read_lines(io.BytesIO("\n".join([bars, "\x0b\x0c\x85\u2028", *FAILING]).encode())))
    assert verdict.line == diagnose(FAILING).line + 2  # type: ignore[operator]


def test_the_deciding_words_far_out_in_a_long_line_are_found() -> None:
    line = (
        "(APIServer pid=11) Value error, "
        + "x" * 50_000
        + " max_num_scheduled_tokens is set to -96 based on it "
        + "y" * 9
    )
    verdict = diagnose([*CONFIGURED, line, *REFUSED])
    assert verdict.id == "spec-batched-tokens-too-small"
    assert "is set to -96" in verdict.text
    assert len(verdict.text) < 10_000


def test_several_workers_that_write_at_once_do_not_hide_the_cause() -> None:
    one = worker_error(
        "Traceback (most recent call last):", "    x = 1", "RuntimeError: Cannot find any model weights with `/m`"
    )
    other = [line.replace("Worker_TP1 pid=34", "Worker_TP0 pid=33") for line in one]
    mixed = [line for pair in zip(one, other, strict=True) for line in pair]
    assert diagnose([*LOADING, *mixed, *FAILED_START]).id == "weights-missing"


def test_the_first_error_is_the_cause_and_the_last_its_echo() -> None:
    other_rank = worker_error(
        "torch.distributed.DistStoreError: Connection closed by peer [127.0.0.1]:4", "RuntimeError: cancelled"
    )
    echo = worker_error("RuntimeError: unhandled system error (run with NCCL_DEBUG=INFO for details)")
    assert diagnose([*FAILING[: -len(FAILED_START)], *other_rank, *echo, *FAILED_START]).id == "weights-missing"


def test_only_the_wrapper_is_called_that() -> None:
    verdict = diagnose([*LOADING, *FAILED_START], {"unit": "llm"})
    assert verdict.id == "engine-wrapper-only"
    assert "journalctl -u llm" in verdict.remedy


def test_an_error_that_no_kind_knows_is_unknown_and_shown() -> None:
    line = worker_error("RuntimeError: DeepGEMM backend is not available or outdated.")[0]
    verdict = diagnose([*LOADING, line, *FAILED_START])
    assert (verdict.id, verdict.text) == ("unknown", line)
    frames = worker_error("Traceback (most recent call last):", '  File "/opt/v/x.py", line 3, in f')
    assert diagnose([*LOADING, *frames]).id == "unknown"


def test_a_log_that_just_stops_is_unknown() -> None:
    assert diagnose([]).id == "unknown"
    assert diagnose(["", "  "]).id == "unknown"
    assert diagnose(LOADING).id == "unknown"
    assert diagnose(["some other program says hello"]).id == "unknown"


def test_a_server_that_serves_is_well() -> None:
    assert diagnose(SERVING) == Verdict("none", None, "", "The log shows no failure of the server.", "")
    assert not diagnose(SERVING).failed
    tail = SERVING[-1:]  # the journal was rotated: the start is not in it any more
    assert diagnose(tail).id == "none"


SCARY = [
    "(APIServer pid=11) ERROR 05-12 09:20:00 [serving_chat.py:200] Error in preprocessing prompt inputs",
    "(APIServer pid=11) ERROR 05-12 09:20:00 [serving_chat.py:200] Traceback (most recent call last):",
    '(APIServer pid=11) ERROR 05-12 09:20:00 [serving_chat.py:200]   File "/opt/v/serving_chat.py", line 9, in f',
    "(APIServer pid=11) ERROR 05-12 09:20:00 [serving_chat.py:200] ValueError: This model's maximum context length is "
    "32768 tokens. However, you requested 40000 tokens.",
    '(APIServer pid=11) INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request',
    "(APIServer pid=11) json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "(APIServer pid=11) WARNING 05-12 09:20:01 [x.py:1] Failed to import from vllm._C with ImportError('libcuda.so.1: cannot "
    "open shared object file')",
]


def test_requests_that_fail_do_not_make_a_server_ill() -> None:
    assert diagnose([*SERVING, *SCARY]).id == "none"
    assert diagnose([*SERVING, *SCARY, SERVING[-1]]).id == "none"


def test_a_death_long_after_a_clients_error_is_not_blamed_on_it() -> None:
    quiet = ['(APIServer pid=11) INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK'] * 400
    death = "(APIServer pid=11) ERROR 05-12 10:30:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, "
    assert diagnose([*SERVING, *SCARY, *quiet, f"{death}shutting down client.", *DIED]).id == "engine-died-silently"


def test_errors_of_an_ordered_stop_mean_nothing() -> None:
    stop = [
        "systemd[1]: Stopping vllm.service - vLLM...",
        "(EngineCore pid=22) INFO 05-12 10:00:00 [core.py:1238] Shutdown initiated (timeout=0)",
        "(Worker_TP1 pid=34) Traceback (most recent call last):",
        "(Worker_TP1 pid=34) RuntimeError: Found no NVIDIA driver on your system.",
        "(APIServer pid=11) ERROR 05-12 10:00:01 [x.py:1] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
        "systemd[1]: vllm.service: Main process exited, code=killed, status=9/KILL",
        "systemd[1]: vllm.service: Failed with result 'timeout'.",
    ]
    assert diagnose([*SERVING, *stop]).id == "none"


def test_a_server_that_only_refuses_is_not_called_well() -> None:
    refused = (
        '(APIServer pid=11) INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 500 Internal Server Error'
    )
    assert diagnose([*SERVING, refused]).id == "unknown"
    assert diagnose([*SERVING, refused, SERVING[-1]]).id == "none"


STARTED = "systemd[1]: Started vllm.service - vLLM."


def test_of_several_starts_the_last_decides() -> None:
    failed, well = [STARTED, *FAILING], [STARTED, *SERVING]
    assert diagnose([*failed, *well]).id == "none"
    assert diagnose([*well, *failed]).id == "weights-missing"
    assert diagnose([*FAILING, *SERVING]).id == "none"  # no systemd: the banner begins a start
    port = [STARTED, *CONFIGURED, "OSError: [Errno 98] Address already in use", *REFUSED]
    assert diagnose([*failed, *port]).id == "port-in-use"


def test_a_start_that_says_nothing_leaves_the_word_to_the_one_before() -> None:
    crash_loop = [STARTED, *FAILING, STARTED, *FAILING, STARTED, *LOADING]
    assert diagnose(crash_loop).id == "weights-missing"
    limit = [
        "systemd[1]: vllm.service: Start request repeated too quickly.",
        "systemd[1]: Failed to start vllm.service.",
    ]
    assert diagnose([STARTED, *FAILING, *limit]).id == "weights-missing"
    assert diagnose([STARTED, *FAILED_START[-2:], STARTED, *FAILED_START[-2:], *limit]).id == "systemd-start-limit"


def test_an_older_server_that_was_well_is_not_the_verdict_on_the_new_one() -> None:
    assert diagnose([STARTED, *SERVING, STARTED, *LOADING, *FAILED_START]).id == "engine-wrapper-only"


def test_the_cpu_builds_last_words_are_not_taken_for_a_missing_driver() -> None:
    cpu = [line.replace("gpu_model_runner", "cpu_model_runner") for line in LOADING]
    noise = (
        "(Worker pid=33) RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
    )
    assert diagnose([*cpu, *FAILED_START[:2], noise, *FAILED_START[2:]]).id == "engine-wrapper-only"
    assert diagnose([*CONFIGURED, noise, *REFUSED]).id == "nvidia-driver-not-visible"


def _metrics(length: float, accepted: int, drafted: int, rates: list[float]) -> str:
    shown = ", ".join(f"{rate:.3f}" for rate in rates)
    return (
        f"(APIServer pid=11) INFO 05-12 09:20:00 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: {length:.2f}, "
        f"Accepted throughput: 1.00 tokens/s, Drafted throughput: 9.00 tokens/s, Accepted: {accepted} tokens, Drafted: "
        f"{drafted} tokens, Per-position acceptance rate: {shown}, Avg Draft acceptance rate: 1.0%"
    )


def test_a_drafter_that_does_nothing_is_seen_and_a_middling_one_is_not() -> None:
    inert = _metrics(1.0, 0, 3120, [0.0] * 15)
    assert diagnose([*SERVING, inert]).id == "drafter-low-acceptance"
    first_only = _metrics(1.17, 45, 3960, [0.17] + [0.0] * 14)
    assert diagnose([*SERVING, first_only, first_only]).id == "drafter-low-acceptance"
    guess = _metrics(1.7, 700, 15000, [0.7] + [0.0] * 14)
    assert diagnose([*SERVING, guess]).id == "drafter-low-acceptance"
    half = _metrics(5.86, 107, 330, [1.0, 1.0, 1.0, 1.0, 0.864] + [0.0] * 10)
    assert diagnose([*SERVING, half]).id == "none"
    prose = _metrics(1.7, 700, 15000, [0.45, 0.18, 0.05, 0.02] + [0.0] * 11)
    assert diagnose([*SERVING, prose]).id == "none"
    mtp = _metrics(1.4, 400, 1000, [0.4])  # one drafted token: the length cannot tell
    assert diagnose([*SERVING, mtp]).id == "none"
    few = _metrics(1.0, 0, 45, [0.0] * 15)
    assert diagnose([*SERVING, few]).id == "none"
    assert diagnose([*SERVING, few, half]).id == "none"


def test_a_dead_server_is_dead_even_if_its_drafter_did_nothing() -> None:
    fault = worker_error("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert diagnose([*SERVING, _metrics(1.0, 0, 3120, [0.0] * 15), *fault, *DIED]).id == "cudagraph-replay-fault"


def test_a_server_without_tokenizer_refuses_every_prompt() -> None:
    empty = "(APIServer pid=11) ERROR 05-12 09:20:00 [x.py:1] ValueError: The decoder prompt cannot be empty"
    refused = '(APIServer pid=11) INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 400 Bad Request'
    answered = '(APIServer pid=11) INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    assert diagnose([*SERVING, empty, refused]).id == "tokenizer-files-missing"
    assert diagnose([*SERVING, answered, empty, refused]).id == "none"


# --- with what systemd tells


def _unit(result: str, code: str = "", status: int = 0, lines: list[str] | None = None, **more: str) -> Verdict:
    return diagnose_unit(result, code, status, lines or [], {"unit": "llm.service"}, **more)


def test_the_log_decides_where_it_names_a_cause() -> None:
    assert _unit("oom-kill", "killed", 9, FAILING).id == "weights-missing"


def test_systemd_decides_where_the_log_does_not() -> None:
    assert _unit("oom-kill", "killed", 9, LOADING).id == "killed-by-oom"
    assert _unit("oom-kill", "killed", 9, [*LOADING, *FAILED_START]).id == "killed-by-oom"
    assert _unit("exit-code", "exited", 2, ["usage: vllm serve [model_tag] [options]"]).id == "flag-rejected"
    assert _unit("signal", "killed", 9, LOADING).id == "engine-died-silently"
    assert _unit("core-dump", "dumped", 11, LOADING).id == "engine-died-silently"
    assert _unit("start-limit-hit", "exited", 1).id == "systemd-start-limit"


def test_a_unit_that_never_ran_says_why() -> None:
    masked = _unit("success", load_state="masked")
    assert (masked.id, "masked" in masked.cause, masked.remedy) == (
        "unknown",
        True,
        "Run systemctl unmask llm.service.",
    )
    venv = _unit("exit-code", "exited", 203)
    assert (venv.id, "203" in venv.cause) == ("unknown", True)
    odd = _unit("exit-code", "exited", 77)
    assert (odd.id, "exited 77" in odd.cause, "llm.service" in odd.remedy) == ("unknown", True, True)


def test_a_unit_without_fault_keeps_the_verdict_of_its_log() -> None:
    assert _unit("success", "exited", 0, SERVING).id == "none"
    assert _unit("success", "exited", 0, [*SERVING, *DIED]).id == "engine-wrapper-only"
    stranger = worker_error("RuntimeError: something new")
    verdict = _unit("exit-code", "exited", 1, [*LOADING, *stranger, *FAILED_START])
    assert (verdict.id, verdict.text) == ("unknown", stranger[0])


# --- remedies in the deployment's numbers


@pytest.mark.parametrize(
    ("line", "deployment", "words"),
    [
        (
            "Value error, max_num_scheduled_tokens is set to -24 based on the speculative decoding settings",
            {"max_num_seqs": 64, "num_speculative_tokens": 7},
            "at least 512 = 64 sequences x (7 drafted tokens + 1)",
        ),
        (
            "Value error, max_num_scheduled_tokens is set to -9000 based on the speculative decoding settings",
            {"max_num_seqs": "4096", "num_speculative_tokens": 15},
            "vllm_server_max_num_batched_tokens: 65536",
        ),
        (
            "Value error, max_num_batched_tokens (16) must be greater than or equal to max_num_seqs (32).",
            {"num_speculative_tokens": 15, "max_num_seqs": 32},
            "vllm_server_max_num_batched_tokens: 512",
        ),
        ("ValueError: x is larger than the available KV cache memory (3 GiB). the estimated maximum model length is 34736.",
         {"gpu_memory_utilization": 0.8}, "vllm_server_max_model_len: 34736, or lower, or raise"),
        ("ValueError: No available memory for the cache blocks.", {"gpu_memory_utilization": 0.9}, "0.95 (now 0.9)"),
        ("ValueError: No available memory for the cache blocks.",
         {"gpu_memory_utilization": 0.96, "max_num_batched_tokens": 32768}, "try 16384"),
        ("ValueError: Free memory on device (59.32/79.15 GiB) on startup is less than desired GPU memory utilization (0.9)",
         {}, "vllm_server_gpu_memory_utilization: 0.73"),
        ("RuntimeError: max_num_seqs (1024) exceeds available Mamba cache blocks (600).", {}, "vllm_server_max_num_seqs: 600"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.", {"tensor_parallel_size": 2},
         "vllm_server_tensor_parallel_size: 4 (now 2)"),
        ("Value error, Total number of attention heads (24) must be divisible by tensor parallel size (7).", {},
         "vllm_server_tensor_parallel_size: 6"),
        ("Value error, World size (4) is larger than the number of available GPUs (2) in this node.", {},
         "vllm_server_tensor_parallel_size: 2"),
        ("OSError: [Errno 98] Address already in use", {"port": 30000}, "sport = :30000"),
        ("ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8123): address already in use",
         {"port": 1}, "8123"),
        ("vllm: error: unrecognized arguments: --max-model-length 1024", {}, "max-model-length in vllm_server_extra_args"),
        ("RuntimeError: Cannot find any model weights with `/m/drafter`", {}, "into /m/drafter"),
        ("PermissionError: [Errno 13] Permission denied: '/var/lib/vllm/.triton'", {}, "Make /var/lib/vllm/.triton writable"),
        ("TimeoutError: Timed out waiting for engine core processes to start. Waited 600s (configured by x)", {}, '"1800"'),
    ],
)  # fmt: skip
def test_a_remedy_names_the_value_to_set(line: str, deployment: dict[str, object], words: str) -> None:
    start = [row for row in LOADING if "non-default args" not in row]
    assert words in diagnose([*start, line, *FAILED_START], deployment).remedy


def test_the_servers_own_arguments_count_more_than_the_variables() -> None:
    line = "(APIServer pid=11) Value error, max_num_scheduled_tokens is set to -24 based on the speculative decoding settings"
    verdict = diagnose([*CONFIGURED, line, *REFUSED], {"max_num_seqs": 999})
    assert "at least 256 = 16 sequences" in verdict.remedy


def test_sequences_by_default_are_computed_from_the_budget() -> None:
    verdict = _file("logs", "gpu-0.20.1-27b-defaults-refused.log")
    assert "at least 16384 = 1024 sequences x (15 drafted tokens + 1)" in verdict.remedy


def test_a_variable_is_named_by_the_line_that_reads_it() -> None:
    assert "VLLM_CPU_KVCACHE_SPACE" in _file("failures", "env-var-malformed--1.log").remedy


def test_hostile_arguments_in_a_log_are_data() -> None:
    arguments = (
        "(APIServer pid=11) INFO 05-12 09:10:02 [utils.py:233] non-default args: {'port': __import__('os').getpid()}"
    )
    line = "OSError: [Errno 98] Address already in use"
    assert "vllm_server_port" in diagnose([arguments, line, *REFUSED]).remedy
    deep = "(APIServer pid=11) INFO 05-12 09:10:02 [utils.py:233] non-default args: {'port': " + "[" * 9000 + "}"
    assert diagnose([deep, line, *REFUSED]).id == "port-in-use"


def test_a_verdict_is_a_plain_mapping_for_reports() -> None:
    assert set(diagnose(FAILING).as_dict()) == {"id", "line", "text", "cause", "remedy"}
    json.dumps(diagnose(FAILING).as_dict())


def test_a_kernel_built_at_the_first_request_can_end_a_server() -> None:
    line = "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'"
    assert diagnose([*SERVING, *worker_error(line), *DIED]).id == "ninja-not-on-path"
    assert diagnose([*SERVING, line]).id == "none"  # words alone, and the server lives


def test_an_error_that_the_server_outlived_is_not_the_cause_of_its_death() -> None:
    old = worker_error("PermissionError: [Errno 13] Permission denied: '/var/cache/vllm/x'")
    quiet = ['(APIServer pid=11) INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK'] * 400
    assert diagnose([*SERVING, *old, *quiet, *DIED]).id == "engine-wrapper-only"
    assert diagnose([*SERVING, *quiet, *old, *DIED]).id == "cache-dir-not-writable"


def test_what_the_kernel_did_counts_even_after_the_server_shut_down() -> None:
    stop = ["(APIServer pid=11) INFO:     Shutting down", "(APIServer pid=11) INFO:     Finished server process [11]"]
    assert diagnose([*SERVING, *stop, "systemd[1]: vllm.service: Failed with result 'oom-kill'."]).id == "killed-by-oom"


def test_a_server_that_loaded_and_opened_its_port_is_not_ill() -> None:
    opened = [line for line in SERVING if "startup complete" not in line and "200 OK" not in line]
    assert diagnose(opened).id == "none"


def test_thousands_of_clients_errors_do_not_hide_the_death_after_them() -> None:
    client = ["(APIServer pid=11) json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"] * 6000
    fault = worker_error("torch.AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert diagnose([*SERVING, *client, *fault, *DIED]).id == "cudagraph-replay-fault"
    assert diagnose([*SERVING, *client]).id == "none"
