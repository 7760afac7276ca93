"""Which modules share one NVFP4 global scale: those that engines fuse into one matrix, which has one.

`w1` and `w3` of an expert, `gate_proj` and `up_proj` of an MLP; of KDA all that vLLM's `in_proj_qkvgfab` stacks, of MLA
`q_a_proj` and `kv_a_proj_with_mqa`. Sharing costs one scale's worth of range, never a code: block scales take it up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from k3tool.config import K3Config
from k3tool.transform.split import parsed

_MLP = {"w1": "w13", "w3": "w13", "gate_proj": "gate_up", "up_proj": "gate_up"}
_ATTENTION = {
    "kda": dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"), "in_proj_qkvgfab"),
    "mla": dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}
_MARK = ".self_attn."


class Partners:
    """paths: of all modules that change. becomes: the scheme of one of them."""

    def __init__(self, config: K3Config, paths: Iterable[str], becomes: Callable[[str], str]) -> None:
        self._config = config
        self._becomes = becomes
        self._attentions = {path.partition(_MARK)[0] for path in paths if _MARK in path and self._shares(path)}

    def _shares(self, path: str) -> bool:
        return self._becomes(path).startswith("nvfp4")

    def group(self, path: str) -> str:
        """The name under which modules of one owner are made in one step: a module's own, or what it is fused into."""
        leaf = path.rpartition(".")[2]
        if not self._shares(path):
            return leaf
        if _MARK not in path:
            return _MLP.get(leaf, leaf)
        layer = parsed(path + ".weight").layer
        assert layer is not None, f"{path}: attention outside the layers"
        return _ATTENTION[self._config.layer_kinds[layer]].get(leaf, leaf)

    def unit(self, text: str) -> str | None:
        """What a tensor of an attention with a shared scale must stay in one file with: all of it. None elsewhere."""
        owner, mark, _ = text.partition(_MARK)
        return owner + mark if mark and owner in self._attentions else None
