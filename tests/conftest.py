"""Fixtures that every test may use. Torch stays on one thread, so that tests do not fight for two cores."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ["HF_HUB_DISABLE_XET"] = "1"
# Triton decides when it is first imported whether kernels are interpreted: without a GPU, tests interpret them.
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ["TRITON_INTERPRET"] = "1"
# Compiled kernels are kept for the whole run of the tests, by all of its processes, and nowhere else.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _kept = tempfile.TemporaryDirectory(prefix="k3tool-kernels-")
    os.environ["K3TOOL_CACHE"] = _kept.name
for _name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "K3TOOL_DEBUG"):
    os.environ.pop(_name, None)

# A shell that starts the tests in the background makes them, and every process they start, deaf to interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is not a failure.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

HERE = Path(__file__).parent
SHARED = HERE.parent.parent / "shared"


@pytest.fixture(scope="session")
def mini() -> Path:
    """k3-mini-8: 8 layers in the released layout with golden results; read-only."""
    return HERE / "golden" / "k3-mini-8"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with the larger golden checkpoints and the released index, beside the checkout where there is one."""
    if not SHARED.is_dir():
        pytest.skip("the larger golden checkpoints and the released index are not beside this checkout")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def _private_hub_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's own Hub cache or token."""
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hf-home"))
