"""Kinds of failure that come from the host's build tools, drivers and installed versions."""

from __future__ import annotations

from .failure_kinds import ANY_OTHER, Kind, Matcher, Stage

_COMPILER = r"(?:gcc|g\+\+|cc|c\+\+|clang(?:\+\+)?|x86_64-linux-gnu-g(?:cc|\+\+)|aarch64-linux-gnu-g(?:cc|\+\+))"
_CUDA_LIBRARY = (
    r"lib(?:cudart|cublas|cublasLt|cudnn|cusparse|cusparseLt|cusolver|nvrtc|cufft|curand|nccl|nvJitLink|cupti"
    r"|nvToolsExt|cufile|nvshmem)[-\w]{0,60}\.so[.\d]{0,20}"
)
_TORCH_LIBRARY = r"lib(?:torch|c10)\w{0,60}\.so[.\d]{0,20}"

BUILD = (
    Kind(
        "c-compiler-missing",
        "build-env",
        "Triton and torch's compiler build small C helpers when a kernel first runs, and no working C compiler is "
        "on the service's PATH.",
        "Install gcc on the host (Debian and Ubuntu: build-essential) and keep /usr/bin in PATH, or name the "
        "compiler with vllm_server_environment: {CC: /usr/bin/gcc}.",
        (
            Matcher("failed to find c compiler"),
            Matcher("no such file or directory: '", rf"No such file or directory: '(?:[\w/.-]*/)?{_COMPILER}'"),
            Matcher("not found", rf"(?:sh: )(?:line )?\d+: (?:[\w/.-]*/)?{_COMPILER}: not found"),
            Matcher("command not found", rf"\b{_COMPILER}: command not found"),
            Matcher("cannot execute", r"cannot execute '?cc1(?:plus)?'?"),
            Matcher("compiler", r"Invalid(?:Cxx|Cpp)Compiler|No working C\+\+ compiler found"),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "python-headers-missing",
        "build-env",
        "A C compiler is there, but the headers of the Python that runs vLLM are not installed.",
        "Install the development package of the venv's Python (for Python 3.12: python3.12-dev).",
        (
            Matcher("python.h", r"Python\.h['\"]?:? (?:No such file|file not found)"),
            Matcher("python.h", r"(?:cannot open source file|cannot find) .?Python\.h"),
            Matcher("pyconfig.h", r"pyconfig\.h: No such file"),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "nvcc-missing",
        "build-env",
        "A kernel is to be compiled at start-up and the CUDA compiler nvcc is not where it is looked for.",
        "Install the CUDA toolkit's nvcc and set vllm_server_environment: {CUDA_HOME: /usr/local/cuda}; to stay "
        'without a toolkit set vllm_server_environment: {VLLM_USE_FLASHINFER_SAMPLER: "0"}.',
        (
            Matcher("nvcc", r"No such file or directory: '(?!:)[\w/.-]*nvcc'"),
            Matcher("nvcc", r"(?:sh: )?(?:line )?\d+: (?:/[\w/.-]*/)?nvcc: (?:not found|No such file)"),
            Matcher("nvcc: command not found"),
            Matcher("could not find nvcc"),
            Matcher("cuda_home", r"(?:Could not find CUDA installation|CUDA_HOME environment variable is not set)"),
            Matcher("cuda_home", r"cuda_home='[^']*' (?:doesn't|does not) exist"),
        ),
        yields_to=("cuda-home-malformed",),
        stage=Stage.ANY,
    ),
    Kind(
        "cuda-home-malformed",
        "build-env",
        "CUDA_HOME holds a list joined by colons where one directory is expected, so the path to the compiler "
        "begins or breaks at a colon.",
        "Set vllm_server_environment: {CUDA_HOME: /usr/local/cuda} (one directory, no colon), empty the "
        "flashinfer cache of the service and start again.",
        (
            Matcher("sh: ", r"\bsh: (?:line )?\d+: (?:/[^\s:'\"]{0,200})?:/"),
            Matcher("no such file", r"No such file or directory: '(?:/[^\s:'\"]{0,200})?:/[^\s'\"]{1,200}'"),
            Matcher("/bin/nvcc", r"(?:^|[\s'\"\]])(?:/[^\s:'\"]{1,200})?:/[^\s:'\"]{1,200}/bin/nvcc\b", hint=True),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "ninja-not-on-path",
        "build-env",
        "Kernels are built with ninja; the venv has it, but the venv's bin directory is not on the service's PATH.",
        "Remove PATH from vllm_server_environment: firstlight puts the venv's bin directory first. Elsewhere "
        "put it first in the unit's PATH.",
        (
            Matcher("ninja'", r"No such file or directory: '[\w/.-]*ninja'"),
            Matcher("ninja: ", r"\bninja: (?:not found|command not found)"),
            Matcher("ninja is required to load c++ extensions"),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "cuda-headers-missing",
        "build-env",
        "nvcc runs, but the CUDA development headers that the kernel's source includes are not installed.",
        "Install the development packages of the CUDA version in use (for CUDA 13.0: cuda-toolkit-13-0, or only "
        "the missing one, such as libcurand-dev-13-0).",
        (
            Matcher(
                "no such file or directory",
                r"\b(?:(?:cu|nv)\w{0,80}|(?:cub|thrust|crt|cuda|nv)/[\w/.-]{1,120}|nccl)\.(?:h|hpp|cuh): No such file",
            ),
            Matcher("no such file or directory", r"fatal error: (?:cuda|cub|thrust|nv)/\S{1,200}: No such file"),
            Matcher("cannot open source file", r"cannot open source file .?(?:cu|nv|cub/|thrust/)"),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "flashinfer-jit-failed",
        "build-env",
        "FlashInfer could not build one of its kernels at run time, and the compiler's own complaint is not in "
        "the log.",
        "Install the flashinfer-jit-cache wheel of exactly the installed flashinfer version, or set "
        'vllm_server_environment: {VLLM_USE_FLASHINFER_SAMPLER: "0"}.',
        (
            Matcher("ninja: build stopped: subcommand failed"),
            Matcher("/cached_ops/"),
            Matcher("ninja build failed"),
        ),
        yields_to=(ANY_OTHER,),
        stage=Stage.ANY,
    ),
    Kind(
        "ptxas-too-old",
        "build-env",
        "The assembler (ptxas) that Triton brings is older than this GPU and does not know its architecture.",
        "Set vllm_server_environment: {TRITON_PTXAS_PATH: /usr/local/cuda/bin/ptxas}, with a CUDA toolkit that "
        "knows the GPU (13.0 or newer for sm_110 and sm_121).",
        (
            Matcher("is not defined for option 'gpu-name'", any_level=True),
            Matcher("internal triton ptx codegen error"),
            Matcher("ptxas fatal", r"ptxas fatal\s*:.*(?:gpu-name|Unsupported \.version|sm_\d+)"),
        ),
        yields_to=("fp8-kv-unsupported",),
        stage=Stage.ANY,
    ),
    Kind(
        "nvidia-driver-not-visible",
        "build-env",
        "The process sees neither the NVIDIA driver's library nor its device nodes, so no GPU is found.",
        "Make nvidia-smi work for the service user: install the driver, load nvidia and nvidia-uvm before the unit "
        "starts, and keep the device families allowed in the unit (a container needs the NVIDIA runtime).",
        (
            Matcher("libcuda.so", r"libcuda\.so[.\d]*: cannot open shared object"),
            Matcher("libnvidia-ml.so", r"libnvidia-ml\.so[.\d]*: cannot open shared object"),
            Matcher("nvml shared library not found"),
            Matcher("failed to infer device type"),
            Matcher(  # a CPU build says so as well when it is stopped
                "found no nvidia driver on your system",
                apart=r"in shutdown$|worker\.shutdown\(|Application shutdown complete",
                absent=("cpu_model_runner", "cpu_worker", "+cpu"),
            ),
            Matcher("no cuda-capable device is detected"),
            Matcher("cuda_error_no_device"),
            Matcher("no cuda gpus are available"),
            Matcher("couldn't communicate with the nvidia driver"),
            Matcher("nvml", r"NVML: Driver Not Loaded|Can't initialize NVML"),
            Matcher("/dev/nvidia", r"(?:Permission denied|No such file).{0,40}/dev/nvidia|/dev/nvidia\w*: Permission"),
        ),
        yields_to=("cuda-driver-too-old", "driver-module-mismatch", "cpu-build-unsupported"),
    ),
)

VERSION = (
    Kind(
        "cuda-driver-too-old",
        "version",
        "The installed torch is built for a newer CUDA than the host's NVIDIA driver supports.",
        "Upgrade the NVIDIA driver to 580 or newer and reboot, or install the build for the CUDA that the driver "
        "supports (vllm_install_index_url with a +cu129 wheel).",
        (
            Matcher("nvidia driver on your system is too old", any_level=True),
            Matcher("cuda driver version is insufficient for cuda runtime version", any_level=True),
            Matcher("cudaerrorinsufficientdriver"),
            Matcher("provided ptx was compiled with an unsupported toolchain"),
            Matcher("forward compatibility was attempted on non supported hw", any_level=True),
        ),
        yields_to=("driver-module-mismatch",),
    ),
    Kind(
        "driver-module-mismatch",
        "version",
        "The NVIDIA driver's packages were updated while the older kernel module is still loaded.",
        "Reboot the host, or stop everything on the GPUs and reload the nvidia kernel modules.",
        (
            Matcher("nvml/rm version mismatch", any_level=True),
            Matcher("driver/library version mismatch", any_level=True),
            Matcher("nvrm: api mismatch", any_level=True),
            Matcher("unsupported display driver / cuda driver combination", any_level=True),
        ),
    ),
    Kind(
        "torch-build-mismatch",
        "version",
        "Compiled parts of vLLM or torch belong to another torch, CUDA major version or nvidia library than those "
        "in the venv.",
        "Remove the venv that the traceback names and run firstlight again: vllm_install makes it anew from "
        "its lock; never upgrade torch alone, nor with vllm_install_extra_packages.",
        (
            Matcher("undefined symbol", r"\.so[.\d]{0,20}: undefined symbol", never=r"(?<!vllm_)flash_attn"),
            Matcher("cannot open shared object file", rf"\b{_CUDA_LIBRARY}: cannot open shared object"),
            Matcher(
                "cannot open shared object file",
                rf"\b{_TORCH_LIBRARY}: cannot open shared object",
            ),
            Matcher(
                ".so",
                rf"(?:{_CUDA_LIBRARY}|{_TORCH_LIBRARY}): version .{{1,40}} not (?:found|defined)",
            ),
            Matcher("_opnamespace", r"'_OpNamespace' '_(?:C|moe_C|vllm_\w+)\w*' object has no attribute"),
            Matcher("operator torchvision::nms does not exist"),
            Matcher("compiled with different cuda major versions"),
            Matcher("cudnn version incompatibility"),
        ),
        yields_to=("flash-attn-wheel-abi", "flash-attn-4-only", "nvidia-driver-not-visible"),
    ),
    Kind(
        "flash-attn-wheel-abi",
        "version",
        "A flash-attn wheel that was built for another torch is installed and breaks whatever imports it.",
        "Rebuild or remove flash-attn in the venv (vllm_install_flash_attn: none lets vLLM use its own kernels).",
        (
            Matcher("flash_attn", r"flash_attn_\w{0,20}cuda[\w.-]{0,120}\.so"),
            Matcher("flash_attn_2_cuda"),
            Matcher("flash_attn_interface import", r"(?<!vllm_)flash_attn\.flash_attn_interface import"),
            Matcher("undefined symbol", r"/flash_attn[\w/.-]{0,200}\.so[\w.]{0,20}: undefined symbol"),
        ),
        yields_to=("flash-attn-4-only",),
    ),
    Kind(
        "flash-attn-4-only",
        "version",
        "Only flash-attn-4, or an empty flash_attn directory that it left behind, is importable; it lacks the part "
        "that vLLM before 0.24 imports.",
        "Install flash-attn<3 beside flash-attn-4, in that order (the default of vllm_install), or remove "
        "flash-attn-4 and the site-packages/flash_attn directory that it leaves.",
        (
            Matcher("flash_attn", r"No module named '?flash_attn\.(?:ops|flash_attn_interface|bert_padding|layers)"),
            Matcher("flash_attn", r"cannot import name '\w+' from '?flash_attn'?\b"),
            Matcher("flash_attn", r"module '?flash_attn'? has no attribute"),
        ),
    ),
    Kind(
        "gpu-arch-not-in-wheel",
        "version",
        "The installed wheels hold no machine code for this GPU's compute capability.",
        "Install a vLLM and torch build that lists the GPU (vllm_install_version; sm_120 needs CUDA 12.8 builds of "
        "vLLM 0.10 or later, or a CUDA 13 wheel).",
        (
            Matcher("no kernel image is available for execution on the device"),
            Matcher("cudaerrornokernelimagefordevice"),
            Matcher("device kernel image is invalid"),
            Matcher("is not compatible with the current pytorch installation", hint=True, any_level=True),
            Matcher("arch conditional mma instruction used without targeting", hint=True, any_level=True),
        ),
        yields_to=("gpu-too-old",),
        stage=Stage.ANY,
    ),
    Kind(
        "gpu-too-old",
        "version",
        "The GPU's compute capability is below the lowest that vLLM or its compiler supports at all.",
        "Move the service to a GPU of compute capability 7.5 or higher; no setting helps.",
        (
            Matcher("compute capability", r"compute capability (?:below|lower than|less than) \d+\.\d+ (?:is|are) not"),
            Matcher("too old to be supported by", r"too old to be supported by the triton"),
            Matcher("no longer supports this gpu because it is too old", any_level=True),
        ),
    ),
    Kind(
        "model-too-new",
        "version",
        "The checkpoint names a model type, architecture or tokenizer format that the installed vLLM, transformers "
        "or tokenizers does not know.",
        "Install a vLLM that knows the model (vllm_install_version), together with the transformers and tokenizers "
        "of its lock; if the name in config.json is a typing error, correct it there.",
        (
            Matcher("but transformers does not recognize this architecture"),
            Matcher('config_mapping[config_dict["model_type"]]'),
            Matcher("did not match any variant of untagged enum"),
            Matcher("are not supported for now"),
            Matcher("has no vllm implementation and the transformers implementation is not compatible"),
            Matcher("tokenizer class", r"Tokenizer class \S+ does not exist or is not currently imported"),
            Matcher("keyerror: '", r"KeyError: '[\w.-]+'", near=r"configuration_auto|CONFIG_MAPPING", hint=True),
            Matcher("rope_scaling", r"`?rope_scaling`? must be a dictionary with", hint=True),
            Matcher("should have a `model_type` key", hint=True),
        ),
        yields_to=("drafter-arch-unsupported", "flash-attn-wheel-abi", "flash-attn-4-only", "model-json-broken"),
    ),
    Kind(
        "cpu-build-unsupported",
        "version",
        "This CPU build of vLLM lacks a kernel that the configuration needs (speculation, gated-delta layers or "
        "their prefix cache).",
        "On a CPU build leave out the feature whose frames stand above the error (no drafter, or "
        "vllm_server_extra_args: {no-enable-prefix-caching: true} for a hybrid model), or install a newer CPU build.",
        (
            Matcher("unexpected keyword argument 'synthetic_mode'"),
            Matcher("unexpected keyword argument", r"\w+_kernel_impl\(\) got an unexpected keyword argument"),
            Matcher(
                "too many values to unpack (expected 2)", near=r"cpu_model_runner|cpu_worker|dispatch_cpu|cpu_\w+\.py"
            ),
            Matcher("'function' object is not subscriptable", near=r"\[grid\]|kernel|cpu_|mamba"),
            Matcher("'function' object is not subscriptable", hint=True),
            Matcher("backend", r"Could not run '[\w:.]+' with arguments from the 'CPU' backend"),
            Matcher("speculative", r"Speculative \w+ is not (?:yet )?supported (?:on|for|with) (?:the )?CPU"),
        ),
        stage=Stage.ANY,
    ),
)
