"""Change tensors of a small checkpoint: read all, edit a dictionary, write it back as one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


def edit_checkpoint(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite `folder` as a single-file checkpoint after `change` has edited its tensors by name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors.update(load_file(path))
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
