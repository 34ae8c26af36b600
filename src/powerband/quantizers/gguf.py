"""GGUF variants by llama.cpp's own tools: converted, weighed by an importance matrix, quantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from powerband.core.engine import Step
from powerband.core.model import Format, Model
from powerband.errors import InputError
from powerband.quantizers.base import Job, Quantizer, partial

_CHUNKS, _CHUNK = 64, 512  # of calibration text, and the tokens of each


class Gguf(Quantizer):
    """k-quants and their kin."""

    name: ClassVar[str] = "gguf"
    schemes: ClassVar[tuple[str, ...]] = (
        "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_nl", "q3_k_m", "q2_k"
    )  # fmt: skip
    format: ClassVar[Format] = "gguf"
    tools: ClassVar[tuple[str, ...]] = ("llamacpp", "llmcompressor")

    def check(self, model: Model, scheme: str) -> None:
        """A quantized GGUF is not quantized again: its errors would add up without a word."""
        if model.format == "gguf" and model.numbers not in ("f16", "bf16", "f32"):
            raise InputError(
                f"{model.source} is quantized already ({model.numbers})",
                hint="give the model's own safetensors, or its f16 or bf16 GGUF",
            )

    def file(self, job: Job) -> str:
        """One file."""
        return f"{job.model.name}.{job.scheme.upper()}.gguf"

    def steps(self, job: Job, tools: Mapping[str, str]) -> tuple[Step, ...]:
        """Convert unless it is a GGUF; weigh where there is text; quantize."""
        target, source, found = f"{job.folder}/{self.file(job)}", job.model.source, []
        if job.model.format != "gguf":
            base = "" if job.scheme == "f16" else f"{job.shared}/base.gguf"
            found.append(_convert(job, tools, base or target, kept=base))
            source = base
        if job.scheme == "f16" and job.model.format != "gguf":
            return tuple(found)
        matrix: tuple[str, ...] = ()
        if job.plain and job.scheme not in ("f16", "q8_0"):
            path = f"{job.shared}/importance.gguf"
            weigh = (tools["llama-imatrix"], "--model", source, "--file", job.plain, "--output-file", partial(path),
                     "--ctx-size", str(_CHUNK), "--chunks", str(_CHUNKS), "--threads", str(job.jobs))  # fmt: skip
            found.append(Step(title="weigh each weight by the calibration text", argv=weigh, makes=path))
            matrix = ("--imatrix", path)
        quantize = (tools["llama-quantize"], *matrix, source, target, job.scheme.upper(), str(job.jobs))
        found.append(Step(title=f"quantize to {job.scheme}", argv=quantize))
        return tuple(found)


def _convert(job: Job, tools: Mapping[str, str], target: str, *, kept: str) -> Step:
    """Return the command that makes a GGUF of 16-bit numbers."""
    converters = tools["converters"]
    convert = (tools["python"], f"{converters}/convert_hf_to_gguf.py", job.model.source)
    argv = (*convert, "--outfile", partial(kept) if kept else target, "--outtype", "bf16" if kept else "f16")
    env = {"PYTHONPATH": f"{converters}/gguf-py:{converters}", "HF_HUB_OFFLINE": "1"}
    return Step(title="convert to GGUF", argv=argv, env=env, makes=kept)


QUANTIZER = Gguf()
