"""Files beside a checkpoint that its index does not name: renamed shards, unfinished downloads, folders too deep.

Loaders that read every `.safetensors` of a folder take them for parts of it; and where a shard is absent, one of them
often is the shard.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress

from k3tool.checkpoint.origin import again, look
from k3tool.checkpoint.source import Source
from k3tool.errors import CheckpointMissing

UNFINISHED = (".incomplete", ".part", ".partial", ".aria2", ".crdownload", ".download", ".tmp", ".k3partial")
_MOST_FOLDERS = 64


def stray_shards(files: Collection[str], named: Collection[str]) -> list[str]:
    """Tensor files of the folder itself that are not among `named`; what macOS writes beside files is none."""
    return sorted(
        name
        for name in files
        if name.lower().endswith(".safetensors") and "/" not in name and not name.startswith(".") and name not in named
    )


def unfinished(files: Collection[str], shard: str) -> str:
    """The name of what a download tool has left of `shard` and not finished, empty where nothing is."""
    return next((name for suffix in UNFINISHED if (name := shard + suffix) in files), "")


def absent_shard(
    source: Source, shard: str, files: Mapping[str, int], named: Collection[str] = ()
) -> CheckpointMissing:
    """The failure for a shard that is not there: with what is there instead, and what mends it.

    named: the shards of the index, where they are known."""
    what, hint = why_absent(source, shard, files, named)
    return CheckpointMissing(f"{source.label} lacks {shard}{what}", hint=hint, shard=shard)


def why_absent(source: Source, shard: str, files: Mapping[str, int], named: Collection[str]) -> tuple[str, str]:
    """(what stands beside it, for the end of a sentence; what mends it)."""
    other_case = next((name for name in files if name != shard and name.lower() == shard.lower()), "")
    if other_case:
        return f"; it holds {other_case}, in another case", f"rename {other_case} to {shard}"
    if left := unfinished(files, shard):
        return (
            f"; {left} is the unfinished download of it",
            "go on with the download by the tool that began it: its name is given to the file when it is whole",
        )
    deeper = folder_with(source, shard)
    if deeper:
        return f"; its folder {deeper} holds it", f"name {source.label}/{deeper}, or move its files one folder up"
    strays = stray_shards(files, {shard, *named}) if named else []
    if strays and not any(name in files for name in named):
        text = f"; it holds {len(strays)} .safetensors files that the index does not name, such as {strays[0]}"
        return text, look(source.label)
    return "", again(source.label, [shard])


def folder_with(source: Source, name: str) -> str:
    """The folder of a local source that holds a file of this name, empty where none does."""
    root = source.local_path("")
    if root is None:
        return ""
    with suppress(OSError), os.scandir(root) as entries:
        folders = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        for folder in sorted(folders)[:_MOST_FOLDERS]:
            if (root / folder / name).is_file():
                return folder
    return ""
