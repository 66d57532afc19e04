"""Kinds of failure of the engine itself, at start and while serving."""

from __future__ import annotations

from .failure_kinds import Effect, Kind, Matcher, Stage

WRAPPER = "engine-wrapper-only"
DIED_SILENTLY = "engine-died-silently"
START_LIMIT = "systemd-start-limit"
LOW_ACCEPTANCE = "drafter-low-acceptance"

ENGINE = (
    Kind(
        WRAPPER,
        "engine",
        "The log holds only the general message that the engine failed; the cause is not in it.",
        "Read the whole start from the unit's journal (the Worker and EngineCore lines before the first ERROR); if "
        "there are none, look in journalctl -k for a killed process.",
        (
            Matcher("engine core initialization failed"),
            Matcher("workerproc initialization failed due to an exception"),
            Matcher("enginecore encountered an issue"),
            Matcher("enginecore encountered a fatal error"),
            Matcher("engine loop has died"),
            Matcher("enginedeaderror"),
            Matcher("engine process failed to start"),
            Matcher("background loop has errored already"),
            Matcher("enginecore failed to start", hint=True),
        ),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
    Kind(
        DIED_SILENTLY,
        "engine",
        "An engine or worker process vanished without a Python traceback: killed from outside, or crashed in native "
        "code.",
        "Look in journalctl -k and coredumpctl at that second for what ended the process, and remove it.",
        (
            Matcher(
                "died unexpectedly", r"(?:proc|worker|engine|process)\b.{0,80} died unexpectedly|unexpectedly, shutting"
            ),
            Matcher("worker died (-", r"worker died \(-\d+\)"),
            Matcher("failed core proc(s)", r"Failed core proc\(s\): \{[^}]*: -\d+"),
            Matcher("segfault encountered", any_level=True),
            Matcher("segmentation fault", any_level=True),
            Matcher("code=dumped", any_level=True),
            # of the API server itself, whose end nobody else reports
            Matcher("failed with result 'signal'", any_level=True),
        ),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
    Kind(
        "custom-all-reduce-failed",
        "engine",
        "vLLM's own all-reduce kernel failed between the GPUs of one tensor-parallel group.",
        "Set vllm_server_extra_args: {disable-custom-all-reduce: true}, and take expandable_segments out of "
        "PYTORCH_CUDA_ALLOC_CONF in vllm_server_environment.",
        (
            Matcher("custom_all_reduce.cuh", r"error"),
            Matcher(
                "custom_all_reduce.py",
                near=r"CUDA error|Cuda error|invalid argument|peer access|illegal memory access",
                hint=True,
            ),
        ),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
    Kind(
        "cudagraph-replay-fault",
        "engine",
        "A recorded CUDA graph runs with other batch sizes, or another schedule of attention, than its buffers have; "
        "it is seen only with concurrent requests.",
        "Set vllm_server_cudagraph_mode: PIECEWISE. If it is set already, set vllm_server_extra_args: {enforce-eager: "
        "true} or lower vllm_server_max_num_seqs, and move to a newer vLLM (vllm_install_version).",
        (
            Matcher("an illegal memory access was encountered"),
            Matcher("block_table must have shape (batch_size"),
            Matcher("cudaerrorillegaladdress", hint=True),
            Matcher("cublas_status_execution_failed", hint=True),
        ),
        yields_to=(
            "custom-all-reduce-failed",
            "gpu-index-out-of-bounds",
            "drafter-fa2-sm12x",
            "gpu-arch-not-in-wheel",
        ),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
    Kind(
        "compile-cache-stale",
        "engine",
        "A compiled graph on disk is damaged, or belongs to another configuration and is loaded again.",
        "Delete the unit's compile cache, the folder torch_compile_cache below /var/cache/<unit> (elsewhere "
        "below VLLM_CACHE_ROOT), and start again.",
        (
            Matcher("corrupted compilation artifact"),
            Matcher("failed to get the hash of the compiled graph"),
            Matcher("expected tensors only, but got"),
            Matcher("assertionerror: expected size"),
            Matcher(
                "error: ",
                r"(?:EOFError: Ran out of input|UnpicklingError|pickle data was truncated)",
                near=r"torch_compile_cache|torch_aot_compile|vllm/compilation",
            ),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "engine-start-timeout",
        "engine",
        "The engine was still loading or compiling when the API server stopped waiting for it.",
        'Set vllm_server_environment: {VLLM_ENGINE_READY_TIMEOUT_S: "1800"}, above the time that loading takes.',
        (
            Matcher("timed out waiting for engine core processes to start"),
            Matcher("timed out waiting for engines to send initial message"),
            Matcher("engine_ready_timeout_s", r"(?:Timeout|timed out).*VLLM_ENGINE_READY_TIMEOUT_S"),
        ),
    ),
)

RUNTIME = (
    Kind(
        "min-p-with-speculation",
        "runtime",
        "A request, or the default generation settings, uses min_p or logit_bias, which speculation refuses; the "
        "server itself is fine.",
        "Take min_p and logit_bias out of the client, or set vllm_server_extra_args: {override-generation-config: "
        "{min_p: 0}}.",
        (Matcher("sampling parameters are not yet supported with speculative decoding", any_level=True),),
        stage=Stage.ANY,
        effect=Effect.SPARES,
    ),
    Kind(
        "structured-output-crash",
        "runtime",
        "A malformed schema or grammar in a request raises inside the engine and ends it.",
        "Move to a vLLM with the fix (vllm_install_version); until then check schemas before they are sent. The unit "
        "restarts the server meanwhile.",
        (
            Matcher("in _create_grammar"),
            Matcher("xgrammar/compiler.py"),
            Matcher("structured_output/backend_", hint=True),
        ),
        stage=Stage.SERVE,
    ),
    Kind(
        "gpu-index-out-of-bounds",
        "runtime",
        "A kernel was handed an index past the end of its table: a position beyond the rope table, or a token id "
        "beyond the vocabulary.",
        "Remove VLLM_ALLOW_LONG_MAX_MODEL_LEN from vllm_server_environment and keep vllm_server_max_model_len within "
        "the model's own limit; if it already is, move to a newer vLLM.",
        (
            Matcher("index out of bounds: 0 <="),
            Matcher("assertion `", r"Assertion `(?:srcIndex < srcSelectDimSize|ind >=\s*0 && ind < ind_dim_size)"),
        ),
        yields_to=("spec-batched-tokens-too-small",),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
)
