"""What people write for a repository, and what is taken for none."""

from __future__ import annotations

from pathlib import Path

import pytest

from k3tool.checkpoint.address import parse_repository
from k3tool.checkpoint.source import LocalSource, open_source
from k3tool.errors import CheckpointMissing, K3Error, RemoteError, UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("org/name", None),
        ("org/name@main", "main"),
        ("org/name@refs/pr/1", "refs/pr/1"),
        ("hf://org/name", None),
        ("hf://org/name/", None),
        ("hf://models/org/name@v1", "v1"),
        ("https://huggingface.co/org/name", None),
        ("http://huggingface.co/org/name/", None),
        ("huggingface.co/org/name", None),
        ("https://hf.co/org/name?library=transformers", None),
        ("https://huggingface.co/org/name.git", None),
        ("https://huggingface.co/org/name#files", None),
        ("https://huggingface.co/org/name/tree/main", "main"),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", "refs/pr/1"),
        ("https://huggingface.co/org/name/tree/refs/pr/1/sub", "refs/pr/1"),
        (f"https://huggingface.co/org/name/blob/{COMMIT}/config.json", COMMIT),
        ("https://huggingface.co/org/name/resolve/v2/model-00001-of-000096.safetensors?download=true", "v2"),
        (f"https://huggingface.co/org/name/commit/{COMMIT}", COMMIT),
        ("https://huggingface.co/org/name/discussions/3", None),
        ("https://huggingface.co/api/models/org/name", None),
        ("https://mirror.example:8443/hub/org/name/tree/dev", "dev"),
        ("org/name@", None),
    ],
)
def test_repositories(monkeypatch: pytest.MonkeyPatch, text: str, revision: str | None):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443/hub")
    found = parse_repository(text)
    if text.endswith("@"):
        assert found is None
    else:
        assert found == ("org/name", revision)


@pytest.mark.parametrize("text", ["name", "a/b/c", "/data/k3", "./a/b", "a b/c", "", "org/", "~/k3", "-a/b"])
def test_what_may_be_a_path(text: str):
    assert parse_repository(text) is None


@pytest.mark.parametrize(
    "text",
    ["https://example.org/org/name", "https://huggingface.co/name", "https://huggingface.co/datasets/org/name",
     "https://huggingface.co/org/name/settings", "https://huggingface.co/org/name/tree/..%2F..", "https://[::1/org/name",
     "hf://name", "hf://a/b/c", "org/na..me@main", "ftp://huggingface.co/org/name", "https://huggingface.co"],
)  # fmt: skip
def test_what_is_no_repository(text: str):
    with pytest.raises(UsageError) as refusal:
        parse_repository(text)
    assert "org/name" in refusal.value.hint


def test_a_folder_that_hides_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    for names in ((), ("README.md",), (".gitkeep",)):
        for name in names:
            (folder / name).write_text("")
        with pytest.raises(
            CheckpointMissing, match=r"the folder org/name here .*; it was taken, and not the repository"
        ) as said:
            open_source("org/name")
        assert "hf://org/name" in said.value.hint
    (folder / "config.json").write_text("{}")
    assert isinstance(open_source("org/name"), LocalSource)


def test_a_mistyped_path_is_told_as_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("k3tool.checkpoint.source.aside", said.append)
    monkeypatch.setattr("k3tool.hub.PATH_PATIENCE_S", 0.1)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RemoteError, match=r"no answer from http://127\.0\.0\.1:9 .*; and there is no folder r/a here"):
        open_source("r/a").files()
    assert said == ["there is no folder r/a here; asking the Hub (http://127.0.0.1:9)"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(K3Error, match="there is no folder r/a here"):
        open_source("r/a").files()
