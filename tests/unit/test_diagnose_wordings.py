"""Wordings of failures as they are met in the wild: each kind in several, and what only looks like one."""

# ruff: noqa: E501 - the lines of a log stay whole

from __future__ import annotations

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.diagnose import diagnose
from ansible_collections.firstlight.vllm.plugins.module_utils.failure_catalogue import BY_ID
from ansible_collections.firstlight.vllm.plugins.module_utils.failure_kinds import Effect
from support_failure_logs import (
    CACHED,
    COMPILED,
    CONFIGURED,
    DIED,
    FAILED_START,
    LOADING,
    REFUSED,
    SERVING,
    journal,
    worker_error,
)

REFUSALS = {  # told by the API server while it reads its configuration
    "batched-tokens-too-small": [
        "Value error, max_num_batched_tokens (2048) is smaller than max_model_len (32768). This effectively limits the "
        "maximum sequence length to max_num_batched_tokens",
        "AssertionError: In Mamba cache align mode, block_size (2112) must be <= max_num_batched_tokens (2048).",
    ],
    "spec-batched-tokens-too-small": [
        "Value error, max_num_scheduled_tokens is set to 0 based on the speculative decoding settings, which does not "
        "allow any tokens to be scheduled.",
    ],
    "max-model-len-over-model": [
        "Value error, User-specified max_model_len (262144) is greater than the derived max_model_len "
        "(max_position_embeddings=40960.0 or model_max_length=None in model's config.json). To allow overriding this",
    ],
    "flag-rejected": [
        "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp4' (choose from auto, bfloat16, fp8)",
        "vllm serve: error: argument --port: invalid int value: '80a'",
        "KeyError: 'invalid tool call parser: qwen (chose from { hermes,qwen3_coder })'",
        "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser",
    ],
    "json-argument-mangled": [
        "vllm serve: error: argument --hf-overrides: Value {rope_type:yarn} cannot be converted to <function loads at 0x7f>.",
        "api_server.py: error: argument --compilation-config: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1)",
    ],
    "spec-config-invalid": [
        "ValueError: Neither `speculative_config` nor `num_speculative_tokens` was provided.",
        "Value error, draft_tensor_parallel_size=4 cannot be other value than 1 or target model tensor_parallel_size",
        "Value error, num_speculative_tokens:4 must be divisible by n_predict=3",
    ],
    "tp-not-dividing-heads": [
        "Value error, Total number of attention heads (40) must be divisible by tensor parallel size (16).",
        "AssertionError: 17408 is not divisible by 3",
    ],
    "tp-exceeds-gpus": [
        "Value error, World size (4) is larger than the number of available GPUs (2) in this node. If this is intentional",
        "Value error, Tensor parallel size (16) cannot be larger than the number of available GPUs (8)",
        "AssertionError: local_world_size (16) must be less than or equal to the number of visible devices (8).",
        "RuntimeError: please ensure that world_size (2) is less than than max local gpu count (1)",
    ],
    "trust-remote-code-needed": [
        "ValueError: Loading example/model requires you to execute the configuration file in that repo on your local machine.",
        "ValueError: The repository for /m/target contains custom code which must be executed to correctly load the model.",
    ],
    "model-too-new": [
        "ValueError: Model architectures ['Qwen3_9ForCausalLM'] are not supported for now. Supported architectures: "
        "dict_keys(['EagleLlamaForCausalLM', 'DFlashDraftModel'])",
        "ValueError: Tokenizer class TokenizersBackend does not exist or is not currently imported.",
        "ValueError: Olmo9ForCausalLM has no vLLM implementation and the Transformers implementation is not compatible "
        "with vLLM. Try setting VLLM_USE_V1=0.",
    ],
    "drafter-arch-unsupported": [
        "Value error, Model architectures ['DSparkDraftModel'] are not supported for now. Supported architectures: {}",
        "ValueError: Model architectures ['Eagle3MistralForCausalLM'] are not supported for now.",
    ],
    "gated-repo": [
        "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1-6) Cannot access gated repo for url "
        "https://huggingface.co/meta-llama/x/resolve/main/config.json.",
        "OSError: Access to model meta-llama/Llama-4 is restricted and you are not in the authorized list.",
    ],
    "hub-unreachable": [
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached "
        "files.",
        "requests.exceptions.ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max "
        'retries exceeded with url: /Qwen/Qwen3/resolve/main/config.json (Caused by NameResolutionError("x"))")',
        "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/api/models/Qwen/Qwen3: offline "
        "mode is enabled.",
        "FileNotFoundError: An error happened while trying to locate the files on the Hub and we cannot find the requested "
        "files in the local cache. Please check your connection and try again.",
    ],
    "model-dir-invalid": [
        "OSError: /m/target does not appear to have a file named config.json. Checkout 'https://huggingface.co/x/main'",
        "OSError: qwen3 is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
        "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. Repository Not Found for url: https://hf.co/x. If "
        "you are trying to access a private or gated repo, make sure you are authenticated.",
        "PermissionError: [Errno 13] Permission denied: '/home/alice/models/target/config.json'",
    ],
    "port-in-use": [
        "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use",
        "OSError: [Errno 98] Address already in use",
    ],
    "nvidia-driver-not-visible": [
        "RuntimeError: Failed to infer device type, please set the environment variable `VLLM_LOGGING_LEVEL=DEBUG`",
        "pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found",
        "RuntimeError: No CUDA GPUs are available",
        "ImportError: libcuda.so.1: cannot open shared object file: No such file or directory",
    ],
    "torch-build-mismatch": [
        "ImportError: /opt/v/lib/python3.12/site-packages/vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so: undefined symbol: _ZN3c10",
        "ImportError: libcublas.so.12: cannot open shared object file: No such file or directory",
        "ImportError: /opt/v/lib/python3.12/site-packages/torch/lib/libtorch_nvshmem.so: undefined symbol: nvshmemi_x",
        "AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'",
        "RuntimeError: operator torchvision::nms does not exist",
    ],
    "flash-attn-wheel-abi": [
        "ImportError: /opt/v/lib/python3.12/site-packages/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so: undefined "
        "symbol: _ZN2at4_ops5zeros4callEN3c108ArrayRef",
        "    from flash_attn.flash_attn_interface import (",
    ],
    "flash-attn-4-only": [
        "ModuleNotFoundError: No module named 'flash_attn.ops'",
        "ImportError: cannot import name 'flash_attn_varlen_func' from 'flash_attn' (unknown location)",
    ],
    "driver-module-mismatch": ["Failed to initialize NVML: Driver/library version mismatch"],
    "gpu-too-old": ["ValueError: GPUs with compute capability below 7.0 are not supported."],
    "env-var-malformed": ["ValueError: invalid literal for int() with base 10: 'GPU-1a2b' (CUDA_VISIBLE_DEVICES)"],
    "home-unset": [
        "PermissionError: [Errno 13] Permission denied: '/.config/vllm'",
        "PermissionError: [Errno 13] Permission denied: PosixPath('/.cache/huggingface')",
        "PermissionError: [Errno 13] Permission denied: '/nonexistent/.cache'",
    ],
    "rocm-device-denied": ["Unable to open /dev/kfd read-write: Permission denied"],
    "task-limit-reached": [
        "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable",
    ],
    "model-json-broken": [
        "OSError: It looks like the config file at '/m/target/config.json' is not a valid JSON file."
    ],
}

WORKER_FAILURES = {  # told by a worker or the engine while it starts
    "c-compiler-missing": [
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set triton.knobs.build.impl.",
        "FileNotFoundError: [Errno 2] No such file or directory: 'gcc'",
        "torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx",
        "/bin/sh: 1: x86_64-linux-gnu-gcc: not found",
    ],
    "python-headers-missing": [
        "/tmp/tmpx/cuda_utils.c:7:10: fatal error: Python.h: No such file or directory",
        "/tmp/tmpx/main.c:5:10: fatal error: 'Python.h' file not found",
    ],
    "nvcc-missing": [
        "/bin/sh: 1: /usr/local/cuda-12.9/bin/nvcc: not found",
        "/bin/sh: line 1: /usr/local/cuda/bin/nvcc: No such file or directory",
        "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
    ],
    "cuda-home-malformed": [
        "/bin/sh: 1: :/usr/local/cuda/bin/nvcc: not found",
        "/bin/sh: line 1: :/usr/local/cuda-13/bin/nvcc: No such file or directory",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda:/opt/cuda/bin/nvcc'",
    ],
    "ninja-not-on-path": [
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
        "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
    ],
    "cuda-headers-missing": [
        "/opt/v/flashinfer/data/include/x.cuh:20:10: fatal error: cublasLt.h: No such file or directory",
        "fatal error: cuda_fp8.h: No such file or directory",
        "fatal error: nv/target: No such file or directory",
    ],
    "flashinfer-jit-failed": [
        "RuntimeError: Ninja build failed. Ninja output: ninja: Entering directory "
        "`/var/cache/vllm/.cache/flashinfer/0.6.8/120a/cached_ops'",
        "subprocess.CalledProcessError: Command '['ninja', '-v', '-C', '/c/flashinfer/0.5.3/80/cached_ops', '-f', "
        "'/c/flashinfer/0.5.3/80/cached_ops/sampling/build.ninja']' returned non-zero exit status 1.",
    ],
    "ptxas-too-old": [
        "ptxas fatal   : Value 'sm_110a' is not defined for option 'gpu-name'",
        "triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error",
    ],
    "cuda-driver-too-old": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver",
        "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
        "torch.AcceleratorError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
    ],
    "gpu-arch-not-in-wheel": [
        "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    ],
    "no-memory-for-cache-blocks": [
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing.",
    ],
    "kv-cache-too-small": [
        "ValueError: To serve at least one request with the models's max seq len (32768), (2.88 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (1.2 GiB).",
        "ValueError: The model's max seq len (131072) is larger than the maximum number of tokens that can be stored in KV "
        "cache (69968). Try increasing `gpu_memory_utilization`",
    ],
    "free-memory-below-utilization": [
        "ValueError: Free memory on device cuda:0 (3.1/79.15 GiB) on startup is less than desired GPU memory utilization "
        "(0.9, 71.24 GiB).",
        "AssertionError: Error in memory profiling. Initial free memory 21.3 GiB, current free memory 40.1 GiB.",
    ],
    "gpu-oom-weights": [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 170.00 MiB. GPU 0 has a total capacity of 23.6 GiB",
        "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization",
    ],
    "mamba-cache-too-small": [
        "RuntimeError: Worker failed with error 'max_num_seqs (1024) exceeds available Mamba cache blocks (600). Each decode "
        "sequence requires one Mamba cache block', please check the stack trace above for the root cause",
    ],
    "kv-cache-request-too-big": [
        "ValueError: Available memory on node 0 (3.2/7.8 GiB) on startup is less than requested memory for kv (4.0 GiB).",
    ],
    "disk-full": [
        "OSError: [Errno 28] No space left on device: '/var/cache/vllm/torch_compile_cache/x'",
        "RuntimeError: Data processing error: File reconstruction error: IO Error: Os { code: 28, kind: StorageFull }",
    ],
    "attention-backend-unusable": [
        "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(head_size=576). Reasons: {x}",
        "ValueError: Selected backend AttentionBackendEnum.FLASHINFER is not valid for this configuration. Reason: ['x']",
    ],
    "bf16-unsupported": [
        "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Quadro RTX 6000 GPU",
    ],
    "fp8-kv-unsupported": [
        "ValueError: type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')",
    ],
    "cpu-numa-binding": [
        "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 CPUWorkers. Allowed NUMA nodes are [0].",
    ],
    "ssm-state-dtype": ["AssertionError: initial_state dtype mismatch: torch.bfloat16 vs torch.float32"],
    "rendezvous-port-in-use": [
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
        "29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5557')",
    ],
    "nccl-unhandled-error": [
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/NCCLUtils.cpp:77, unhandled cuda error (run "
        "with NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    ],
    "weights-missing": [
        "RuntimeError: Cannot find any model weights with `/m/drafter`",
        "OSError: Error no file named model.safetensors, or pytorch_model.bin, found in directory /m/drafter.",
    ],
    "truncated-weights": [
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "OSError: Consistency check failed: file should be of size 4950000 but has size 120000 (model-00001.safetensors).",
    ],
    "lfs-pointer": [
        "safetensors._safetensors_rust.SafetensorError: Error while deserializing header: header too large"
    ],
    "weights-config-mismatch": [
        "AssertionError: Attempted to load weight (torch.Size([4096, 20480])) into parameter (torch.Size([5120, 25600]))",
        "RuntimeError: The size of tensor a (5120) must match the size of tensor b (4096) at non-singleton dimension 1",
        "ValueError: Following weights were not initialized from checkpoint: {'model.fc.weight'}",
        "ValueError: There is no module or parameter named 'markov_head' in DFlashQwen3ForCausalLM",
        "KeyError: 'layers.5.self_attn.qkv_proj.weight'",
    ],
    "cache-dir-not-writable": [
        "PermissionError: [Errno 13] Permission denied: '/var/cache/vllm/torch_compile_cache'",
        "OSError: [Errno 30] Read-only file system: '/usr/share/vllm/.triton/cache'",
        "PermissionError: [Errno 13] Permission denied: '/root/.cache/huggingface/hub/models--x/config.json'",
    ],
    "drafter-mixed-attention": [
        "AssertionError: All drafting layers should belong to the same kv cache group",
        "NotImplementedError: DFlash drafters with mixed sliding/full attention require the V2 model runner",
    ],
    "drafter-dtype-mismatch": [
        "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: c10::BFloat16 != c10::Half",
    ],
    "drafter-quantized": [
        "AttributeError: 'QKVParallelLinear' object has no attribute 'weight'. Did you mean: 'qweight'?"
    ],
    "drafter-fp8-attention": [
        'flashinfer/attention/prefill.cuh(1400): error: static assertion failed with "fp8 tensor core is not supported in '
        'fa2 backend"',
    ],
    "drafter-config-incomplete": [
        "ValueError: For parallel drafting, the draft model config must have `pard_token` specified in its config.json.",
    ],
    "target-without-aux-states": [
        "RuntimeError: Model does not support EAGLE3 interface but aux_hidden_state_outputs was requested",
    ],
    "compile-cache-stale": [
        "RuntimeError: vLLM failed to compile the model. A previous compilation failed, leading to a corrupted compilation "
        "artifact.",
        "AssertionError: failed to get the hash of the compiled graph",
        "torch._inductor.exc.InductorError: AssertionError: Expected tensors only, but got: <class 'int'>",
        "AssertionError: expected size 4096==2048, stride 5120==5120 at dim=0",
    ],
    "engine-start-timeout": [
        "TimeoutError: Timed out waiting for engine core processes to start. Waited 600s (configured by "
        "VLLM_ENGINE_READY_TIMEOUT_S).",
        "TimeoutError: Timed out waiting for engines to send initial message on input socket.",
    ],
    "custom-all-reduce-failed": [
        "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:368 'peer access is not supported'"
    ],
    "shm-too-small": [
        "gpu-7:33:33 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-EoOvZr: No space left on device",
        "Error while creating shared memory segment /dev/shm/nccl-EoOvZr (size 7340384)",
    ],
}

DEATHS = {  # told while it serves
    "cudagraph-replay-fault": [
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: block_table must have shape (batch_size, max_num_blocks_per_seq)",
    ],
    "gpu-index-out-of-bounds": [
        "/o/compile_tasks.py:45: <module>: block: [3,0,0], thread: [1,0,0] Assertion `index out of bounds: 0 <= tmp9 < 40960` "
        "failed.",
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1369: indexSelectLargeIndex: block: [2,0,0], thread: [3,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed.",
    ],
    "structured-output-crash": [
        'File "/opt/v/lib/python3.12/site-packages/xgrammar/compiler.py", line 300, in compile_grammar',
        'File "/opt/v/lib/python3.12/site-packages/vllm/v1/structured_output/__init__.py", line 9, in _create_grammar',
    ],
    "killed-by-oom": [
        "kernel: Out of memory: Killed process 22 (VLLM::EngineCor) total-vm:9kB, anon-rss:8kB, UID:998",
        "kernel: Memory cgroup out of memory: Killed process 33 (python3) total-vm:9kB",
        "systemd[1]: vllm.service: A process of this unit has been killed by the OOM killer.",
    ],
    "engine-died-silently": [
        "(APIServer pid=11) ERROR 05-12 09:30:00 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, "
        "shutting down client.",
        "(EngineCore pid=22) ERROR 05-12 09:30:00 [multiproc_executor.py:283] Worker proc VllmWorker-1 died unexpectedly, "
        "shutting down executor.",
    ],
    "spec-batched-tokens-too-small": ["AssertionError: Shape: 4111 out of considered ranges: [(1, 4096)]"],
    "weights-config-mismatch": ["RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x25600 and 20480x5120)"],
    "disk-full": ["OSError: [Errno 28] No space left on device"],
    "engine-wrapper-only": [
        "(EngineCore pid=22) ERROR 05-12 09:30:00 [core.py:1138] EngineCore encountered a fatal error."
    ],
}


def _cases(table: dict[str, list[str]]) -> list[tuple[str, str]]:
    return [(kind, line) for kind, lines in table.items() for line in lines]


@pytest.mark.parametrize(("kind", "line"), _cases(REFUSALS))
def test_a_refused_configuration_is_told_apart(kind: str, line: str) -> None:
    log = [*CONFIGURED, "(APIServer pid=11) Traceback (most recent call last):", f"(APIServer pid=11) {line}", *REFUSED]
    _same(kind, line, diagnose(log), diagnose(journal(log)), diagnose(log[4:]))


@pytest.mark.parametrize(("kind", "line"), _cases(WORKER_FAILURES))
def test_a_failed_start_is_told_apart_below_its_wrapper(kind: str, line: str) -> None:
    bare = [*LOADING, line, *FAILED_START]
    logged = [*LOADING, *worker_error("WorkerProc hit an exception.", line), *FAILED_START]
    _same(kind, line, diagnose(bare), diagnose(logged), diagnose(journal(logged)))


@pytest.mark.parametrize(("kind", "line"), _cases(DEATHS))
def test_a_death_while_serving_is_told_apart(kind: str, line: str) -> None:
    log = [*SERVING, line, *DIED]
    _same(kind, line, diagnose(log), diagnose(journal(log)))


def _same(kind: str, line: str, *verdicts: object) -> None:
    for verdict in verdicts:
        assert (verdict.id, line in verdict.text) == (kind, True), verdict  # type: ignore[attr-defined]


@pytest.mark.parametrize(("kind", "line"), _cases({**WORKER_FAILURES, **REFUSALS}))
def test_the_same_words_before_a_server_became_ready_are_no_failure(kind: str, line: str) -> None:
    log = [*CONFIGURED, *worker_error(line), *SERVING[len(CONFIGURED) :]]
    assert diagnose(log).id == "none"


@pytest.mark.parametrize(("kind", "line"), _cases({**WORKER_FAILURES, **REFUSALS}))
def test_the_same_words_in_a_prompt_are_no_failure(kind: str, line: str) -> None:
    log = [
        *SERVING,
        f"(APIServer pid=11) INFO 05-12 09:20:00 [logger.py:43] Received request chatcmpl-1: prompt: 'why? {line}'",
        line,
        '(APIServer pid=11) INFO:     127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 200 OK',
    ]
    if BY_ID[kind].effect is not Effect.SPARES:
        assert diagnose(log).id == "none"


def test_memory_that_runs_out_after_the_cache_was_made_is_the_graphs() -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 136.00 MiB. GPU 0 has a total capacity of 22.36 GiB"
    assert diagnose([*CACHED, *worker_error(line), *FAILED_START]).id == "gpu-oom-graph-capture"
    assert diagnose([*LOADING, *worker_error(line), *FAILED_START]).id == "gpu-oom-weights"
    frames = worker_error(
        '  File "/o/gpu_worker.py", line 588, in compile_or_warm_up_model', "    capture_model()", line
    )
    assert diagnose([*COMPILED, *frames, *FAILED_START]).id == "gpu-oom-graph-capture"


def test_a_capture_that_ends_out_of_memory_is_the_graphs() -> None:
    frames = worker_error("    super().capture_end()", "RuntimeError: CUDA error: out of memory")
    verdict = diagnose([*COMPILED, *frames, *FAILED_START])
    assert verdict.id == "gpu-oom-graph-capture"
    assert "CUDA error: out of memory" in verdict.text


def test_a_gpu_that_was_full_before_anything_loaded_is_not_the_graphs() -> None:
    frames = worker_error("    torch.cuda.set_device(self.device)", "RuntimeError: CUDA error: out of memory")
    assert diagnose([*CONFIGURED, *frames, *FAILED_START]).id == "free-memory-below-utilization"


def test_a_field_of_the_speculative_config_is_told_from_any_other() -> None:
    def refused(config: str, field: str, line: str) -> list[str]:
        return [
            *CONFIGURED,
            "(APIServer pid=11) Traceback (most recent call last):",
            f"(APIServer pid=11) pydantic_core._pydantic_core.ValidationError: 1 validation error for {config}",
            f"(APIServer pid=11) {field}",
            f"(APIServer pid=11)   {line}",
        ]

    literal = "Input should be 'ngram', 'medusa' or 'dflash' [type=literal_error, input_value='dflahs', input_type=str]"
    number = "Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]"
    unknown = "Unexpected keyword argument [type=unexpected_keyword_argument, input_value=1, input_type=int]"
    assert diagnose(refused("SpeculativeConfig", "method", literal)).id == "spec-config-invalid"
    assert diagnose(refused("SpeculativeConfig", "num_speculative_tokens", number)).id == "spec-config-invalid"
    assert diagnose(refused("SpeculativeConfig", "num_spec_tokens", unknown)).id == "spec-config-invalid"
    assert (
        diagnose(refused("CacheConfig", "block_size", "Input should be 1, 8 or 16 [type=literal_error]")).id
        == "flag-rejected"
    )
    assert diagnose(refused("CompilationConfig", "levle", unknown)).id == "flag-rejected"
    verdict = diagnose(refused("SchedulerConfig", "max_num_seqs", number))
    assert verdict.id == "flag-rejected"
    assert "vllm_server_max_num_seqs" in verdict.remedy


def test_the_compilers_own_complaint_wins_over_the_failed_build() -> None:
    build = (
        "RuntimeError: Ninja build failed. Ninja output: ninja: Entering directory `/c/flashinfer/0.6/90a/cached_ops'"
    )
    stopped = "ninja: build stopped: subcommand failed."
    for complaint, kind in [
        ("/usr/include/x.cuh:3:10: fatal error: curand_kernel.h: No such file or directory", "cuda-headers-missing"),
        ("/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found", "nvcc-missing"),
        ("/bin/sh: 1: :/usr/local/cuda/bin/nvcc: not found", "cuda-home-malformed"),
        (
            'error: static assertion failed with "fp8 tensor core is not supported in fa2 backend"',
            "drafter-fp8-attention",
        ),
        ("fatal error: error writing to /tmp/x.s: No space left on device", "disk-full"),
    ]:
        assert diagnose([*COMPILED, *worker_error(build, complaint, stopped), *FAILED_START]).id == kind
    assert (
        diagnose([*COMPILED, *worker_error(build, "x.cu(3): error: no", stopped), *FAILED_START]).id
        == "flashinfer-jit-failed"
    )


def test_a_device_assert_is_the_drafters_attention_only_without_an_index() -> None:
    frames = worker_error(
        "    torch.ops._vllm_fa2_C.varlen_fwd(", "torch.AcceleratorError: CUDA error: device-side assert triggered"
    )
    assert diagnose([*COMPILED, *frames, *FAILED_START]).id == "drafter-fa2-sm12x"
    index = (
        "x.py:45: <module>: block: [1,0,0], thread: [2,0,0] Assertion `index out of bounds: 0 <= tmp9 < 4096` failed."
    )
    assert diagnose([*SERVING, index, *frames, *DIED]).id == "gpu-index-out-of-bounds"
    bare = worker_error("torch.AcceleratorError: CUDA error: device-side assert triggered")
    assert diagnose([*SERVING, *bare, *DIED]).id == "unknown"
