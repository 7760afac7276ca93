"""Imported by the process from which ranks are forked: what every rank would import and compile again."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as ranks set it before they import torch

import torch

from k3tool.cli import app  # noqa: F401
from k3tool.config import K3Config
from k3tool.generate import Session  # noqa: F401
from k3tool.kernels.warm import warm_up
from k3tool.synthetic import tiny_config

torch.set_num_threads(1)
with torch.inference_mode():
    warm_up(K3Config.from_dict(tiny_config()), torch.float32)
