"""llama.cpp itself, through the `xllamacpp` wheel, on GGUF files that k3tool wrote: logits, tokens, text, templates.

Each model runs in a process of its own, because a failed assertion of llama.cpp ends the process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from k3tool import chat
from k3tool.gguf import write_gguf
from k3tool.synthetic import tiny_config, write_checkpoint
from k3tool.tokenizer import load_tokenizer
from tests.model.twin import Twin

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed (extra: oracle)"),
]  # fmt: skip

# Flash attention and a 16-bit cache cost digits that the comparison needs. The reply to each prompt holds the whole
# log-softmax of every step; posts go to the server's own HTTP interface.
SCRIPT = """
import json, os, sys, urllib.error, urllib.request
import numpy as np
import xllamacpp as x

order = json.load(open(sys.argv[1]))
p = x.CommonParams()
p.model.path = order["model"]
p.n_ctx, p.n_parallel, p.n_gpu_layers, p.warmup, p.fit_params, p.verbosity = 512, 1, 0, False, False, 1
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
p.n_batch = p.n_ubatch = 512
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
server = x.Server(p)

def complete(prompt, count):
    vocabulary = order["vocab"]
    reply = server.handle_completions({"prompt": prompt, "n_predict": count, "temperature": 0, "n_probs": vocabulary,
                                       "cache_prompt": False, "post_sampling_probs": False, "ignore_eos": False})
    reply = json.loads(reply) if isinstance(reply, str) else reply
    steps = reply["choices"][0]["logprobs"]["content"]
    rows = np.full((len(steps), vocabulary), np.nan)
    for row, step in zip(rows, steps):
        for entry in step["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    return [step["id"] for step in steps], rows

def post(path, document):
    request = urllib.request.Request(server.listening_address + path, json.dumps(document).encode(),
                                     {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return {"error": error.read().decode()}

found = [complete(prompt, count) for prompt, count in order.get("prompts", [])]
answers = [post(path, document) for path, document in order.get("posts", [])]
np.savez(sys.argv[2], **{f"rows{i}": rows for i, (_, rows) in enumerate(found)})
with open(sys.argv[3], "w") as file:
    json.dump({"ids": [ids for ids, _ in found], "answers": answers}, file)
    file.flush()
os._exit(0)
"""


class Ran:
    """ids: chosen tokens of each prompt. rows: log-probabilities [steps, vocab] of each. answers: of each post."""

    def __init__(self, folder: Path, order: dict[str, Any]) -> None:
        paths = [folder / name for name in ("order.json", "rows.npz", "found.json")]
        order["model"] = str(sorted(folder.glob("*.gguf"))[0])
        paths[0].write_text(json.dumps(order))
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *map(str, paths)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        document = json.loads(paths[2].read_text())
        self.ids, self.answers = document["ids"], document["answers"]
        with np.load(paths[1]) as rows:
            self.rows = [rows[f"rows{i}"] for i in range(len(self.ids))]


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.double(), -1).numpy()


class Golden:
    def __init__(self, name: str, request: pytest.FixtureRequest) -> None:
        mini = name == "k3-mini-8"
        self.folder = request.getfixturevalue("mini") if mini else request.getfixturevalue("shared") / "golden" / name
        stored = load_file(self.folder / "golden.safetensors")
        self.ids: list[int] = stored["input_ids"].tolist()
        self.greedy: list[int] = stored["greedy_tokens"].tolist()
        self.prefill = log_softmax(stored["logits"])
        self.decode = np.concatenate([self.prefill[-1:], log_softmax(stored["decode_logits"])])

    def run(self, folder: Path, **options: Any) -> Ran:
        """Every prefix of the prompt for one token, then the prompt for as many as were generated greedily."""
        write_gguf(self.folder, folder, vocabulary="ids", **options)
        prompts = [(self.ids[:length], 1) for length in range(1, len(self.ids) + 1)]
        return Ran(folder, {"vocab": self.prefill.shape[1], "prompts": [*prompts, (self.ids, len(self.greedy))]})


def prefill_of(ran: Ran) -> np.ndarray:
    return np.concatenate(ran.rows[:-1])


def mean_divergence(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean over positions of the Kullback-Leibler divergence, both being log-probabilities."""
    return float((np.exp(expected) * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize("name", ["k3-mini-8", "k3-tiny-14"])
def test_float32_gives_the_golden_tokens_and_log_probabilities(name, request, tmp_path):
    """Names, shapes, keys and folded tensors are right: one wrong and nothing agrees. Differences are those of float32
    and of llama.cpp's two epsilons (measured: 4e-5 and 1.3e-4). The file is split, as large ones are."""
    golden = Golden(name, request)
    ran = golden.run(tmp_path, trunk="f32", experts="f32", max_shard_size=1_000_000)
    assert len(list(tmp_path.glob("*.gguf"))) > 1
    assert np.abs(prefill_of(ran) - golden.prefill).max() < 1e-3
    assert ran.ids[-1] == golden.greedy
    assert np.abs(ran.rows[-1] - golden.decode).max() < 1e-3


def test_float32_over_93_layers(request, tmp_path):
    """The release's depth. This network amplifies the difference of epsilons (median 3e-3, largest 1.7e-2)."""
    golden = Golden("k3-tiny-93", request)
    ran = golden.run(tmp_path, trunk="f32", experts="f32")
    found = prefill_of(ran)
    assert np.median(np.abs(found - golden.prefill).max(-1)) < 1e-2
    assert (found.argmax(-1) == golden.prefill.argmax(-1)).sum() >= 36  # of 40; measured 40
    assert ran.ids[-1][:4] == golden.greedy[:4]


# MXFP4 as llama.cpp computes with it


class Rounding:
    """A matrix whose products round their input as ggml does for MXFP4 weights: to Q8_0, per 32 values."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().reshape(-1, 32)
        step = groups.abs().amax(-1, keepdim=True) / 127
        codes = torch.where(step > 0, groups / step, 0.0)
        codes = torch.sign(codes) * torch.floor(codes.abs() + 0.5)
        return self.weight @ (codes * step.half().float()).reshape(-1).double()


class LlamaTwin(Twin):
    """The float64 twin with ggml's rounding of expert inputs, and one epsilon for every norm."""

    def expert(self, name: str) -> Any:
        return Rounding(super().expert(name))

    def rms(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return super().rms(x, weight, self.eps)


def test_mxfp4_differs_by_the_rounding_of_activations_alone(request, tmp_path):
    """ggml multiplies MXFP4 weights with activations rounded to 8 bits, and this random network amplifies that until a
    third of the tokens differ. A float64 model that rounds the same inputs in the same way explains it: 2e-4 of
    divergence where 1e-1 separates both from exact arithmetic."""
    golden = Golden("k3-tiny-14", request)
    ran = golden.run(tmp_path, trunk="f32")
    found = prefill_of(ran)
    logits, _, _ = LlamaTwin(golden.folder)(golden.ids)
    explained = log_softmax(logits)
    assert mean_divergence(explained, found) < 2e-3
    assert mean_divergence(golden.prefill, found) > 2e-2
    assert (explained.argmax(-1) == found.argmax(-1)).mean() > 0.95


def test_nibbles_that_are_not_paired_anew_would_be_seen(request, tmp_path):
    """The control of the test above: the same file with its code bytes in the order of the source."""
    golden = Golden("k3-tiny-14", request)
    result = write_gguf(golden.folder, tmp_path, trunk="f32", vocabulary="ids")
    path = next(tmp_path.glob("*.gguf"))
    data = np.frombuffer(bytearray(path.read_bytes()), np.uint8)
    head = result.prepared.plan.jobs[0].head
    assert head is not None
    offset = len(head)
    for tensor in result.prepared.tensors:
        if tensor.component == "routed_experts":
            codes = data[offset : offset + tensor.info.nbytes].reshape(-1, 17)[:, 1:]
            pairs = np.concatenate([codes & 15, codes >> 4], axis=1)
            codes[:] = pairs[:, 0::2] | (pairs[:, 1::2] << 4)
        offset += tensor.info.padded
    path.write_bytes(data.tobytes())
    ran = Ran(tmp_path, {"vocab": golden.prefill.shape[1], "prompts": [(golden.ids[:n], 1) for n in (20, 30, 45)]})
    logits, _, _ = LlamaTwin(golden.folder)(golden.ids)
    assert mean_divergence(log_softmax(logits)[[19, 29, 44]], np.concatenate(ran.rows)) > 0.3


@pytest.mark.parametrize(("trunk", "experts"), [("bf16", "keep"), ("q8_0", "keep"), ("f16", "bf16"), ("bf16", "q8_0")])
def test_every_type_loads_and_generates(trunk, experts, mini, tmp_path):
    """That llama.cpp has kernels for what is stored; these tiny networks say nothing about precision."""
    write_gguf(mini, tmp_path, trunk=trunk, experts=experts, vocabulary="ids")
    ran = Ran(tmp_path, {"vocab": 256, "prompts": [(list(range(40, 60)), 6)]})
    assert len(ran.ids[0]) == 6 and np.isfinite(ran.rows[0]).all()
    assert np.abs(np.exp(ran.rows[0]).sum(-1) - 1).max() < 1e-3


# Text

TEXTS = [
    "the quick brown fox jumps over the lazy dog", "Hello World, it's what I'LL do, don't you?", "1234567 89 x2",
    "  spaces\t tabs \n\n and lines\r\n ", "汉字 and かな, 한국어 mixed 中文abc", "Straße ñandú ÀÉÎ", "😀 emoji 👍🏽!",
    "a_b-c==d!!! ... ???\n", "CamelCaseHTMLParser iPhone", "<|open|>message role=\"user\"<|sep|>hi<|close|>",
    "½ Ⅷ １２３", "مرحبا עברית", "/* code */ for (i=0;i<10;++i) {}",
]  # fmt: skip
CONVERSATION = [
    {"role": "system", "content": 'be "brief" & kind', "name": "x"},
    {"role": "user", "content": "hi <|end_of_msg|>"},
    {"role": "assistant", "content": "ok", "reasoning_content": "hm"},
    {"role": "user", "content": "and now?"},
]


def test_text_becomes_the_same_ids_and_conversations_the_same_prompt(tmp_path):
    source, target = tmp_path / "source", tmp_path / "x"
    write_checkpoint(source, tiny_config(num_layers=4, vocab_size=1536), tokenizer=True)
    write_gguf(source, target)
    tokenizer = load_tokenizer(source, 1536)
    plain = [("/tokenize", {"content": text, "parse_special": False}) for text in TEXTS]
    special = [("/tokenize", {"content": text, "parse_special": True}) for text in TEXTS]
    templates = [
        ("/apply-template", {"messages": CONVERSATION, "chat_template_kwargs": {"enable_thinking": thinking}})
        for thinking in (True, False)
    ]
    back = [("/detokenize", {"tokens": [token]}) for token in (60, 300, 1282, 1283)]
    ran = Ran(target, {"vocab": 1536, "posts": [*plain, *special, *templates, *back]})
    for text, answer in zip(TEXTS, ran.answers, strict=False):
        assert answer["tokens"] == tokenizer.encode(text), text
    for text, answer in zip(TEXTS, ran.answers[len(TEXTS) :], strict=False):
        assert answer["tokens"] == tokenizer.encode(text, allow_special=True), text
    for thinking, answer in zip((True, False), ran.answers[2 * len(TEXTS) :], strict=False):
        assert answer["prompt"] == "".join(s.text for s in chat.render(CONVERSATION, thinking=thinking))
    assert [a["content"] for a in ran.answers[-4:]] == [tokenizer.decode([token]) for token in (60, 300, 1282, 1283)]
