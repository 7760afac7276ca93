"""Which module becomes what: component options, then recipe rules, later ones over earlier ones.

What is not named is not touched. A recipe is TOML:

    experts = "nvfp4"
    latent = "nf4"

    [[rule]]
    match = "re:.*self_attn\\.b_proj"     # a module path, or a pattern after re:, matched from its start
    layers = "0-3,7"                      # optional
    scheme = "keep"
    group_size = 128                      # optional, integer schemes: values per scale, 0 for one scale per row
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k3tool.checkpoint.outside import parse_toml, read_file
from k3tool.disk import refusal
from k3tool.errors import CheckpointMissing, UsageError
from k3tool.names import TensorName
from k3tool.units import parse_ranges

COMPONENTS = ("experts", "latent", "shared", "attention")
SCHEMES = ("keep", "bf16", "mxfp4", "nvfp4", "nvfp4-modelopt", "fp8-block", "fp8-channel", "int8", "int4", "nf4", "fp4")
FOUR_BIT = ("mxfp4", "nvfp4", "nvfp4-modelopt", "int4", "nf4", "fp4")
MAX_RECIPE_BYTES = 1 << 20
_MATRICES = {
    "latent": re.compile(r"block_sparse_moe\.routed_expert_(?:down|up)_proj", re.ASCII),
    "shared": re.compile(r"block_sparse_moe\.shared_experts\.\w+_proj", re.ASCII),
    "attention": re.compile(r"self_attn\.(?:\w+_proj|kv_a_proj_with_mqa)", re.ASCII),
}


@dataclass(frozen=True)
class Choice:
    """A scheme and, for the integer ones, values per scale (None: the default, 0: one scale per row)."""

    scheme: str = "keep"
    group_size: int | None = None


@dataclass(frozen=True)
class Rule:
    match: str
    choice: Choice
    layers: frozenset[int] | None = None

    def covers(self, path: str, name: TensorName) -> bool:
        if self.layers is not None and name.layer not in self.layers:
            return False
        if self.match.startswith("re:"):
            return re.match(self.match[3:], path) is not None
        return self.match == path


@dataclass(frozen=True)
class Policy:
    """components: of `COMPONENTS`, what is not there is kept. rules: over them, the last that covers a module counts.
    options: the words of the command line that ask for it again."""

    components: Mapping[str, Choice] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    options: tuple[str, ...] = field(default=(), compare=False)

    def choice(self, name: TensorName) -> Choice:
        """For the module that owns a tensor."""
        rule = self.ruled(name)
        if rule is not None:
            return rule.choice
        component = component_of_module(name)
        return self.components.get(component, Choice()) if component else Choice()

    def ruled(self, name: TensorName) -> Rule | None:
        """The rule that decides over a module, if one does: the last that covers it."""
        path = name.module_path
        return next((rule for rule in reversed(self.rules) if rule.covers(path, name)), None)

    def as_json(self) -> dict[str, Any]:
        """What the identity of a job is made of, and the report shows."""
        document: dict[str, Any] = {
            name: _spell(self.components[name]) for name in COMPONENTS if name in self.components
        }
        if self.rules:
            document["rules"] = [
                {
                    "match": rule.match,
                    **({"layers": sorted(rule.layers)} if rule.layers is not None else {}),
                    "scheme": _spell(rule.choice),
                }
                for rule in self.rules
            ]
        return document


def component_of_module(name: TensorName) -> str | None:
    """The option that covers a module: experts, latent, shared, attention, or None where only a rule reaches."""
    if name.expert is not None:
        return "experts"
    if name.layer is None:
        return None
    return next((component for component, pattern in _MATRICES.items() if pattern.fullmatch(name.module)), None)


def _spell(choice: Choice) -> str:
    return choice.scheme if choice.group_size is None else f"{choice.scheme} group {choice.group_size}"


def check_scheme(scheme: str, *, what: str) -> str:
    """Raises UsageError for a scheme that does not exist."""
    if scheme not in SCHEMES:
        raise UsageError(f"{what}: unknown scheme {scheme!r}", hint=f"schemes: {', '.join(SCHEMES)}")
    return scheme


def make_policy(options: Mapping[str, str | None], recipe: str | Path | None = None) -> Policy:
    """The policy of the options (component to scheme or None) over those of a recipe file. Raises UsageError,
    CheckpointMissing for a recipe that cannot be read."""
    components: dict[str, Choice] = {}
    rules: tuple[Rule, ...] = ()
    said: list[str] = []
    if recipe is not None:
        said += ["--recipe", os.path.abspath(recipe)]
        components, rules = parse_recipe(_read(Path(recipe)), where=str(recipe))
    for component, scheme in options.items():
        if scheme is not None:
            components[component] = Choice(check_scheme(scheme, what=f"--{component}"))
            said += [f"--{component}", scheme]
    return Policy(components, rules, tuple(said))


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_RECIPE_BYTES, fail=_no_recipe)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise refusal(error, path) from error
        raise CheckpointMissing(
            f"cannot read recipe {path}: {error.strerror}", hint="name a TOML file, or use --experts and --latent"
        ) from None


def _no_recipe(message: str) -> UsageError:
    return UsageError(message, hint='write lines such as experts = "nvfp4"')


def parse_recipe(text: bytes, *, where: str) -> tuple[dict[str, Choice], tuple[Rule, ...]]:
    """Raises UsageError naming the key and what is wrong with it."""
    document = parse_toml(text, where=where, fail=_no_recipe)
    unknown = sorted(set(document) - {*COMPONENTS, "rule"})
    if unknown:
        raise UsageError(f"{where}: unknown key {unknown[0]!r}", hint=f"keys: {', '.join(COMPONENTS)}, [[rule]]")
    components = {name: _choice(document[name], where=f"{where}: {name}") for name in COMPONENTS if name in document}
    rules = document.get("rule", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise UsageError(f"{where}: rule must be a table", hint="write [[rule]] with match and scheme below it")
    return components, tuple(_rule(rule, f"{where}: rule {number}") for number, rule in enumerate(rules, 1))


def _choice(value: Any, *, where: str) -> Choice:
    """`"int4"`, or a table with scheme and group_size."""
    table = {"scheme": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("scheme"), str):
        raise UsageError(f"{where}: a scheme must be text, found {value!r}", hint=f"schemes: {', '.join(SCHEMES)}")
    scheme, group = check_scheme(table["scheme"], what=where), table.get("group_size")
    if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 0):
        raise UsageError(f"{where}: group_size must be a whole number, found {group!r}", hint="32, 128, or 0 for a row")
    if group is not None and scheme not in ("int8", "int4"):
        raise UsageError(f"{where}: {scheme} has no choice of group_size", hint="group_size goes with int8 and int4")
    return Choice(scheme, group)


def _rule(table: Mapping[str, Any], where: str) -> Rule:
    unknown = sorted(set(table) - {"match", "layers", "scheme", "group_size"})
    match = table.get("match")
    if unknown or not isinstance(match, str):
        what = f"unknown key {unknown[0]!r}" if unknown else "match must be text"
        raise UsageError(f"{where}: {what}", hint="a rule has match, scheme, and optionally layers and group_size")
    if match.startswith("re:"):
        try:
            re.compile(match[3:])
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(
                f"{where}: {match!r} is no pattern ({error})", hint="escape the dots: re:.*\\.q_proj"
            ) from None
    layers = table.get("layers")
    if layers is not None and not isinstance(layers, (str, int)):
        raise UsageError(f"{where}: layers must be text such as 0-3,7", hint='write layers = "0-3,7"')
    chosen = {key: table[key] for key in ("scheme", "group_size") if key in table}
    wanted = None if layers is None else frozenset(parse_ranges(str(layers), what="layers"))
    return Rule(match, _choice(chosen, where=where), wanted)


def unused_rules(policy: Policy, names: Sequence[TensorName]) -> list[str]:
    """Rules that cover none of these modules: most likely a misspelt pattern."""
    return [rule.match for rule in policy.rules if not any(rule.covers(name.module_path, name) for name in names)]
