"""Safetensors variants for vLLM, with LLM Compressor in a separate environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from powerband.core.engine import InstallPlan, Step
from powerband.core.host import Host
from powerband.core.model import Format, Model
from powerband.errors import InputError
from powerband.quantizers.base import Job, Quantizer

_JOB = Path(__file__).with_name("compress_job.py")
_TORCH = "2.13.0"
_GROUP_SIZES = (128, 64, 32)
# Modules that stay in 16 bits: the output embedding, and the routers and shared-expert gates of mixtures of experts.
UNQUANTIZED = ("lm_head", "re:.*[.]gate$", "re:.*[.]router([.]|$)", "re:.*shared_expert_gate$")


class LlmCompressor(Quantizer):
    """GPTQ, AWQ, SmoothQuant and FP8 schemes."""

    name: ClassVar[str] = "llmcompressor"
    default_version: ClassVar[str | None] = "0.14.0.1"
    help_args: ClassVar[tuple[str, ...]] = ("--help",)
    schemes: ClassVar[tuple[str, ...]] = ("w8a8-int8", "w4a16-gptq", "w4a16-awq", "fp8-dynamic")
    format: ClassVar[Format] = "safetensors"
    tools: ClassVar[tuple[str, ...]] = ("llmcompressor",)

    def install_plan(self, version: str, host: Host) -> InstallPlan:
        """Install torch (without a GPU: its CPU build), LLM Compressor, and what llama.cpp's converters need."""
        python = "{home}/bin/python"
        pip = (python, "-m", "pip", "install", "--quiet")
        torch = () if host.gpus else (Step(title=f"install torch {_TORCH}", argv=(*pip, f"torch=={_TORCH}")),)
        return InstallPlan(
            engine=self.name,
            version=version,
            build="cuda" if host.gpus else f"cpu-torch-{_TORCH}",
            steps=(
                Step(title="create a virtual environment", argv=("{python}", "-m", "venv", "{home}")),
                *torch,
                Step(title=f"install llmcompressor {version}", argv=(*pip, f"llmcompressor=={version}")),
                Step(title="install dependencies of the GGUF converters", argv=(*pip, "sentencepiece", "protobuf")),
            ),
            program=(python,),
            tools={"python": python},
        )

    def check(self, model: Model, scheme: str) -> None:
        """Require unquantized safetensors, and for 4-bit schemes rows that a group size divides."""
        if model.format != "safetensors":
            raise InputError(
                f"{scheme} needs a model in safetensors format", hint="give the folder of the original model"
            )
        if model.weight_format not in ("bf16", "f16", "f32"):
            raise InputError(
                f"{model.source} is already quantized ({model.weight_format})", hint="give the original weights"
            )
        if scheme.startswith("w4a16") and group_size(model) is None:
            rows = " and ".join(str(row) for row in _rows(model))
            raise InputError(
                f"no group size of {', '.join(map(str, _GROUP_SIZES))} divides this model's rows of {rows} weights",
                hint="use w8a8-int8 or a GGUF scheme",
            )

    def file(self, job: Job) -> str:
        """Return the variant's folder: safetensors are several files."""
        return "."

    def steps(self, job: Job, tools: Mapping[str, str]) -> tuple[Step, ...]:
        """Run `compress_job.py`, isolated (-I) because its folder has a module that shadows `llmcompressor`."""
        size = group_size(job.model) if job.scheme.startswith("w4a16") else None
        script = (tools["python"], "-I", str(_JOB))
        argv = (*script, job.weights, job.folder, job.scheme, job.samples or "", str(size or 0), *UNQUANTIZED)
        env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(job.threads)}
        return (Step(title=f"quantize to {job.scheme}", argv=argv, env=env),)


def group_size(model: Model) -> int | None:
    """Return the largest supported group size that divides every row; None if there is none."""
    return next((size for size in _GROUP_SIZES if all(row % size == 0 for row in _rows(model))), None)


def _rows(model: Model) -> tuple[int, ...]:
    """Return the lengths of the weight rows that are divided into groups."""
    return tuple(sorted({row for row in (model.hidden, model.feed_forward) if row}))


QUANTIZER = LlmCompressor()
