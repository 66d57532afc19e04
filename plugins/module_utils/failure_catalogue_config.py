"""Kinds of failure that come from a setting: flags, JSON, environment, unit."""

from __future__ import annotations

from .failure_kinds import Effect, Kind, Matcher, Stage

_SPECULATIVE = r"validation errors? for SpeculativeConfig|create_speculative_config"
_OTHER_CONFIG = r"validation errors? for (?!SpeculativeConfig)\w+"

CONFIG = (
    Kind(
        "spec-batched-tokens-too-small",
        "config",
        "Speculation keeps draft slots for every sequence, and max_num_batched_tokens has no room for them.",
        "Raise vllm_server_max_num_batched_tokens to at least vllm_server_max_num_seqs times "
        "(vllm_server_num_speculative_tokens + 1), 32768 being ample, or lower vllm_server_max_num_seqs.",
        (
            Matcher(
                "max_num_scheduled_tokens is set to", r"max_num_scheduled_tokens is set to (?:-\d+|0)\b", any_level=True
            ),
            Matcher("out of considered ranges"),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "batched-tokens-too-small",
        "config",
        "max_num_batched_tokens is below another setting that it must at least equal.",
        "Raise vllm_server_max_num_batched_tokens to the other number in the message.",
        (
            Matcher("must be greater than or equal to max_num_seqs"),
            Matcher("is smaller than max_model_len"),
            Matcher("in mamba cache align mode, block_size"),
            Matcher("is larger than max_num_batched_tokens"),
        ),
        yields_to=("spec-batched-tokens-too-small",),
    ),
    Kind(
        "max-model-len-over-model",
        "config",
        "max_model_len asks for more positions than the model's own config allows.",
        "Lower vllm_server_max_model_len to the limit in the message, or declare rope scaling with hf-overrides in "
        "vllm_server_extra_args if the model supports it.",
        (Matcher("is greater than the derived max_model_len"),),
    ),
    Kind(
        "flag-rejected",
        "config",
        "A flag or the value of a flag is one that this vLLM release does not accept.",
        "Correct or drop the option that the message names in vllm_server_extra_args (or the variable of the same "
        "name); `vllm serve --help=all` of that venv lists what is accepted.",
        (
            Matcher("unrecognized arguments:"),
            Matcher("invalid choice:"),
            Matcher("invalid tool call parser:"),
            Matcher("reasoning parser '", r"reasoning parser '[^']*' not found"),
            Matcher("input should be", r"Input should be (?:less|greater) than"),
            Matcher("input should be", near=_OTHER_CONFIG),
            Matcher("unexpected keyword argument", near=_OTHER_CONFIG),
            Matcher("error: argument", r"\berror: argument -{1,2}[\w/, -]+: "),
            Matcher("error: the following arguments are required"),
            Matcher("error: ambiguous option"),
            Matcher("requires --", r"--[\w-]+ requires --[\w-]+"),
        ),
        yields_to=("json-argument-mangled", "spec-config-invalid"),
    ),
    Kind(
        "json-argument-mangled",
        "config",
        "An option that takes JSON received text whose quotes or braces were changed by a shell, a unit file or a "
        "template.",
        "Give the value as a YAML mapping in vllm_server_extra_args (it travels in the file of --config and passes "
        "no shell), not as JSON text on a command line.",
        (
            Matcher("cannot be converted to <function loads"),
            Matcher(
                "error: argument", r"error: argument .{0,80}(?:JSON|Expecting (?:value|property name|',' delimiter))"
            ),
            Matcher(
                "jsondecodeerror",
                near=r"argparse_utils|in parse_args|_parse_optional_json|union_dict_and_str|cli_args",
                hint=True,
            ),
        ),
    ),
    Kind(
        "spec-config-invalid",
        "config",
        "The speculative configuration parses as JSON, but a key, a value or the method in it is wrong for this "
        "release or this drafter.",
        "Correct the key that the message names: vllm_server_num_speculative_tokens, or what "
        "vllm_server_extra_args puts into speculative-config (method dflash, draft_tensor_parallel_size 1 or the "
        "target's).",
        (
            Matcher("nor `num_speculative_tokens` was provided"),
            Matcher("input should be 'ngram'"),
            Matcher("is not a valid argument in the speculative_config"),
            Matcher("cannot be other value than 1 or target model tensor_parallel_size"),
            Matcher("must be divisible by n_predict"),
            Matcher("): invalid configuration argument"),
            Matcher("unexpected keyword argument", r"Unexpected keyword argument \[type=", near=_SPECULATIVE),
            Matcher("unexpected keyword argument", r"^Unexpected keyword argument|argument \[type=", hint=True),
            Matcher("input should be", near=_SPECULATIVE),
            Matcher("speculative", r"(?:unsupported|unknown|invalid) speculative (?:method|decoding method)"),
            Matcher("num_speculative_tokens", r"num_speculative_tokens\S* .{0,40}(?:must be|should be|is required)"),
        ),
        yields_to=("json-argument-mangled", "drafter-config-incomplete"),
        stage=Stage.ANY,
    ),
    Kind(
        "tp-not-dividing-heads",
        "config",
        "The number of attention heads of the target or the drafter is not a multiple of the tensor-parallel size.",
        "Set vllm_server_tensor_parallel_size to a divisor of the head count in the message.",
        (
            Matcher("must be divisible by tensor parallel size"),
            Matcher("is not divisible by", r"AssertionError: \d+ is not divisible by \d+"),
            Matcher(
                "heads",
                r"num(?:ber of|_)(?:attention_|kv_|attention |kv )?heads.{0,40}divisible by.{0,30}(?:tp|tensor)",
            ),
        ),
    ),
    Kind(
        "tp-exceeds-gpus",
        "config",
        "The parallel sizes ask for more GPUs than the process can see.",
        "Lower vllm_server_tensor_parallel_size to the number of GPUs, or make more of them visible "
        "(CUDA_VISIBLE_DEVICES in vllm_server_environment).",
        (
            Matcher("larger than the number of available gpus"),
            Matcher("number of visible devices", r"must be less than or equal to the number of visible devices"),
            Matcher("max local gpu count", r"world_size \(\d+\) is less than"),
            Matcher("exceeds the total number of available gpus"),
            Matcher("invalid device ordinal"),
        ),
    ),
    Kind(
        "attention-backend-unusable",
        "config",
        "No attention backend, or not the one asked for, meets all that model, cache type and GPU require.",
        "Change the setting that the listed reasons name (kv-cache-dtype, dtype or block-size in "
        "vllm_server_extra_args), or drop attention-backend; a DFlash drafter on 0.20.1 needs FLASH_ATTN.",
        (
            Matcher("no valid attention backend found"),
            Matcher("is not valid for this configuration. reason"),
            Matcher("invalid attention backend"),
        ),
        yields_to=("drafter-fp8-attention", "fp8-kv-unsupported"),
    ),
    Kind(
        "bf16-unsupported",
        "config",
        "The checkpoint is bfloat16 and the GPU has no bfloat16 arithmetic.",
        "Set vllm_server_extra_args: {dtype: half}.",
        (Matcher("bfloat16 is only supported on gpus"),),
    ),
    Kind(
        "fp8-kv-unsupported",
        "config",
        "An FP8 KV cache was asked for on a GPU older than compute capability 8.9.",
        "Set vllm_server_extra_args: {kv-cache-dtype: auto}.",
        (
            Matcher("not supported in this architecture", r"type fp8\w+ not supported in this architecture"),
            Matcher("e4m3", r"(?:Feature|cvt).{0,60}e4m3\w*.{0,60}(?:requires|not supported on) \.target"),
        ),
        yields_to=("drafter-fp8-attention",),
        stage=Stage.ANY,
    ),
    Kind(
        "env-var-malformed",
        "config",
        "An environment variable that is read as a number is empty or not a number.",
        "Give the variable that the traceback's os.getenv line names a number in vllm_server_environment, or remove "
        "it there.",
        (
            Matcher(
                "invalid literal for int() with base 10",
                near=r"getenv|environ|envs\.py|CUDA_VISIBLE_DEVICES|device_id_to_physical",
            ),
            Matcher("could not convert string to float", near=r"getenv|environ|envs\.py"),
            Matcher("invalid literal for int() with base 10", hint=True),
        ),
        yields_to=("flag-rejected",),
    ),
    Kind(
        "trust-remote-code-needed",
        "config",
        "The model repository brings its own Python code, and vLLM was not allowed to run it.",
        "Read that code, then set vllm_server_trust_remote_code: true.",
        (
            Matcher("contains custom code which must be executed"),
            Matcher("trust_remote_code=true", r"pass the argument `trust_remote_code=True` to allow"),
            Matcher("requires you to execute", r"requires you to execute the (?:configuration|modeling|\w+) file"),
            Matcher("consider setting `trust_remote_code=true`", hint=True),
        ),
        yields_to=("model-too-new", "model-json-broken", "model-dir-invalid"),
    ),
    Kind(
        "systemd-start-limit",
        "config",
        "systemd gave up restarting; the failure itself happened in an earlier start.",
        "Read the first failed start in the unit's journal, mend that, then run systemctl reset-failed; "
        "vllm_server_restart_s and vllm_server_start_limit_burst set how soon systemd gives up.",
        (
            Matcher("start request repeated too quickly", any_level=True),
            Matcher("start-limit-hit", any_level=True),
        ),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
    Kind(
        "cpu-numa-binding",
        "config",
        "The CPU build wants one NUMA node for each worker and the machine has fewer.",
        "Set vllm_server_environment: {VLLM_CPU_OMP_THREADS_BIND: '0|1'} (one list of cores a worker), or lower "
        "vllm_server_tensor_parallel_size.",
        (Matcher("not enough allowed numa nodes to bind threads"),),
    ),
    Kind(
        "ssm-state-dtype",
        "config",
        "A hybrid model keeps its recurrent state in a number format that the gated-delta kernel does not take.",
        "Set vllm_server_extra_args: {mamba-ssm-cache-dtype: float32}, or put mamba_ssm_dtype float32 into the "
        "text_config of the target's config.json.",
        (Matcher("initial_state dtype mismatch"),),
        stage=Stage.ANY,
    ),
)

NETWORK = (
    Kind(
        "port-in-use",
        "network",
        "Another process already listens on the address that the HTTP server wants.",
        "Stop the process that `ss -ltnp` shows on the port, or choose another vllm_server_port below 32768.",
        (
            Matcher("address already in use", never=r"errno: 98|socket\.cpp|c10d|TCPStore|EADDRINUSE|zmq"),
            Matcher("error while attempting to bind on address", never=r"permission denied|cannot assign"),
        ),
        yields_to=("rendezvous-port-in-use",),
        stage=Stage.ANY,  # uvicorn says that the application has started, and binds the port after that
        effect=Effect.KILLS,
    ),
    Kind(
        "rendezvous-port-in-use",
        "network",
        "A port that the workers use among themselves is taken; the HTTP port is not at fault.",
        "Remove VLLM_PORT and MASTER_PORT from vllm_server_environment and end the workers of an earlier start.",
        (
            Matcher("the server socket has failed to listen on any local network address"),
            Matcher("eaddrinuse"),
            Matcher("zmq", r"ZMQError: Address already in use"),
        ),
    ),
    Kind(
        "gated-repo",
        "network",
        "The model repository is gated and the service has no token with access to it.",
        "Accept the licence on the hub and set model_token (drafter_hub_token for the drafter) to a token "
        "with access, or serve weights that lie on the host (model_path).",
        (
            Matcher("trying to access a gated repo"),
            Matcher("cannot access gated repo"),
            Matcher("gatedrepoerror"),
            Matcher("access to public gated repositories"),
            Matcher("you are not in the authorized list"),
            Matcher("access to model", r"Access to model \S+ is restricted"),
            Matcher("is awaiting a review"),
        ),
    ),
    Kind(
        "hub-unreachable",
        "network",
        "The model is not in the local cache, and the hub may not or cannot be asked.",
        "Let firstlight place the weights before the start (model_path, or model_repo with model_revision); "
        'only with HF_HUB_OFFLINE: "0" in vllm_server_environment does the service itself ask the hub.',
        (
            Matcher("outgoing traffic has been disabled"),
            Matcher("localentrynotfounderror"),
            Matcher("connect to 'https://huggingface.co'", r"couldn't connect to 'https://huggingface\.co'"),
            Matcher("offlinemodeisenabled"),
            Matcher("cannot find the requested files in the disk cache"),
            Matcher("cannot find the requested files in the local cache"),
            Matcher("max retries exceeded with url", r"huggingface|hf\.co|modelscope|/resolve/|/api/models"),
            Matcher("name resolution", r"Temporary failure in name resolution|NameResolutionError", hint=True),
            Matcher("connection", r"(?:Connect(?:ion)?Error|ConnectTimeout)\b.*(?:huggingface|hf\.co)"),
        ),
        yields_to=("gated-repo",),
    ),
    Kind(
        "nccl-unhandled-error",
        "network",
        "NCCL failed with a catch-all error, and its own explanation was not logged.",
        "Set vllm_server_environment: {NCCL_DEBUG: INFO}, start again and act on the NCCL WARN line.",
        (
            Matcher("unhandled system error"),
            Matcher("unhandled cuda error", never=r"custom_all_reduce"),
            Matcher("nccl", r"ncclUnhandledCudaError|ncclSystemError"),
            Matcher("nccl error", r"NCCL error.{0,160}(?:internal error|remote process exited)", hint=True),
        ),
        yields_to=("shm-too-small", "custom-all-reduce-failed", "gpu-oom-weights", "tp-exceeds-gpus"),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
)
