"""Run by vLLM's interpreter: copy a model whose weights were once 4-bit, each spread evenly within its former step.

Such weights lie on a grid that 5-bit formats hit exactly. A published model's do not: its weights lie anywhere between.
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK, STEPS = 32, 15  # of Q4_1: weights that share a scale, and the steps between their least and greatest
source, target = Path(sys.argv[1]), Path(sys.argv[2])
shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
torch.manual_seed(1)
for file in source.glob("*.safetensors"):
    weights = load_file(file)
    for name, weight in weights.items():
        if weight.ndim == 2:
            blocks = weight.float().reshape(-1, BLOCK)
            step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / STEPS
            spread = blocks + step * (torch.rand_like(blocks) - 0.5)
            weights[name] = spread.reshape(weight.shape).to(weight.dtype)
    save_file(weights, target / file.name, metadata={"format": "pt"})
