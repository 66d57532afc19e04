"""Kinds of failure that come from model files, permissions and the drafter."""

from __future__ import annotations

from .failure_kinds import Effect, Kind, Matcher, Stage

_MODEL_JSON = (
    r"config\.json|tokenizer|from_pretrained|get_config|_dict_from_json_file|\.index\.json|speculators"
    r"|transformers/|generation_config|load_vocab|preprocessor"
)
_QUOTED = r"(?:PosixPath\()?['\"]"
_DENIALS = ("permission denied: ", "read-only file system: ", "no such file or directory: ")
_DENIED = rf"(?:Permission denied|Read-only file system|No such file or directory): {_QUOTED}"
_DRAFTING = r"drafter|dflash|spec_decode|speculat|eagle|_build_context_kv|DraftModel"

FILES = (
    Kind(
        "model-dir-invalid",
        "files",
        "The path given for the target or the drafter does not exist, cannot be read, or holds no config.json.",
        "Check that model_path (or drafter_path) is absolute, readable by the service user and contains "
        "config.json; a path below /home or /root needs vllm_server_readable_paths.",
        (
            Matcher("invalid repository id or local directory specified"),
            Matcher("repo id must be in the form"),
            Matcher("no config file found"),
            Matcher("is not a local folder and is not a valid model identifier"),
            Matcher("repository not found for url"),
            Matcher("does not appear to have a file named config.json"),
            Matcher("config.json", r"(?:No such file or directory|Entry Not Found|not found).{0,200}/config\.json"),
            Matcher(
                "permission denied: '",
                r"Permission denied: '(?!\S{0,300}(?:cache|/\.))[^']{0,300}/"
                r"(?:[\w.-]{0,60}config\.json|tokenizer[\w.]{0,40}|[\w.-]{1,100}\.safetensors)'",
            ),
            Matcher("is not a valid git identifier"),
            Matcher("can't load the configuration of", hint=True),
        ),
        yields_to=("gated-repo", "hub-unreachable", "home-unset"),
    ),
    Kind(
        "model-json-broken",
        "files",
        "A JSON file of the model directory (config, index or tokenizer) is cut off or damaged.",
        "Fetch the named JSON file again from the hub at the same revision (model_revision).",
        (
            Matcher("is not a valid json file"),
            Matcher("jsondecodeerror", near=_MODEL_JSON),
            Matcher("jsondecodeerror", hint=True),
            Matcher(
                " at line ",
                r"(?:EOF while parsing|expected value|expected `.{1,12}`|key must be a string|trailing characters)"
                r".{0,60} at line \d+ column \d+",
                near=r"tokenizer|TokenizerFast|from_file",
            ),
        ),
        yields_to=("json-argument-mangled",),
    ),
    Kind(
        "weights-missing",
        "files",
        "The directory has a config but no weight files.",
        "Put the *.safetensors files of the target or the drafter into the directory that the message names.",
        (
            Matcher("cannot find any model weights with"),
            Matcher("no file named", r"no file named (?:pytorch_model\.bin|model\.safetensors)"),
        ),
        yields_to=("gated-repo", "hub-unreachable"),
    ),
    Kind(
        "truncated-weights",
        "files",
        "A weight file is shorter than its header says, so a download or copy stopped half-way.",
        "Compare size and sha256 with the hub, delete the short file and place it again (a new run does).",
        (
            Matcher("metadataincompletebuffer"),
            Matcher("incomplete metadata, file not fully covered"),
            Matcher("header", r"InvalidHeaderLength|invalid header length|HeaderTooSmall|header too small"),
            Matcher("pytorchstreamreader failed"),
            Matcher("consistency check failed: file should be of size"),
            Matcher("the file might be corrupted", r"unexpected EOF, expected \d+ more bytes"),
        ),
        yields_to=("disk-full", "lfs-pointer"),
    ),
    Kind(
        "lfs-pointer",
        "files",
        "The weight file is the small text that git-lfs leaves in place of the data.",
        "Run git lfs pull in the directory, or let firstlight fetch the weights (model_repo, drafter_repo).",
        (
            Matcher("headertoolarge"),
            Matcher("header too large"),
            Matcher("git-lfs.github.com/spec", any_level=True),
        ),
    ),
    Kind(
        "weights-config-mismatch",
        "files",
        "config.json describes other tensor shapes or names than the weight files contain.",
        "Take config.json and weights from the same repository revision, for the drafter as for the target.",
        (
            Matcher("tried to load weights of size"),
            Matcher("attempted to load weight (torch.size"),
            Matcher("must match the size of tensor b"),
            Matcher("weights were not initialized from checkpoint"),
            Matcher("there is no module or parameter named"),
            Matcher("size mismatch for", r"size mismatch for [\w.]+"),
            Matcher("mat1 and mat2 shapes cannot be multiplied"),
            Matcher(
                "keyerror: '",
                r"KeyError: '[\w.]{0,120}(?:layers|embed_tokens|lm_head|norm|proj|experts)[\w.]{0,120}"
                r"(?:weight|bias|scale)\w{0,40}'",
            ),
        ),
        yields_to=("drafter-config-incomplete", "truncated-weights"),
        stage=Stage.ANY,
    ),
    Kind(
        "tokenizer-files-missing",
        "files",
        "The model directory lacks its tokenizer files: the server starts, but every prompt turns into nothing and "
        "is refused.",
        "Copy tokenizer.json and tokenizer_config.json of the same model into the directory of the target and restart.",
        (
            Matcher(
                "the decoder prompt cannot be empty",
                any_level=True,
                absent=('/completions http/1.1" 200',),
            ),
        ),
        stage=Stage.ANY,
        effect=Effect.SPARES,
    ),
)

PERMISSION = (
    Kind(
        "cache-dir-not-writable",
        "permission",
        "A cache directory that vLLM, Triton or the hub library wants to use is absent or belongs to another user.",
        "Give the named directory to the service user (vllm_server_user), or point HF_HOME elsewhere in "
        "vllm_server_environment if it is the hub's; firstlight keeps all other caches in /var/cache/<unit>.",
        (
            Matcher(
                "permission denied: ", rf"\[(?:Errno|error) 13\] Permission denied: {_QUOTED}/", never=r"['\"]/dev/"
            ),
            Matcher("cache directory not found"),
            Matcher("read-only file system: ", rf"Read-only file system: {_QUOTED}/"),
            Matcher("permission denied (os error 13)"),
            Matcher("not writable", r"(?:cache|directory)\b.{0,80} (?:is )?not writable"),
        ),
        yields_to=("home-unset", "rocm-device-denied", "model-dir-invalid", "nvidia-driver-not-visible"),
        stage=Stage.ANY,
    ),
    Kind(
        "home-unset",
        "permission",
        "The service user has no home directory, so caches are looked for directly under the root directory.",
        "Set vllm_server_environment: {HOME: /var/lib/vllm, XDG_CACHE_HOME: /var/cache/vllm} with directories that "
        "the service user owns.",
        (
            *(Matcher(words, rf"{_DENIED}/(?:\.\w|nonexistent)") for words in _DENIALS),
            Matcher("cannot create directory", r"cannot create directory .?/(?:\.\w|nonexistent)"),
            Matcher("could not determine home directory"),
            Matcher("getpwuid(): uid not found", hint=True),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "rocm-device-denied",
        "permission",
        "The service user may not open the device nodes of the AMD GPU.",
        "Put the service user into the groups render and video and allow /dev/kfd and /dev/dri in the unit.",
        (
            Matcher("missing the following required groups", r"required groups: .*(?:render|video)", any_level=True),
            Matcher("unable to open /dev/kfd", any_level=True),
            Matcher("/dev/kfd", r"(?:Permission denied|denied).{0,40}/dev/kfd|/dev/kfd.{0,60}(?:denied|not permitted)"),
            Matcher("/dev/dri/", r"/dev/dri/\S+ Permission denied"),
        ),
    ),
)

DRAFTER = (
    Kind(
        "drafter-arch-unsupported",
        "drafter",
        "The drafter's architecture is not registered in this vLLM release.",
        "Install the release that registers it (vllm_install_version; DFlash2DraftModel needs 0.28.0), or serve a "
        "plain DFlashDraftModel drafter.",
        (
            Matcher(
                "are not supported for now",
                r"\['[^\]]*(?:Draft|DFlash|DSpark|Eagle|Speculator|Medusa)[^\]]*'\] are not supported for now",
            ),
        ),
    ),
    Kind(
        "drafter-mixed-attention",
        "drafter",
        "The drafter's layers do not share one cache group, which the model runner in use wants: it mixes "
        "sliding-window and full attention, or its layers look like the target's own and were divided with these.",
        'Set vllm_server_environment: {VLLM_USE_V2_MODEL_RUNNER: "1"} on vLLM 0.26 or newer, or use a drafter whose '
        "layers are all of one attention type and differ from the target's in heads of keys and values or in head_dim.",
        (
            Matcher("mixed sliding/full attention require the v2 model runner"),
            Matcher("mixed sliding", r"mixed sliding.{0,40}(?:require|not supported|V2 model runner)"),
            Matcher("all drafting layers should belong to the same kv cache group"),
        ),
    ),
    Kind(
        "drafter-fa2-sm12x",
        "drafter",
        "The drafter's non-causal attention runs on a FlashAttention-2 kernel that asserts on this GPU generation.",
        "Set attention_backend to TRITON_ATTN or FLASHINFER inside speculative-config (vllm_server_extra_args; vLLM "
        "0.24 or newer), or serve without the drafter.",
        (
            Matcher("_vllm_fa2_c.varlen_fwd", near=r"device-side assert"),
            Matcher("_vllm_fa2_c.varlen_fwd", hint=True),
        ),
        yields_to=("custom-all-reduce-failed", "gpu-index-out-of-bounds", "gpu-arch-not-in-wheel"),
        stage=Stage.ANY,
        effect=Effect.KILLS,
    ),
    Kind(
        "drafter-dtype-mismatch",
        "drafter",
        "Target and drafter compute in different number formats.",
        "Set vllm_server_extra_args: {dtype: bfloat16} so that both agree.",
        (
            Matcher("expected mat1 and mat2 to have the same dtype"),
            Matcher("mat1 and mat2 must have the same dtype"),
        ),
        stage=Stage.ANY,
    ),
    Kind(
        "drafter-quantized",
        "drafter",
        "The drafter is weight-quantised, and vLLM reads a plain weight tensor from it.",
        "Place the bf16 version of the drafter (drafter_path or drafter_repo).",
        (
            Matcher("object has no attribute 'weight'", r"'\w*Linear\w*' object has no attribute 'weight'"),
            Matcher("object has no attribute 'weight'", near=_DRAFTING),
        ),
    ),
    Kind(
        "drafter-low-acceptance",
        "drafter",
        "The server runs, but nearly every drafted token is refused: the drafter sees the wrong hidden states.",
        "Correct the drafter with drafter_set: {target_layer_ids: [...], mask_token_id: ...} (before vLLM "
        "0.22 eagle_aux_hidden_state_layer_ids must be each id plus one), and start with an empty compile "
        "cache.",
        stage=Stage.SERVE,
        effect=Effect.SPARES,
    ),
    Kind(
        "drafter-fp8-attention",
        "drafter",
        "The target's checkpoint forces an FP8 cache, and the drafter's attention kernel cannot take FP8 queries.",
        "Serve a bf16 or compressed-tensors target in place of the checkpoint with the FP8 cache.",
        (Matcher("fp8 tensor core is not supported in fa2 backend"),),
        stage=Stage.ANY,
    ),
    Kind(
        "drafter-config-incomplete",
        "drafter",
        "The drafter's config.json does not say which token id marks a position to be drafted.",
        "Set drafter_set: {mask_token_id: ...} from the drafter's model card; firstlight writes it into config.json.",
        (
            Matcher("for parallel drafting, the draft model config must have"),
            Matcher("mask_token_id", r"(?:KeyError|AttributeError)\b.*\bmask_token_id"),
        ),
    ),
    Kind(
        "target-without-aux-states",
        "drafter",
        "This vLLM's implementation of the target cannot hand out the hidden states that the drafter needs.",
        "Install a release whose target class supports it (vllm_install_version), or serve without the drafter.",
        (
            Matcher("does not support eagle3 interface but aux_hidden_state_outputs was requested"),
            Matcher("aux_hidden_state", r"does not support .{0,60}aux_hidden_state"),
            Matcher("supportseagle3", r"does not (?:support|implement) .{0,40}SupportsEagle3"),
        ),
    ),
)
