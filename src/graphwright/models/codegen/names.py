"""Names in generated source: unique identifiers, attribute access, and keys under which torch modules hold weights."""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterable, Mapping, Sequence
from keyword import iskeyword, kwlist

from graphwright.models.codegen.templates import CLASSES, HELPERS
from graphwright.models.errors import ExportLevelImpossible

_RESERVED = frozenset(
    {*dir(builtins), *kwlist, *HELPERS, *CLASSES}
    | {"torch", "F", "nn", "model", "self", "run", "i", "l", "O", "I", "CONSTS", "Run", "MODULES", "PARAMETERS"}
)
_ATTRIBUTES = {
    "module": (
        "T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double "
        "dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter get_submodule "
        "gradient_checkpointing half ipu load_state_dict modules mtia named_buffers named_children named_modules "
        "named_parameters number parameters register_backward_hook register_buffer register_forward_hook "
        "register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook "
        "register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter "
        "register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule "
        "share_memory smart_apply state_dict to to_empty train training type xpu zero_grad"
    ),
    "root": (
        "activation_checkpointing_disable activation_checkpointing_enable active_adapters add_adapter "
        "add_model_tags adjust_generation_fn all_tied_weights_keys barrier_after_gathered_checkpoint_save "
        "base_model base_model_prefix can_generate can_record_outputs compute_transition_scores config config_class "
        "continuous_batching_context_manager create_masks_for_generate delete_adapter dequantize "
        "destroy_cached_continuous_batching_manager device disable_adapters disable_input_require_grads dtype "
        "dummy_inputs enable_adapters enable_input_require_grads enable_peft_hotswap ep_plan features "
        "from_pretrained fsdp_plan fsdp_size gather_sharded_state_dict_for_save generate generate_batch "
        "generation_config generation_config_class get_adapter_state_dict get_compiled_call "
        "get_correct_attn_implementation get_correct_experts_implementation get_decoder get_encoder "
        "get_expanded_tied_weights_keys get_experts_implementation get_init_context get_input_embeddings "
        "get_memory_footprint get_output_embeddings get_parameter_or_buffer get_position_embeddings "
        "gradient_checkpointing_disable gradient_checkpointing_enable heal_tokens init_continuous_batching "
        "init_parallel_plans init_weights initialize_weights input_modalities is_activation_checkpointing "
        "is_backend_compatible is_custom_code is_distributed_loading_by_transformers is_gradient_checkpointing "
        "is_remote_code kernel_config load_adapter load_custom_generate loss_function loss_type main_input_name "
        "mark_tied_weights_as_initialized maybe_distribute_model model_tags name_or_path "
        "named_non_persistent_buffers num_parameters output_modalities post_init pp_plan prepare_distribute_model "
        "prepare_inputs_for_generation push_to_hub register_for_auto_class resize_position_embeddings "
        "resize_token_embeddings retrieve_modules_from_names save_distributed_checkpoint save_pretrained "
        "set_adapter set_attn_implementation set_decoder set_encoder set_experts_implementation "
        "set_input_embeddings set_output_embeddings set_use_kernels should_save_on_this_rank "
        "supports_context_parallel supports_gradient_checkpointing supports_pp_plan supports_tp_plan tie_weights "
        "tp_plan tp_size use_kernels warn_if_padding_and_no_attention_mask warnings_issued"
    ),
}
MODULE, ROOT = (frozenset(names.split()) for names in _ATTRIBUTES.values())
"""Attributes of torch modules and generated layers, and further ones of the generated model: submodules and parameters
cannot have these names."""
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Names:
    """Assigns unique identifiers within a scope, e.g. a function."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED, *taken}

    def take(self, wanted: str) -> str:
        """Return `wanted` as an identifier, with a number appended if it is taken."""
        base = re.sub(r"[^A-Za-z0-9_]", "_", wanted)[:40].strip("_") or "value"
        base = f"n{base}" if base[0].isdigit() else base
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def check_keys(keys: Mapping[str, str]) -> None:
    """Check that torch modules can hold weights under these keys (key -> param path). Raises: ExportLevelImpossible."""
    for key, path in keys.items():
        parts, what = key.split("."), ""
        if not _KEY.fullmatch(key):
            what = "a torch module cannot hold a weight under this key"
        elif any(".".join(parts[:end]) in keys for end in range(1, len(parts))):
            what = "this key and a prefix of it both name weights"
        elif parts[0] in ROOT or any(part in MODULE or part.startswith("_") for part in parts):
            what = "a segment of this key is an attribute of a torch module"
        if what:
            fix = "e.rename(node, name, key='a.dotted.key') gives the weight a different key"
            raise ExportLevelImpossible(what, where=path, got=key, fix=fix)


def attributes(start: str, parts: Sequence[str]) -> str | None:
    """Return the attribute access `start.a.b`; None if a part is not an identifier."""
    return ".".join((start, *parts)) if all(p.isidentifier() and not iskeyword(p) for p in parts) else None
