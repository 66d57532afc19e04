"""Test-only vLLM plugin: what the CPU backend of vLLM 0.20.1 lacks for speculative decoding with DFlash.

Scheduler, API server, drafter model, attention kernels, acceptance and metrics stay vLLM's own. Each function below
mends one gap of that release's CPU path; ``VLLM_CPU_SPEC_TEST=none`` leaves vLLM as it is. The tapped layers are
handed on as vLLM's GPU runner does it, its off-by-one included, so that a wrong drafter configuration shows here too.
"""
# ruff: noqa: N803, PLC0415 -- Triton kernels name their parameters so; vLLM may only be imported once it calls us

import itertools
import multiprocessing
import os


def register():
    """Entry point of ``vllm.general_plugins``: called in every process of the server."""
    from vllm.platforms import current_platform

    if os.environ.get("VLLM_CPU_SPEC_TEST") == "none" or not current_platform.is_cpu():
        return
    tolerate_missing_accelerator()
    adapt_rejection_kernels()
    # The rest touches the model runner, whose import costs seconds and which only the workers need.
    if multiprocessing.current_process().name.startswith("VllmWorker"):
        add_dflash_input_kernel()
        add_kv_cache_update()
        keep_drafter_weights()
        hand_on_tapped_layers()


def tolerate_missing_accelerator():
    """Shutdown synchronises an accelerator, which raises where there is none."""
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.synchronize = lambda *_args, **_kwargs: None


def adapt_rejection_kernels():
    """The rejection sampler passes SYNTHETIC_MODE and its tensors; the CPU kernels know neither."""
    import vllm.utils.cpu_triton_utils as cpu

    def without_synthetic(kernel, tensors):
        def run(*args, SYNTHETIC_MODE=False, **kwargs):
            if SYNTHETIC_MODE:
                raise NotImplementedError("synthetic rejection sampling on CPU")
            return kernel(*args[:tensors], **kwargs)

        return cpu._FuncWrapper(run)

    cpu.rejection_greedy_sample_kernel = without_synthetic(cpu._rejection_greedy_sample_kernel_impl, 7)
    cpu.rejection_random_sample_kernel = without_synthetic(cpu._rejection_random_sample_kernel_impl, 11)


def add_dflash_input_kernel():
    """The kernel that lays out a draft's inputs exists for Triton only."""
    import vllm.utils.cpu_triton_utils as cpu
    from vllm.v1.spec_decode import dflash

    class LaunchSizes:
        """Stands in for triton, which is asked for launch sizes that a CPU kernel ignores."""

        next_power_of_2 = staticmethod(lambda n: 1 << max(n - 1, 0).bit_length())
        cdiv = staticmethod(lambda a, b: -(-a // b))

    dflash.copy_and_expand_dflash_inputs_kernel = cpu._FuncWrapper(dflash_inputs)
    dflash.triton = LaunchSizes


def dflash_inputs(
    *,
    next_token_ids_ptr,
    target_positions_ptr,
    out_input_ids_ptr,
    out_context_positions_ptr,
    out_query_positions_ptr,
    out_context_slot_mapping_ptr,
    out_query_slot_mapping_ptr,
    out_token_indices_ptr,
    block_table_ptr,
    block_table_stride,
    query_start_loc_ptr,
    num_rejected_tokens_ptr,
    parallel_drafting_token_id,
    block_size,
    num_query_per_req,
    num_speculative_tokens,
    total_input_tokens,
    BLOCK_SIZE,
    HAS_NUM_REJECTED=False,
):
    """For each request: positions and cache slots of its context, then of the anchor token and the masks after it."""
    import torch

    starts = query_start_loc_ptr.tolist()
    last_block = block_table_ptr.shape[1] - 1
    width = num_query_per_req

    def slots(request, positions):
        block = block_table_ptr[request].long()[(positions // block_size).clamp(max=last_block)]
        return block * block_size + positions % block_size

    for request, (begin, end) in enumerate(itertools.pairwise(starts)):
        context = target_positions_ptr[begin:end].long()
        out_context_positions_ptr[begin:end] = context
        out_context_slot_mapping_ptr[begin:end] = slots(request, context)

        rejected = int(num_rejected_tokens_ptr[request]) if HAS_NUM_REJECTED else 0
        query = int(target_positions_ptr[end - rejected - 1]) + 1 + torch.arange(width)
        first, after = request * width, (request + 1) * width
        out_query_positions_ptr[first:after] = query
        out_query_slot_mapping_ptr[first:after] = slots(request, query)
        out_input_ids_ptr[first] = next_token_ids_ptr[request]
        out_input_ids_ptr[first + 1 : after] = parallel_drafting_token_id

        drafted = num_speculative_tokens
        indices = torch.arange(first + 1, first + 1 + drafted)
        out_token_indices_ptr[request * drafted : (request + 1) * drafted] = indices


def add_kv_cache_update():
    """The drafter writes its context into the cache by a call that the CPU attention lacks."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    def do_kv_cache_update(_self, _layer, key, value, kv_cache, slot_mapping):
        key_cache, value_cache = kv_cache.unbind(0)
        isa = cpu_attn._get_attn_isa(key.dtype, key_cache.shape[2], key_cache.shape[3])
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, isa)

    cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update = do_kv_cache_update


def keep_drafter_weights():
    """CPU linear layers drop their weight once it is packed; the drafter's attention still reads qkv_proj.weight."""
    from vllm.model_executor.layers import utils as layer_utils
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Attention

    dispatch, original = layer_utils.dispatch_cpu_unquantized_gemm, DFlashQwen3Attention.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.qkv_proj.keep_weight = True

    def keep(layer, remove_weight):
        return dispatch(layer, remove_weight and not getattr(layer, "keep_weight", False))

    DFlashQwen3Attention.__init__ = init
    layer_utils.dispatch_cpu_unquantized_gemm = keep


def hand_on_tapped_layers():
    """The CPU runner never tells the target which hidden states the drafter reads."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original = CPUModelRunner.load_model

    def load_model(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if not self.use_aux_hidden_state_outputs:
            return
        layers = self._get_eagle3_aux_layers_from_config()
        layers = layers or self.model.get_eagle3_default_aux_hidden_state_layers()
        self.model.set_aux_hidden_state_layers(layers)
        print(f"vllm_cpu_spec_test: aux hidden state layers {tuple(layers)}", flush=True)

    CPUModelRunner.load_model = load_model
