"""Where the files of a folder came from, and what brings those that are damaged or absent: remedies that fit the cause.

Known from the manifest, an unfinished job, the Hub client's cache or records, a git checkout. Where nothing is known,
the remedy is prose: a command would be a guess, and a wrong guess costs a download of 1.56 TB.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from k3tool.checkpoint.address import parse_repository
from k3tool.checkpoint.content import HEAD_BYTES, Content, recognise
from k3tool.checkpoint.outside import decode_json
from k3tool.commands import command
from k3tool.errors import CheckpointCorrupt, K3Error

if TYPE_CHECKING:
    from k3tool.checkpoint.manifest import Manifest

_WRITE = "write it again: "
NAMED_FILES = 8  # as many are named one by one; beyond that a command brings all that is wrong
_REPO = re.compile(r"[\w][\w.-]{0,95}/[\w][\w.-]{0,95}", re.ASCII)
_REVISION = re.compile(r"[\w][\w./-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_OPTIONS = frozenset((
    "--layers", "--text-only", "--layout", "--tp", "--ep", "--pp", "--max-shard-size", "--rank", "--experts", "--latent",
    "--shared", "--attention", "--recipe", "--scales", "--activations", "--calibrated", "--exact", "--format", "--trunk",
    "--vocabulary",
))  # fmt: skip
RANK_FOLDER = re.compile(r"rank-\d{5}-of-\d{5}", re.ASCII)


class Origin(NamedTuple):
    """repo: where the files were published, None where that is not known. commit: of that repository."""

    repo: str | None
    commit: str | None = None


def damaged(where: str, what: str, **details: object) -> CheckpointCorrupt:
    """The failure for the file `where` (`FOLDER/NAME`) that is not what it should be: says what stands in it where that
    can be told, and what brings it again."""
    content = _content(where)
    folder, name = os.path.split(where)
    folder = folder or ("." if os.path.exists(where) else "")
    if content is not None:
        what, details = f"{where} holds {content.text}, not {_noun(name)}", {**details, "holds": content.kind}
        return CheckpointCorrupt(what, hint=_for_content(folder, name, content), **details)
    return CheckpointCorrupt(f"{where}: {what}", hint=again(folder, [name], overwrite=True), **details)


def damage(where: str) -> Callable[[str], CheckpointCorrupt]:
    """`damaged` for readers that are told how to make an error of a message; it begins with `where`."""
    return lambda message: damaged(where, message.removeprefix(where).lstrip(": "))


def again(folder: str | Path, names: Sequence[str], *, known: Origin | None = None, overwrite: bool = False) -> str:
    """What brings these files of a folder again: a full command where it is known how the folder was made, else prose.

    known: what the caller can tell of a folder that says nothing of itself. overwrite: the files are there and wrong.
    """
    path = Path(folder)
    if not folder or not path.is_dir():
        return "ask its publisher to mend it, or name another revision"
    return _given_up(path) or brought(path, names, known=known, overwrite=overwrite)


def brought(folder: Path, names: Sequence[str], *, known: Origin | None = None, overwrite: bool = False) -> str:
    """`again` for a folder whose shards were not given up with `--reclaim`, or where they alone help."""
    return (
        _unfinished(folder)
        or _written(folder, names, overwrite=overwrite)
        or _cached(folder, names)
        or _recorded(folder, names, known, overwrite=overwrite)
        or _checkout(folder, names)
        or f"copy {_some(names)} again from where this folder came from: nothing in it says where that is"
    )


def _given_up(folder: Path) -> str:
    """What to do about a folder whose shards are freed because their tensors are elsewhere now."""
    from k3tool.checkpoint.note import given_up, read_note

    with suppress(K3Error, OSError):
        note = read_note(folder)
        if note is not None and note.freed(folder):
            return given_up(folder, note).hint
    return ""


def write_rank(folder: str | Path, rank: int) -> str:
    """What writes one rank of a folder of ranks: the command that wrote the folder where that is known, else prose."""
    path = Path(folder)
    line = _written(path, (), overwrite=False) if folder and path.is_dir() else ""
    if line.startswith(_WRITE) and "--rank" not in line.split():
        return f"{line} --rank {rank}"
    return f"write that rank first: reshard its source into this folder with --rank {rank}"


def knows(folder: str | Path) -> bool:
    """Whether something in the folder, or its place, says where its files came from."""
    path = Path(folder)
    if not folder or not path.is_dir():
        return False
    return bool(_unfinished(path) or _written(path, ()) or _cached(path, ()) or _downloaded_commit(path))


def look(label: str) -> str:
    """What to do to see everything that is wrong with a source: a command for a folder, else prose."""
    return f"see all that is wrong: {command('verify', Path(label))}" if Path(label).is_dir() else ASK


ASK = "ask its publisher to mend it, or name another revision"


def names_of(label: str, pattern: str = "") -> str:
    """The command that lists the tensors of a source."""
    source: str | Path = Path(label) if Path(label).is_dir() else label
    return f"see what it holds: {command('inspect', source, *(['--tensors', pattern] if pattern else []))}"


def free_folder(source: str, suffix: str) -> Path:
    """A place for what is made of a source: beside a local one, else in this folder, also for a snapshot of the Hub's cache;
    under a name that nothing has yet."""
    local = Path(source).is_dir()
    named = Path(source) if Path(source).name not in ("", "..") else Path(source).resolve()
    repository = None if local else parse_repository(source)
    name = repository.repo.rpartition("/")[2] if repository else named.name
    beside = named.parent if local and os.access(named.parent, os.W_OK) else Path()
    above = named.absolute().parent
    if local and above.name == "snapshots" and above.parent.name.startswith("models--"):
        name, beside = above.parent.name.rpartition("--")[2], Path()
    taken, number = beside / f"{name}-{suffix}", 1
    while os.path.lexists(taken):
        number += 1
        taken = beside / f"{name}-{suffix}-{number}"
    return taken


def _content(where: str) -> Content | None:
    with suppress(OSError, ValueError), open(where, "rb") as file:
        content = recognise(file.read(HEAD_BYTES), os.fstat(file.fileno()).st_size)
        if content is None or (content.kind == "safetensors" and where.endswith(".safetensors")):
            return None
        return content
    return None


def _noun(name: str) -> str:
    if name.endswith(".safetensors"):
        return "a safetensors file"
    if name.endswith("index.json"):
        return "an index"
    return "JSON" if name.endswith(".json") else "what its name says"


def _for_content(folder: str, name: str, content: Content) -> str:
    if content.kind == "lfs":
        if _is_checkout(Path(folder)):
            return f"Git LFS has not brought the content yet: git -C {shlex.quote(folder)} lfs pull"
        known = _written(Path(folder), [name]) or _cached(Path(folder), [name])
        return known or (
            "this is a copy of a git checkout whose content was not brought: run git lfs pull in the checkout, "
            "then copy its files again"
        )
    if content.kind == "annex":
        return "git-annex has not brought the content yet: run git annex get in the checkout"
    if content.kind == "gzip" and not _written(Path(folder), [name]):
        return f"it was saved in the coding of its transfer: decompress {name} (gzip -d), or download it again without"
    return again(folder, [name], overwrite=True)


def _unfinished(folder: Path) -> str:
    """The command of a fetch that was interrupted in this folder."""
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError):
        with open(folder / ".k3tool" / "job.json", "rb") as file:
            job = decode_json(file.read(1 << 20).decode(), own=True)
        words = shlex.split(job["command"])
        if words[0] == "fetch" and _REPO.fullmatch(words[1]) and _are_harmless(words[2:]):
            commit = job["facts"].get("commit")
            at = ["--revision", commit] if isinstance(commit, str) and _COMMIT.fullmatch(commit) else []
            return f"an unfinished fetch is here; it goes on with: {command(*words, *at, '--local-dir', folder)}"
    return ""


def _written(folder: Path, names: Sequence[str], *, overwrite: bool = True) -> str:
    """What wrote the folder, as a command again, from its manifest."""
    from k3tool.checkpoint.manifest import load_manifest

    try:
        manifest = load_manifest(folder)
    except (K3Error, OSError):
        return ""
    words = manifest.command.split() if manifest else []
    if manifest is None or not words or "reclaim" in manifest.command:
        return ""
    if words[0] == "fetch":
        if not _REPO.fullmatch(manifest.source) and not Path(manifest.source).is_dir():
            return ""
        return f"this brings it: {fetch_command(folder, manifest.source, manifest.revision, names, manifest.extra)}"
    with suppress(ValueError):
        if words[0] in ("reshard", "quantize"):
            return _write_again(folder, manifest)
    return ""


def fetch_command(
    folder: Path,
    source: str,
    revision: object,
    names: Sequence[str],
    extra: dict[str, Any] | None = None,
    *options: object,
) -> str:
    """`k3tool fetch` of these files (of all where they are many, or where the folder is a smaller checkpoint)."""
    made = extra or {}
    words: list[object] = ["fetch", Path(source) if Path(source).is_dir() else source]
    if isinstance(revision, str) and _REVISION.fullmatch(revision) and _REPO.fullmatch(source):
        words += ["--revision", revision]
    if isinstance(made.get("layers"), str):
        words += ["--layers", made["layers"]]
    if made.get("text_only"):
        words.append("--text-only")
    elif "layers" not in made and len(names) <= NAMED_FILES:
        for name in names:
            words += ["--include", glob.escape(name)]
    return command(*words, *options, "--local-dir", folder)


def _write_again(folder: Path, manifest: Manifest) -> str:
    """`reshard` or `quantize` as it was given, with its DEST. What reads as it was written is kept by it."""
    from k3tool.checkpoint.manifest import MANIFEST_NAME

    name, _, rest = manifest.command.partition(" ")
    source = manifest.source
    if not rest.startswith(source):
        return ""
    is_folder = Path(source).is_dir()
    if not (is_folder or re.fullmatch(rf"{_REPO.pattern}(@.+)?", source, re.ASCII)):
        return f"it was written by `{name}` from {source}, which is not here: bring that back and write this again"
    if is_folder and _given_up(Path(source)):
        return (
            f"its source {source} was given up while it was written: copy the file again from a backup of this folder"
        )
    options = shlex.split(rest[len(source) :])
    if not _are_harmless(options):
        return ""
    for option, value in pairwise(options):
        if option in ("--recipe", "--activations") and not Path(value).is_file():
            return f"it was written by `{name}` with {option} {value}, which is not here: bring that back and write this again"
    if RANK_FOLDER.fullmatch(folder.name):  # one rank's own manifest: the command wrote the folder above
        if not (folder.parent / MANIFEST_NAME).is_file():
            if not _all_ranks_beside(folder):
                return "copy it again from the folder of ranks that this one was copied from"
            options.append("--overwrite")  # nothing else says whose files these are
        folder = folder.parent
    where: str | Path = Path(source) if is_folder else source
    if not is_folder and isinstance(manifest.revision, str) and _COMMIT.fullmatch(manifest.revision):
        where = f"{source.partition('@')[0]}@{manifest.revision}"
    return f"{_WRITE}{command(name, where, folder, *options)}"


def _all_ranks_beside(folder: Path) -> bool:
    """Whether a rank's folder stands among all the others."""
    ranks = int(folder.name[-5:])
    with suppress(OSError):
        return sum(name.endswith(folder.name[-9:]) for name in os.listdir(folder.parent)) >= ranks
    return False


def _are_harmless(words: Sequence[str]) -> bool:
    """Whether the options of a recorded command only say what is made: the record may be a stranger's, and a hint is pasted."""
    return all(word in _OPTIONS for word in words if word.startswith("-"))


def _cached(folder: Path, names: Sequence[str]) -> str:
    """A snapshot in the Hub client's cache: the client brings it again."""
    parts = Path(os.path.abspath(folder)).parts
    if len(parts) < 4 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return ""
    repo = parts[-3].removeprefix("models--").replace("--", "/")
    if not _REPO.fullmatch(repo) or not _COMMIT.fullmatch(parts[-1]):
        return ""
    words = ["hf", "download", repo, *(names if len(names) <= NAMED_FILES else ()), "--revision", parts[-1],
             "--cache-dir", str(Path(*parts[:-3])), "--force-download"]  # fmt: skip
    return f"this is the Hub client's cache; it brings the file again: {shlex.join(words)}"


def _recorded(folder: Path, names: Sequence[str], known: Origin | None, *, overwrite: bool) -> str:
    """What `hf download --local-dir` noted (a commit, no repository), or what the caller knows."""
    from k3tool import release

    commit = _downloaded_commit(folder)
    if known is None and commit in release.revisions():
        known = Origin(release.repo(), commit)
    if known is not None and known.repo:
        options = ["--overwrite"] if overwrite else []
        return f"this brings it: {fetch_command(folder, known.repo, known.commit, names, None, *options)}"
    if commit:
        return f"download {_some(names)} again with hf download, as this folder was made (at commit {commit})"
    return ""


def _downloaded_commit(folder: Path) -> str:
    notes = folder / ".cache" / "huggingface" / "download"
    with suppress(OSError):
        for path in sorted(notes.glob("*.metadata"))[:1]:
            first = path.read_text(errors="replace")[:200].split("\n")[0].strip()
            return first if _COMMIT.fullmatch(first) else ""
    return ""


def _is_checkout(folder: Path) -> bool:
    return (folder / ".git").exists()


def _checkout(folder: Path, names: Sequence[str]) -> str:
    if not _is_checkout(folder):
        return ""
    return f"remove {_some(names)} and let Git LFS bring it again: git -C {shlex.quote(str(folder))} lfs pull"


def _some(names: Sequence[str]) -> str:
    if not names:
        return "the files"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
