"""The file of second moments: what is written is read, and what is no such file is refused with the tensor named."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from k3tool.activations import Activations, Recorded, entry_of, fingerprint, gram_bytes, write_activations
from k3tool.config import K3Config
from k3tool.errors import CheckpointCorrupt, CheckpointMissing, UnsupportedError
from k3tool.synthetic import tiny_config

CONFIG = K3Config.from_dict(tiny_config())
LAYER = "language_model.model.layers.3.block_sparse_moe."
SAID = {"format": "k3tool-activations", "version": "1", "tokens": "9", "model": fingerprint(CONFIG)}
DOWN, W1 = LAYER + "routed_expert_down_proj", LAYER + "experts.w1"


def moments(width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(seed).standard_normal((9, width)).astype(np.float32)
    gram = rows.T @ rows / np.float32(9)
    return np.diagonal(gram).copy(), gram


def made(
    path: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], object] = lambda tensors, said: None
) -> Path:
    """A sound file, changed."""
    squares, gram = moments(64)
    tensors = {
        DOWN + ".input_mean_square": squares,
        DOWN + ".input_gram": gram,
        W1 + ".input_mean_square": moments(32)[0],
    }
    said = dict(SAID)
    change(tensors, said)
    save_file(tensors, path, said)
    return path


def read_all(path: Path) -> None:
    opened = Activations.open(path)
    opened.check_model(CONFIG)
    opened.mean_square(LAYER + "experts.5.w1", 32)
    opened.mean_square(DOWN, 64)
    for _ in opened.gram(DOWN, 64, 10):
        pass
    opened.held(DOWN, 64)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    squares, gram = moments(64)
    blocks = [gram[:40].tobytes(), gram[40:].tobytes()]
    entries = [Recorded(W1, 32, moments(32)[0].tobytes()), Recorded(DOWN, 64, squares.tobytes(), lambda: blocks)]
    write_activations(path, entries, CONFIG, 9)
    opened = Activations.open(path)
    opened.check_model(CONFIG)
    assert opened.tokens == 9
    assert np.array_equal(opened.mean_square(LAYER + "experts.11.w1", 32), moments(32)[0])
    assert np.array_equal(opened.mean_square(DOWN, 64), squares)
    strips = list(opened.gram(DOWN, 64, 10))
    assert np.array_equal(np.concatenate([values for _, values in strips]), gram)
    assert [(taken.start, taken.stop) for taken, _ in strips][-1] == (60, 64)
    assert opened.sha256 == Activations.open(path).sha256
    assert [found.name for found in tmp_path.iterdir()] == ["a.safetensors"]
    read_all(made(tmp_path / "other.safetensors"))


def test_inputs_that_are_kept_can_be_taken_out_of_the_moments(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    rows = np.random.default_rng(3).standard_normal((50, 64)).astype(np.float32)
    gram = rows.T @ rows / np.float32(50)
    held = rows[[9, 19, 29]]
    entry = Recorded(DOWN, 64, np.diagonal(gram).tobytes(), lambda: [gram.tobytes()], held.tobytes())
    write_activations(path, [entry], CONFIG, 50)
    opened = Activations.open(path)
    found = opened.held(DOWN, 64)
    assert found is not None and np.array_equal(found, held) and opened.holds_some()
    others = np.delete(rows, [9, 19, 29], axis=0)
    strips = np.concatenate([values for _, values in opened.gram_without(DOWN, 64, 10, found)])
    assert np.allclose(strips, others.T @ others / 47, atol=1e-6)
    assert np.allclose(opened.mean_square_without(DOWN, 64, found), np.square(others).mean(0), atol=1e-6)


def test_a_module_and_its_entry() -> None:
    assert entry_of(LAYER + "experts.7.w2") == LAYER + "experts.w2"
    assert entry_of(DOWN) == DOWN
    assert entry_of("vision_tower.x") == "vision_tower.x"


def test_the_size_is_known_before(tmp_path: Path) -> None:
    assert gram_bytes(CONFIG, 8) == 7 * 4 * (64**2 + 32**2) and gram_bytes(CONFIG, 1) == 0
    assert gram_bytes(CONFIG, 8, 10) == gram_bytes(CONFIG, 8) + 7 * 4 * 10 * (64 + 32)


def test_the_fingerprint_does_not_depend_on_storage() -> None:
    document = tiny_config()
    document["text_config"].pop("quantization_config")
    document.pop("vision_config")
    assert fingerprint(K3Config.from_dict(document)) == fingerprint(CONFIG)
    document["text_config"]["rms_norm_eps"] = 1e-3
    assert fingerprint(K3Config.from_dict(document)) != fingerprint(CONFIG)


def put(name: str, at: object, value: float) -> Callable[[dict[str, np.ndarray], dict[str, str]], object]:
    def change(tensors: dict[str, np.ndarray], said: dict[str, str]) -> None:
        tensors[name][at] = value  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (put(W1 + ".input_mean_square", 7, np.nan), CheckpointCorrupt, W1 + ".input_mean_square holds nan at 7"),
        (put(W1 + ".input_mean_square", 3, -1e-9), CheckpointCorrupt, W1 + ".input_mean_square holds -1e-09 at 3"),
        (put(W1 + ".input_mean_square", 0, np.inf), CheckpointCorrupt, W1 + ".input_mean_square holds inf at 0"),
        (put(DOWN + ".input_gram", (33, 2), np.nan), CheckpointCorrupt, DOWN + ".input_gram has NaN, infinity or a wrong diagonal in row 33"),
        (put(DOWN + ".input_gram", (5, 5), 0.25), CheckpointCorrupt, DOWN + ".input_gram has NaN, infinity or a wrong diagonal in row 5"),
        (lambda t, s: t.pop(W1 + ".input_mean_square"), UnsupportedError, W1 + ".input_mean_square must be [32], it is not recorded"),
        (lambda t, s: t.update({W1 + ".input_mean_square": moments(33)[0]}), UnsupportedError, "must be [32], found [33]"),
        (lambda t, s: t.pop(DOWN + ".input_gram"), UnsupportedError, f"holds no {DOWN}.input_gram"),
        (lambda t, s: t.update({DOWN + ".input_gram": moments(63)[1]}), UnsupportedError, "must be [64, 64], found [63, 63]"),
        (lambda t, s: t.update({DOWN + ".input_gram": np.ones((64, 63), np.float32)}), CheckpointCorrupt, "[64, 63] is no second moment"),
        (lambda t, s: t.update({W1 + ".input_mean_square": np.ones(32)}), CheckpointCorrupt, "F64 [32] is no second moment"),
        (lambda t, s: t.update({DOWN + ".input_held": np.ones((9, 64), np.float32)}), CheckpointCorrupt, "[9, 64] is no second moment"),
        (lambda t, s: t.update({DOWN + ".input_held": np.ones((2, 63), np.float32)}), UnsupportedError, "must be [2, 64], found [2, 63]"),
        (lambda t, s: t.update({DOWN + ".input_held": np.full((2, 64), np.inf, np.float32)}), CheckpointCorrupt, ".input_held has NaN or infinity"),
        (lambda t, s: t.update({"logits": np.ones(3, np.float32)}), CheckpointCorrupt, "logits F32 [3] is no second moment"),
        (lambda t, s: s.update(model="0" * 64), UnsupportedError, "was recorded on another model"),
        (lambda t, s: s.update(format="pt"), CheckpointCorrupt, "expected k3tool-activations of version 1, found 'pt'"),
        (lambda t, s: s.update(version="2"), CheckpointCorrupt, "found 'k3tool-activations' '2'"),
        (lambda t, s: s.update(tokens="0"), CheckpointCorrupt, "tokens must be a number above 0, found '0'"),
        (lambda t, s: s.update(tokens="9" * 50), CheckpointCorrupt, "tokens must be a number above 0"),
        (lambda t, s: s.pop("tokens"), CheckpointCorrupt, "tokens must be a number above 0, found ''"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_name(
    tmp_path: Path, change: Callable[..., object], error: type[Exception], said: str
) -> None:
    path = made(tmp_path / "a.safetensors", change)
    with pytest.raises(error, match=re.escape(said)):
        read_all(path)


@pytest.mark.parametrize("data", [b"", b"\xff" * 100, b"\x10\0\0\0\0\0\0\0{not json}     ", b"\x02\0\0\0\0\0\0\0{}"])
def test_what_is_no_such_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt) as caught:
        Activations.open(path)
    assert "--save-activations" in caught.value.hint
    with pytest.raises(CheckpointMissing):
        Activations.open(tmp_path / "none")


def test_a_file_that_is_cut_or_changes_is_noticed(tmp_path: Path) -> None:
    path = made(tmp_path / "a.safetensors")
    opened = Activations.open(path)
    data = path.read_bytes()
    path.write_bytes(data[:-4])
    with pytest.raises(CheckpointCorrupt, match="is truncated"):
        Activations.open(path)
    with pytest.raises(CheckpointCorrupt, match="has changed while it was in use"):
        opened.mean_square(DOWN, 64)
