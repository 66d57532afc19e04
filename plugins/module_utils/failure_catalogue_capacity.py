"""Kinds of failure that come from too little of something: GPU or host memory, disk, threads."""

from __future__ import annotations

from .failure_kinds import Effect, Kind, Matcher, Stage

_SHARED_MEMORY = r"/dev/shm|/psm_"  # noqa: S108 (names what a log says, opens nothing)
# processes of a server, and the compilers that it runs, as the kernel names them
_OURS = r"(?:[^)]*vllm[^)]*|python[\d.]*|pt_\w+|ray[\w:]*|EngineCore[^)]*|Worker[^)]*|cicc|nvcc|ptxas|cc1\w*)"

CAPACITY = (
    Kind(
        "no-memory-for-cache-blocks",
        "capacity",
        "Weights and the activation peak use up the whole GPU budget, so nothing is left for a KV cache.",
        "Raise vllm_server_gpu_memory_utilization; if it is already near 0.95, lower "
        "vllm_server_max_num_batched_tokens or serve a quantised checkpoint.",
        (
            Matcher("no available memory for the cache blocks"),
            Matcher("kv cache is -", r"reserved for KV Cache is -\d", any_level=True),
            Matcher("blocks: 0", r"# (?:cuda|gpu|cpu|npu|hpu) blocks: 0\b", any_level=True),
            Matcher("available kv cache memory: -", any_level=True),
        ),
    ),
    Kind(
        "kv-cache-too-small",
        "capacity",
        "There is a KV cache, but one request of the configured maximum length does not fit into it.",
        "Set vllm_server_max_model_len to the estimated maximum that the message prints, or lower.",
        (
            Matcher("larger than the available kv cache memory"),
            Matcher("to serve at least one request with the model"),
            Matcher("larger than the maximum number of tokens that can be stored in kv cache"),
        ),
    ),
    Kind(
        "free-memory-below-utilization",
        "capacity",
        "Another process, often the server that has not ended yet, holds memory of the GPU at start-up.",
        "Stop the process that nvidia-smi shows before the start, or lower vllm_server_gpu_memory_utilization "
        "below the free share.",
        (
            Matcher("is less than desired gpu memory utilization"),
            Matcher("error in memory profiling. initial free memory"),
            Matcher("cuda error: out of memory", near=r"set_device|in init_device", absent=("starting to load model",)),
        ),
    ),
    Kind(
        "gpu-oom-weights",
        "capacity",
        "The weights alone do not fit into the memory of the GPUs at this tensor-parallel size.",
        "Raise vllm_server_tensor_parallel_size to spread the weights over more GPUs, or serve a quantised checkpoint.",
        (
            Matcher("out of memory. tried to allocate", r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate"),
            Matcher("failed to load model - not enough gpu memory"),
        ),
        yields_to=("gpu-oom-graph-capture", "free-memory-below-utilization"),
    ),
    Kind(
        "gpu-oom-graph-capture",
        "capacity",
        "The KV cache took nearly all memory and recording the CUDA graphs ran out of what was left.",
        "Lower vllm_server_gpu_memory_utilization by 0.02 to 0.05, or lower vllm_server_max_num_seqs; "
        "vllm_server_extra_args: {enforce-eager: true} as a stopgap.",
        (
            Matcher("cuda error: out of memory"),
            Matcher("super().capture_end()", hint=True),
            Matcher(
                "out of memory. tried to allocate",
                near=r"capture_end|capture_model|_capture_cudagraphs|graph_capture|cuda_?graph\.py|compile_or_warm_up_model",
            ),
            Matcher(
                "out of memory. tried to allocate", after=("gpu kv cache size:", "capturing cuda", "# gpu blocks:")
            ),
            Matcher("out of memory occurred when warming up sampler"),
        ),
        yields_to=("free-memory-below-utilization",),
    ),
    Kind(
        "mamba-cache-too-small",
        "capacity",
        "A hybrid model has fewer blocks for its recurrent state than sequences may run at once.",
        "Lower vllm_server_max_num_seqs to the number of blocks that the message prints.",
        (Matcher("exceeds available mamba cache blocks"),),
    ),
    Kind(
        "kv-cache-request-too-big",
        "capacity",
        "A KV cache of fixed size was asked for that is larger than the memory the process may still take.",
        "Lower kv-cache-memory-bytes in vllm_server_extra_args (CPU build: VLLM_CPU_KVCACHE_SPACE in "
        "vllm_server_environment) below the free memory and below the unit's MemoryMax=.",
        (
            Matcher("is less than requested memory for kv"),
            Matcher("defaultcpuallocator: can't allocate memory"),
            Matcher(
                "kv cache", r"KV cache (?:space|size).{0,60}(?:exceeds|larger than).{0,40}(?:available|free) memory"
            ),
        ),
        yields_to=("killed-by-oom",),
    ),
    Kind(
        "shm-too-small",
        "capacity",
        "Shared memory between the workers cannot be made: /dev/shm is too small or full of old segments.",
        "Enlarge /dev/shm (mount option size=16g; in a container --shm-size=16g) and delete old /dev/shm/nccl-* files.",
        (
            Matcher("shared memory segment", r"Error while (?:creating|attaching to) shared memory segment"),
            Matcher(
                "no space left on device", r"No space left on device.{0,60}(?:/dev/shm|/psm_)|/dev/shm.{0,80}No space"
            ),
            Matcher("out of shared memory", r"might be out of shared memory|workers are out of shared memory"),
            Matcher("unable to allocate shared memory(shm)"),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "disk-full",
        "capacity",
        "The file system that holds a download, a cache or the output is full.",
        "Free space on that file system (the prune playbook removes old venvs and caches), or mount a larger "
        "disk at /var/cache or vllm_install_root.",
        (
            Matcher("no space left on device", never=_SHARED_MEMORY),
            Matcher("storagefull"),
            Matcher("disk quota exceeded"),
            Matcher("not enough free disk space to download", hint=True, any_level=True),
        ),
        yields_to=("shm-too-small",),
        stage=Stage.ANY,
    ),
    Kind(
        "killed-by-oom",
        "capacity",
        "The kernel ended a process of the server, because host memory or the unit's memory limit was exhausted.",
        "Raise MemoryMax= in vllm_server_unit_dropin, or give the host more RAM.",
        (
            Matcher("failed with result 'oom-kill'", any_level=True),
            Matcher("killed by the oom killer", any_level=True),
            Matcher(
                "out of memory: killed process",
                rf"killed process \d+ \({_OURS}\)",
                any_level=True,
            ),
            Matcher(
                "oom-kill:constraint", r"task=(?:\S*vllm\S*|python[\d.]*|pt_\w+|EngineCore|Worker)", any_level=True
            ),
            Matcher("out of memory: killed process", never=r"killed process \d+ \(", hint=True, any_level=True),
            Matcher("killed due to memory pressure (oom)"),
            Matcher("oomkilled", any_level=True),
        ),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
    Kind(
        "task-limit-reached",
        "capacity",
        "The service may not create as many threads or processes as its libraries want.",
        "Set TasksMax=infinity and LimitNPROC=infinity in vllm_server_unit_dropin (in a container --pids-limit).",
        (
            Matcher("pthread_create", r"pthread_create.{0,40}Resource temporarily unavailable"),
            Matcher("rlimit_nproc"),
            Matcher("can't start new thread"),
            Matcher(
                "fork", r"fork.{0,40}Resource temporarily unavailable|fork rejected by pids controller", any_level=True
            ),
            Matcher("thread creation failed", r"libgomp: Thread creation failed"),
            Matcher("blockingioerror: [errno 11]", hint=True),
        ),
        stage=Stage.ANY,
    ),
)
