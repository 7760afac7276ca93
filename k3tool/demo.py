"""The whole tool on a checkpoint that fits a laptop: 93 layers and 96 shards in the released layout, tiny widths.

Served by a local stand-in of the Hub, so that every command runs as it would on the real thing, without a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from k3tool.checkpoint.source import is_strewn
from k3tool.checkpoint.writer import write_atomic
from k3tool.disk import disk_errors, make_folder
from k3tool.errors import CheckFailed, UsageError
from k3tool.events import SILENT, Progress

REPO = "moonshotai/Kimi-K3"
MARKER = ".k3tool-demo"
PROMPT = "the quick brown fox"
_OWN = ("hub", "checkpoint", "ranks", "quantized", "hf-home")
# What would lead the demo's commands elsewhere: to the user's own Hub, through a proxy, or to a share of the work.
_ELSEWHERE = ("HF_", "HUGGING", "TRANSFORMERS_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Step:
    """One command of the demo as a user would type it in the demo folder, and why."""

    why: str
    arguments: tuple[str, ...]

    @property
    def typed(self) -> str:
        words = [f'"{word}"' if " " in word else word for word in self.arguments]
        return f"k3tool {' '.join(words)}"


STEPS = (
    Step("Download the 96 shards, each checked while it is written.", ("fetch", REPO, "--local-dir", "checkpoint")),
    Step("Read every byte again and compare.", ("verify", "checkpoint", "--depth", "bytes", "--full")),
    Step("What is in it?", ("inspect", "checkpoint")),
    Step("Would it fit on 4 GPUs?", ("plan", "checkpoint", "--gpus", "4", "--gpu-memory", "1GB", "--context", "4096")),
    Step("The same question about the real release on 16 H200.", ("plan", "k3", "--gpus", "16", "--gpu-memory", "h200")),
    Step("Cut it for those 4 GPUs and read it back.", ("reshard", "checkpoint", "ranks", "--gpus", "4", "--tp", "2", "--ep", "2", "--verify")),
    Step("Experts to NVFP4 without changing a value, latent projections to NF4.", ("quantize", "checkpoint", "quantized", "--experts", "nvfp4", "--latent", "nf4")),
    Step("Tokens from the checkpoint. The weights are random: so is the text.", ("run", "checkpoint", "--prompt", PROMPT, "--max-new-tokens", "16")),
    Step("And from the quantized one.", ("run", "quantized", "--prompt", PROMPT, "--max-new-tokens", "16")),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    step: Step
    exit_code: int
    seconds: float
    output: str


def prepare(folder: Path, progress: Progress = SILENT) -> None:
    """Write the tiny checkpoint into `folder`/hub. A folder that holds something else is refused with UsageError."""
    from k3tool.synthetic import tiny_config, write_checkpoint

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", hint="name a folder that is new or empty")
    make_folder(folder)
    with disk_errors(folder, "list"):
        held = [name for name in os.listdir(folder) if not is_strewn(name)]
    if held and not (folder / MARKER).is_file():
        raise UsageError(f"{folder} holds something that is not a demo", hint="name a folder that is new or empty")
    write_atomic(folder / MARKER, b"written by k3tool demo; the next demo here starts over\n")
    for name in _OWN:
        shutil.rmtree(folder / name, ignore_errors=True)
    config = tiny_config(num_layers=93, block_size=12, kda_heads=4, mla_heads=4, num_experts=8, experts_per_token=2,
                         moe_intermediate_size=64)  # fmt: skip
    write_checkpoint(folder / "hub", config, tokenizer=True, progress=progress)


def play(folder: Path, announce: Callable[[Step], None], progress: Progress = SILENT) -> Iterator[Outcome]:
    """Run the steps one after the other in `folder` and yield what each said. Raises CheckFailed where one fails."""
    from k3tool.standin import serve

    prepare(folder, progress)
    with serve(folder / "hub", REPO) as hub:
        environment = surroundings(os.environ, hub.endpoint, folder)
        for step in STEPS:
            announce(step)
            outcome = _run(step, folder, environment)
            yield outcome
            if outcome.exit_code:
                raise _stopped(outcome)


def surroundings(inherited: Mapping[str, str], endpoint: str, folder: Path) -> dict[str, str]:
    """The environment of the demo's commands: the stand-in is their Hub, reached directly, whatever proxy is set."""
    kept = {
        name: value
        for name, value in inherited.items()
        if not name.startswith(_ELSEWHERE) and not name.lower().endswith("_proxy")
    }
    here = str(Path(__file__).resolve().parents[1])  # they start in `folder`, where a relative path finds nothing
    paths = [os.path.abspath(path) for path in inherited.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([here, *paths])),
        "NO_PROXY": "*",  # systems have settings of their own beside the environment
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder.resolve() / "hf-home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def _stopped(outcome: Outcome) -> CheckFailed:
    """Why the demo ends here, in the words of the command that failed."""
    said = outcome.output.splitlines()
    cause = next((line for line in reversed(said) if line.startswith("error: ")), "").removeprefix("error: ")
    hint = next((line for line in reversed(said) if line.startswith("hint: ")), "").removeprefix("hint: ")
    why = f": {cause}" if cause else ""
    return CheckFailed(
        f"the demo stopped: `{outcome.step.typed}` ended with {outcome.exit_code}{why}",
        hint=hint or "K3TOOL_DEBUG=1 shows more when it is run again",
        output=outcome.output[-4000:],
    )


def _run(step: Step, folder: Path, environment: dict[str, str]) -> Outcome:
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "k3tool", *step.arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return Outcome(step, done.returncode, time.monotonic() - begun, done.stdout)
