"""What the user should know before a quantization begins: what it leaves as it is, and what others found harmful."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from k3tool.activations import Activations
from k3tool.formats import bnb
from k3tool.names import component_of, parse_name
from k3tool.transform.quantize_policy import FOUR_BIT, Policy, component_of_module
from k3tool.units import format_bytes, plural

ENOUGH = 4  # tokens for each input of a matrix whose errors are compensated
_CALLED = {
    "experts": "routed experts",
    "latent": "projections into or out of a latent",
    "shared": "shared experts",
    "attention": "attention projections",
}


_HARMFUL: tuple[tuple[Callable[[str, str, str], bool], str], ...] = (
    (
        lambda component, before, after: component == "vision" and after in FOUR_BIT,
        "vision at 4 bits: 17.9% weight error on wqkv and 12.6% on the position grid were measured (WASTE, K3.md); "
        "bf16 or 8 bits are safe",
    ),
    (
        lambda component, before, after: component in ("kda", "mla", "dense_mlp") and after in FOUR_BIT,
        "attention or dense MLP at 4 bits: the release was trained for 4 bits in the experts only, and a 3-bit trunk "
        "moved logits by 36% (WASTE, K3.md); compare logits before you rely on it",
    ),
    (
        lambda component, before, after: before == "mxfp4" and after in ("int4", "nf4", "fp4"),
        "experts out of MXFP4 into another 4-bit grid lose values that they have; nvfp4 and int8 hold them exactly",
    ),
)


def crossing(changing: Mapping[str, Any]) -> list[str]:
    """A warning about matrices whose rows are no whole blocks of bitsandbytes: its blocks run on in the next row."""
    found = [
        (path, converting)
        for path, converting in changing.items()
        if converting.choice.scheme in bnb.TABLES and converting.shape[-1] % bnb.BLOCK
    ]
    if not found:
        return []
    path, one = found[0]
    return [
        f"{one.choice.scheme}: rows of {plural(len(found), 'matrix', 'matrices')} are no whole blocks of {bnb.BLOCK} "
        f"({path} {list(one.shape)}); bitsandbytes decodes such wrong on a CPU (0.50), k3tool does not"
    ]


def few_tokens(widths: Iterable[int], activations: Activations) -> list[str]:
    """Warnings about what compensation is made from. widths: inputs of the matrices that are compensated."""
    width, said = max(widths, default=0), []
    if activations.tokens < ENOUGH * width:
        said.append(
            f"--calibrated: {activations.path} was recorded over {plural(activations.tokens, 'token')}, fewer than four for "
            f"each of the {width:,} inputs of a matrix: what is gained on so few is lost on other text; record "
            f"{ENOUGH * width:,} or more"
        )
    if width and not activations.holds_some():
        said.append(
            f"--calibrated: {activations.path} holds no inputs that can be kept aside, so that errors are told of the tokens "
            "that they are compensated for and no matrix is tried on others; record it again, with 8 tokens or more"
        )
    return said


def harmful(changing: Mapping[str, Any]) -> list[str]:
    """Warnings about schemes. changing: module path to what it becomes."""
    found = {(component_of(parse_name(path + ".weight")), c.scheme, c.choice.scheme) for path, c in changing.items()}
    return [text for applies, text in _HARMFUL if any(applies(*entry) for entry in sorted(found))]


def idle(policy: Policy, changing: Mapping[str, Any], bytes_out: int) -> list[str]:
    """Options and rules that change nothing: asked for, and without effect on this checkpoint."""
    if not changing:
        return [f"nothing changes: this writes a plain copy of {format_bytes(bytes_out)}, divided as the layout says"]
    names = [name for name in (parse_name(f"{path}.weight") for path in changing) if name is not None]
    reached = {component_of_module(name) for name in names if not policy.ruled(name)}
    said = [
        f"--{component} {choice.scheme} changes nothing: this checkpoint has no {_CALLED[component]} stored otherwise"
        for component, choice in policy.components.items()
        if choice.scheme != "keep" and component not in reached
    ]
    for rule in policy.rules:
        if rule.choice.scheme != "keep" and not any(rule.covers(name.module_path, name) for name in names):
            said.append(f"rule {rule.match!r} of the recipe changes nothing: what it covers stays as it is stored")
    return said


def unsearched(changing: Mapping[str, Any], scales: str | None) -> list[str]:
    """What to say of `--scales` where it was given, and no scheme that something becomes has scales to choose."""
    made = sorted({converting.choice.scheme for converting in changing.values()})
    if scales is None or not made or any(scheme not in ("bf16", *bnb.TABLES) for scheme in made):
        return []
    leave = "leaves" if len(made) == 1 else "leave"
    return [f"--scales {scales} changes nothing: {' and '.join(made)} {leave} no scale to choose"]
