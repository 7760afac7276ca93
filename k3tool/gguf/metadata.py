"""What llama.cpp's `kimi-k3` architecture wants to know of a model: the keys, and which models it can hold.

llama.cpp computes nonsense, without a word, where some of these are absent (gate bound, block size, gating function);
so every one is written, and a configuration that differs in what no key expresses is refused.
Sources: `src/models/kimi-k3.cpp` and `conversion/kimi_k3.py` of ggml-org/llama.cpp, checked by loading and running.
"""

from __future__ import annotations

from k3tool.config import K3Config
from k3tool.errors import UnsupportedError
from k3tool.gguf.container import Value, f32, flag, i32_list, text, u32

ARCHITECTURE = "kimi-k3"
MAX_EXPERTS = 1024
MAX_LAYERS = 512
QUANTIZATION_VERSION = 2
SIGMOID = 2
FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32, "MXFP4": 38}


def check_supported(config: K3Config) -> None:
    """Raises UnsupportedError naming the first thing that the architecture `kimi-k3` cannot express."""
    heads = f"num_attention_heads {config.num_heads}, KDA num_heads {config.kda_num_heads}"
    needs = (
        (config.is_k3, f"model_type {config.model_type} is not kimi_k3"),
        (config.num_experts > 0, "it has no routed experts"),
        (config.num_experts <= MAX_EXPERTS, f"num_experts {config.num_experts} is beyond {MAX_EXPERTS}"),
        (config.num_layers <= MAX_LAYERS, f"num_hidden_layers {config.num_layers} is beyond {MAX_LAYERS}"),
        (config.kda_num_heads == config.num_heads, f"{heads}: one number serves both"),
        (config.gate_lower_bound is not None, "no gate_lower_bound"),
        (config.full_rank_gate, "use_full_rank_gate is false"),
        (config.q_lora_rank is not None, "no q_lora_rank"),
        (config.mla_output_gate, "mla_use_output_gate is false"),
        (config.latent_size is not None, "no routed_expert_hidden_size"),
        (config.latent_norm, "latent_moe_use_norm is false"),
        (config.num_shared_experts > 0, "no shared experts"),
        (config.moe_layer_freq == 1, f"moe_layer_freq is {config.moe_layer_freq}"),
        (config.num_expert_groups == 1, f"num_expert_group is {config.num_expert_groups}"),
        (config.router_activation == "sigmoid", f"moe_router_activation_func is {config.router_activation}"),
        (config.router_bias, "the router has no e_score_correction_bias"),
        (config.activation == "situ", f"hidden_act is {config.activation}"),
        (config.situ_linear_beta > 0, f"activation_situ_linear_beta is {config.situ_linear_beta}"),
        (config.attn_res_block_size is not None, "no attn_res_block_size"),
        (not config.tie_word_embeddings, "tie_word_embeddings is true"),
    )
    for holds, why in needs:
        if not holds:
            raise UnsupportedError(
                f"llama.cpp's architecture {ARCHITECTURE} cannot hold this model: {why}",
                hint="write safetensors instead (--format safetensors)",
            )


def model_keys(config: K3Config, name: str, file_type: str, quantized: bool) -> list[tuple[str, Value]]:
    """General keys and those of the architecture, in the order in which they are written.

    file_type: the ggml type that most values have; llama.cpp shows it and depends on nothing of it.
    """
    assert config.gate_lower_bound is not None and config.q_lora_rank and config.latent_size
    assert config.attn_res_block_size
    keys = [
        ("general.architecture", text(ARCHITECTURE)),
        ("general.type", text("model")),
        ("general.name", text(name)),
        ("general.file_type", u32(FILE_TYPES[file_type])),
    ]
    if quantized:
        keys.append(("general.quantization_version", u32(QUANTIZATION_VERSION)))
    # One for MLA, none for KDA: nothing else tells llama.cpp which kind a layer is.
    kinds = [1 if kind == "mla" else 0 for kind in config.layer_kinds]
    architecture = {
        "block_count": u32(config.num_layers),
        "context_length": u32(config.max_positions),
        "embedding_length": u32(config.hidden_size),
        "feed_forward_length": u32(config.intermediate_size),
        "vocab_size": u32(config.vocab_size),
        "attention.head_count": u32(config.num_heads),
        "attention.head_count_kv": i32_list(kinds),
        "attention.layer_norm_rms_epsilon": f32(config.rms_norm_eps),
        "attention.q_lora_rank": u32(config.q_lora_rank),
        "attention.kv_lora_rank": u32(config.kv_lora_rank),
        "attention.key_length": u32(config.mla_cache_width),
        "attention.value_length": u32(config.kv_lora_rank),
        "attention.key_length_mla": u32(config.qk_nope_head_dim + config.qk_rope_head_dim),
        "attention.value_length_mla": u32(config.v_head_dim),
        "rope.dimension_count": u32(config.qk_rope_head_dim),
        "ssm.conv_kernel": u32(config.conv_kernel_size),
        "kda.head_dim": u32(config.kda_head_dim),
        "kda.gate_lower_bound": f32(config.gate_lower_bound),
        "expert_count": u32(config.num_experts),
        "expert_used_count": u32(config.experts_per_token),
        "expert_shared_count": u32(config.num_shared_experts),
        "expert_feed_forward_length": u32(config.moe_intermediate_size),
        "expert_latent_length": u32(config.latent_size),
        "expert_gating_func": u32(SIGMOID),
        "expert_weights_norm": flag(config.renormalize),
        "expert_weights_scale": f32(config.routed_scaling_factor),
        "leading_dense_block_count": u32(config.first_k_dense),
        "attn_res.block_size": u32(config.attn_res_block_size),
        "activation.situ_beta": f32(config.situ_beta),
        "activation.situ_linear_beta": f32(config.situ_linear_beta),
    }
    return keys + [(f"{ARCHITECTURE}.{key}", value) for key, value in architecture.items()]
