"""The whole text model in float64, one token after the other, written from the formulas alone.

Independent of k3tool: it reads the raw `config.json` and the tensors by name, decodes MXFP4 itself, keeps every key
and value expanded, and has no chunk, no stack and no latent cache.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


class Twin:
    def __init__(self, folder: Path) -> None:
        document = json.loads((folder / "config.json").read_text())
        self.c = document.get("text_config", document)
        self.prefix = "language_model." if "text_config" in document else ""
        self.tied = document.get("tie_word_embeddings", False)
        self.w: dict[str, Tensor] = {}
        for path in folder.glob("model*.safetensors"):
            self.w.update(load_file(path))
        self.eps = self.c.get("rms_norm_eps", 1e-5)
        self.block = self.c.get("attn_res_block_size")
        self.numbers: dict[str, Tensor] = {}

    def __call__(self, ids: list[int]) -> tuple[Tensor, list[Tensor], dict[int, list[set[int]]]]:
        """Logits [T, vocab], the running sum after each layer [T, hidden], routed experts per layer and token."""
        layers = self.c["num_hidden_layers"]
        states: list[dict] = [{} for _ in range(layers)]
        sums: list[list[Tensor]] = [[] for _ in range(layers)]
        self.routed: dict[int, list[set[int]]] = {}
        logits = []
        for token in ids:
            prefix, blocks = self.t("model.embed_tokens.weight")[token], []
            for layer in range(layers):
                prefix, blocks = self.layer(layer, prefix, blocks, states[layer])
                sums[layer].append(prefix)
            h = self.mix(prefix, blocks, "model.output_attn_res") if self.block else prefix
            h = self.rms(h, self.t("model.norm.weight"), self.eps)
            head = "model.embed_tokens.weight" if self.tied else "lm_head.weight"
            logits.append(self.t(head) @ h)
        return torch.stack(logits), [torch.stack(rows) for rows in sums], self.routed

    def t(self, name: str) -> Tensor:
        if name not in self.numbers:
            self.numbers[name] = self.w[self.prefix + name].double()
        return self.numbers[name]

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def mix(self, prefix: Tensor, blocks: list[Tensor], site: str) -> Tensor:
        rows = [*blocks, prefix]
        query = self.t(f"{site}_norm.weight") * self.t(f"{site}_proj.weight").reshape(-1)
        scores = torch.stack([(row / torch.sqrt((row * row).mean() + self.eps) * query).sum() for row in rows])
        weights = torch.exp(scores) / torch.exp(scores).sum()
        return sum(weight * row for weight, row in zip(weights, rows, strict=True))

    def layer(self, layer: int, prefix: Tensor, blocks: list[Tensor], state: dict) -> tuple[Tensor, list[Tensor]]:
        p = f"model.layers.{layer}"
        attention = self.kda if layer + 1 in self.c["linear_attn_config"]["kda_layers"] else self.mla
        norm_in, norm_post = self.t(f"{p}.input_layernorm.weight"), self.t(f"{p}.post_attention_layernorm.weight")
        if not self.block:
            prefix = prefix + attention(f"{p}.self_attn", self.rms(prefix, norm_in, self.eps), state)
            return prefix + self.mlp(layer, self.rms(prefix, norm_post, self.eps)), []
        h = self.mix(prefix, blocks, f"{p}.self_attention_res") if blocks else prefix
        starts = layer % self.block == 0
        if starts:
            blocks = [*blocks, prefix]
        a = attention(f"{p}.self_attn", self.rms(h, norm_in, self.eps), state)
        prefix = a if starts else prefix + a
        h = self.mix(prefix, blocks, f"{p}.mlp_res")
        return prefix + self.mlp(layer, self.rms(h, norm_post, self.eps)), blocks

    def kda(self, p: str, x: Tensor, state: dict) -> Tensor:
        c = self.c["linear_attn_config"]
        heads, dim, taps = c["num_heads"], c["head_dim"], c.get("short_conv_kernel_size", 4)
        out = {}
        for stream in "qkv":
            history = state.setdefault(stream, [torch.zeros(heads * dim, dtype=torch.float64)] * (taps - 1))
            window = [*history, self.t(f"{p}.{stream}_proj.weight") @ x]
            weight = self.t(f"{p}.{stream}_conv1d.weight").reshape(heads * dim, taps)
            y = sum(weight[:, j] * window[j] for j in range(taps))
            out[stream] = (y / (1 + torch.exp(-y))).reshape(heads, dim)
            state[stream] = window[1:]
        q = out["q"] / torch.sqrt((out["q"] ** 2).sum(-1, keepdim=True) + 1e-6) * dim**-0.5
        k = out["k"] / torch.sqrt((out["k"] ** 2).sum(-1, keepdim=True) + 1e-6)
        f = self.t(f"{p}.f_b_proj.weight") @ (self.t(f"{p}.f_a_proj.weight") @ x)
        z = (f + self.t(f"{p}.dt_bias").reshape(-1)).reshape(heads, dim)
        rate = torch.exp(self.t(f"{p}.A_log").reshape(-1)[:heads])[:, None]
        bound = c.get("gate_lower_bound")
        g = -rate * torch.log1p(torch.exp(z)) if bound is None else bound * torch.sigmoid(rate * z)
        beta = torch.sigmoid(self.t(f"{p}.b_proj.weight") @ x)
        s = state.get("s", torch.zeros(heads, dim, dim, dtype=torch.float64)) * torch.exp(g)[:, :, None]
        error = out["v"] - torch.einsum("hkv,hk->hv", s, k)
        s = s + beta[:, None, None] * k[:, :, None] * error[:, None, :]
        state["s"] = s
        o = self.rms(torch.einsum("hkv,hk->hv", s, q), self.t(f"{p}.o_norm.weight"), self.eps)
        if c.get("use_full_rank_gate", False):
            gate = self.t(f"{p}.g_proj.weight") @ x
        else:
            gate = self.t(f"{p}.g_b_proj.weight") @ (self.t(f"{p}.g_a_proj.weight") @ x)
        return self.t(f"{p}.o_proj.weight") @ (o * torch.sigmoid(gate).reshape(heads, dim)).reshape(-1)

    def mla(self, p: str, x: Tensor, state: dict) -> Tensor:
        c = self.c
        heads, nope, rope, value = (
            c["num_attention_heads"],
            c["qk_nope_head_dim"],
            c["qk_rope_head_dim"],
            c["v_head_dim"],
        )
        if c.get("q_lora_rank"):
            latent = self.rms(self.t(f"{p}.q_a_proj.weight") @ x, self.t(f"{p}.q_a_layernorm.weight"), 1e-6)
            q = self.t(f"{p}.q_b_proj.weight") @ latent
        else:
            q = self.t(f"{p}.q_proj.weight") @ x
        q = q.reshape(heads, nope + rope)
        full = self.t(f"{p}.kv_a_proj_with_mqa.weight") @ x
        rank = c["kv_lora_rank"]
        kv = self.t(f"{p}.kv_b_proj.weight") @ self.rms(full[:rank], self.t(f"{p}.kv_a_layernorm.weight"), 1e-6)
        kv = kv.reshape(heads, nope + value)
        key = torch.cat([kv[:, :nope], full[rank:].expand(heads, rope)], -1)
        state.setdefault("k", []).append(key)
        state.setdefault("v", []).append(kv[:, nope:])
        keys, values = torch.stack(state["k"]), torch.stack(state["v"])  # [t, H, *]
        scores = torch.einsum("hd,thd->ht", q, keys) / math.sqrt(nope + rope)
        o = torch.einsum("ht,thv->hv", torch.softmax(scores, -1), values).reshape(-1)
        if c.get("mla_use_output_gate", False):
            o = o * torch.sigmoid(self.t(f"{p}.g_proj.weight") @ x)
        return self.t(f"{p}.o_proj.weight") @ o

    def act(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.c.get("hidden_act", "silu") == "silu":
            return gate * torch.sigmoid(gate) * up
        beta, linear = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear * torch.tanh(up / linear))

    def glu(self, p: str, x: Tensor) -> Tensor:
        gate, up = self.t(f"{p}.gate_proj.weight") @ x, self.t(f"{p}.up_proj.weight") @ x
        return self.t(f"{p}.down_proj.weight") @ self.act(gate, up)

    def expert(self, name: str) -> Tensor:
        if f"{self.prefix}{name}.weight" in self.w:
            return self.t(f"{name}.weight")
        if name in self.numbers:
            return self.numbers[name]
        packed, scale = self.w[f"{self.prefix}{name}.weight_packed"], self.w[f"{self.prefix}{name}.weight_scale"]
        values = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
        values[:, 0::2] = CODES[(packed & 15).long()]
        values[:, 1::2] = CODES[(packed >> 4).long()]
        self.numbers[name] = values * torch.exp2(scale.double() - 127).repeat_interleave(32, dim=1)
        return self.numbers[name]

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        c, p = self.c, f"model.layers.{layer}"
        sparse = layer >= c.get("first_k_dense_replace", 0) and layer % c.get("moe_layer_freq", 1) == 0
        if not (c.get("num_experts") and sparse):
            return self.glu(f"{p}.mlp", x)
        p = f"{p}.block_sparse_moe"
        logits = self.t(f"{p}.gate.weight") @ x
        scores = torch.softmax(logits, -1) if c["moe_router_activation_func"] == "softmax" else torch.sigmoid(logits)
        choice = scores + self.t(f"{p}.gate.e_score_correction_bias")
        groups, size = c.get("num_expert_group", 1), c["num_experts"] // c.get("num_expert_group", 1)
        rank = sorted(range(groups), key=lambda g: -sum(sorted(choice[g * size : (g + 1) * size].tolist())[-2:]))
        open_groups = rank[: c.get("topk_group", 1)]
        allowed = [e for e in range(c["num_experts"]) if e // size in open_groups]
        chosen = sorted(allowed, key=lambda e: -choice[e].item())[: c["num_experts_per_token"]]
        self.routed.setdefault(layer, []).append(set(chosen))
        weights = scores[chosen]
        if c["moe_renormalize"] and len(chosen) > 1:
            weights = weights / (weights.sum() + 1e-20)
        latent = c.get("routed_expert_hidden_size")
        z = self.t(f"{p}.routed_expert_down_proj.weight") @ x if latent else x
        r = torch.zeros_like(z)
        for weight, e in zip(weights * c["routed_scaling_factor"], chosen, strict=True):
            w1, w2, w3 = (self.expert(f"{p}.experts.{e}.{name}") for name in ("w1", "w2", "w3"))
            r = r + weight * (w2 @ self.act(w1 @ z, w3 @ z))
        if latent:
            if c.get("latent_moe_use_norm", True):
                r = self.rms(r, self.t(f"{p}.routed_expert_norm.weight"), self.eps)
            r = self.t(f"{p}.routed_expert_up_proj.weight") @ r
        return r + self.glu(f"{p}.shared_experts", x) if c.get("num_shared_experts") else r
