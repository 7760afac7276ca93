"""Names of k3tool's own records, which are never taken from a stranger."""

from __future__ import annotations

import pytest

from k3tool.checkpoint.note import RECLAIMED_NAME
from k3tool.checkpoint.own import is_own
from k3tool.gguf.report import REPORT_NAME as GGUF_REPORT_NAME
from k3tool.proofs import PROOFS_NAME
from k3tool.transform.quantize_report import REPORT_NAME
from k3tool.transform.reshard import LAYOUT_NAME


@pytest.mark.parametrize(
    "name",
    [PROOFS_NAME, REPORT_NAME, GGUF_REPORT_NAME, LAYOUT_NAME, RECLAIMED_NAME, "k3tool-manifest.json", "K3Tool-Manifest.json",
     ".k3tool/job.json", "sub/.k3tool/lock", "rank-00000-of-00002/k3tool-manifest.json", "model-1.safetensors.k3partial",
     "activations.safetensors", "calibration/text.activations.safetensors"],
)  # fmt: skip
def test_our_records(name: str):
    assert is_own(name)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors.index.json", "README.md", "model-00001-of-000096.safetensors", "k3tools.json",
     "my-k3tool.json", ".gitattributes", "k3tool/notes.txt", "tokenizer_config.json"],
)  # fmt: skip
def test_files_of_a_checkpoint(name: str):
    assert not is_own(name)
    assert not is_own(name)
