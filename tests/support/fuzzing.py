"""Fuzzers for the code that reads untrusted input: libFuzzer with sanitizers for C, Atheris for Python."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from powerband.runtime import installations
from support import fuzz_seeds

NATIVE = {
    "wire": "src/powerband/load/_wire.c",
    "relay": "src/powerband/serve/_relay.c",
    "counting": "src/powerband/core/_counting.c",
}
PARSERS = ("documents", "gguf", "config", "metrics", "sse", "results", "requests")
TARGETS = (*NATIVE, *PARSERS)
ENVIRONMENT = ("schemathesis==4.32.5", "atheris==3.0.0")
MAX_INPUT_BYTES, MAX_MEMORY_MB, MAX_INPUT_S = 4096, 1024, 10
SANITIZERS = "address,undefined"
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Result:
    """What a fuzzer did; `finding` is its report, empty if it found nothing."""

    target: str
    inputs: int
    seconds: int
    edges: int
    finding: str

    def sentence(self) -> str:
        """Return the result as one line."""
        verdict = "A FINDING" if self.finding else "no finding"
        return (
            f"{self.target:10} {self.inputs:>11,} inputs in {self.seconds} s, {self.edges:,} edges covered: {verdict}"
        )


def fuzz(target: str, seconds: int, *, runs: int = -1) -> Result:
    """Fuzz a target for this long or for a number of inputs, from its seeds and what earlier runs learned."""
    home, corpus = _folders(target)
    findings = home / "findings"
    findings.mkdir(exist_ok=True)
    dictionary = home / "dictionary"
    dictionary.write_text("".join(f'"{_escaped(word)}"\n' for word in fuzz_seeds.WORDS[target]))
    limits = [f"-max_len={MAX_INPUT_BYTES}", f"-rss_limit_mb={MAX_MEMORY_MB}", f"-timeout={MAX_INPUT_S}"]
    options = [
        f"-max_total_time={seconds}",
        f"-runs={runs}",
        f"-dict={dictionary}",
        f"-artifact_prefix={findings}/",
        *limits,
    ]
    argv = [*_program(target, home), *options, str(corpus)]
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", env=_environment(target), cwd=home)
    ran = re.search(r"Done (\d+) runs in (\d+) second", done.stderr)
    inputs, took_s = (int(ran[1]), int(ran[2])) if ran else (0, 0)
    edges = max(map(int, re.findall(r"cov: (\d+)", done.stderr)), default=0)
    failed = done.returncode != 0 or ran is None
    return Result(target, inputs, took_s, edges, f"{' '.join(argv)}\n{done.stderr[-6000:]}" if failed else "")


def line_coverage(target: str) -> str:
    """Return the rows of llvm-cov for a C target, run over its corpus: regions, functions, lines, branches."""
    folder, corpus = _folders(target)
    program = _build(target, folder, ("-fsanitize=fuzzer", "-fprofile-instr-generate", "-fcoverage-mapping"))
    env = {**os.environ, "LLVM_PROFILE_FILE": str(folder / "raw")}
    subprocess.run([str(program), "-runs=0", str(corpus)], check=True, capture_output=True, env=env)
    tools = Path(clang()).resolve().parent
    profile = folder / "profile"
    subprocess.run([str(tools / "llvm-profdata"), "merge", "-o", str(profile), str(folder / "raw")], check=True)
    argv = [str(tools / "llvm-cov"), "report", str(program), f"-instr-profile={profile}"]
    told = subprocess.run([*argv, "-show-functions", str(_ROOT / NATIVE[target])], capture_output=True, text=True)
    return told.stdout


def home() -> Path:
    """Return the environment with Atheris and Schemathesis, made where it is missing."""
    name = "fuzzers-" + "-".join(one.split("==")[1] for one in ENVIRONMENT)
    place = installations.cache_root() / "tools" / name
    if not (place / "made").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *ENVIRONMENT], check=True)
        (place / "made").touch()
    return place


def clang() -> str:
    """Return the compiler's path; exit with a hint without one."""
    found = shutil.which("clang")
    if found is None:
        sys.exit("error: clang was not found\nhint: apt-get install clang libclang-rt-14-dev")
    return found


def sanitized_copy(folder: Path) -> dict[str, str]:
    """Copy the sources with extensions built with the sanitizers; return the environment in which Python uses them."""
    shutil.copytree(_ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    flags = ["-g", "-O1", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=undefined", "-shared-libasan"]
    for source in NATIVE.values():
        argv = [clang(), *flags, "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}", source]
        subprocess.run([*argv, "-o", str(folder / source.replace(".c", ".abi3.so"))], check=True, cwd=_ROOT)
    library = f"libclang_rt.asan-{platform.machine()}.so"
    told = subprocess.run([clang(), f"-print-file-name={library}"], check=True, capture_output=True, text=True)
    options = "detect_leaks=0:abort_on_error=0:exitcode=99"  # the interpreter itself leaks at its end
    python = os.pathsep.join([str(folder / "src"), str(_ROOT / "tests")])
    sanitized = {"LD_PRELOAD": told.stdout.strip(), "ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"}
    return {**os.environ, **sanitized, "PYTHONPATH": python}


def _folders(target: str) -> tuple[Path, Path]:
    """Return the folder of a target in the cache and its corpus, with the seeds in it."""
    home = installations.cache_root() / "fuzz" / target
    corpus = home / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(fuzz_seeds.SEEDS[target]):
        (corpus / f"seed-{number}").write_bytes(seed)
    return home, corpus


def _program(target: str, home_folder: Path) -> list[str]:
    if target not in NATIVE:
        return [str(home() / "bin" / "python"), str(_ROOT / "tests/fuzz/parsers.py"), target]
    return [str(_build(target, home_folder))]


def _environment(target: str) -> dict[str, str]:
    paths = [_ROOT / "src", _ROOT / "tests", sysconfig.get_path("purelib")]
    python = {} if target in NATIVE else {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return {**os.environ, **python, "ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"}


_SANITIZED = (f"-fsanitize=fuzzer,{SANITIZERS}", "-fno-sanitize-recover=undefined")


def _build(target: str, folder: Path, options: tuple[str, ...] = _SANITIZED) -> Path:
    """Compile the target and its driver; a build of the same sources with the same options is used again."""
    driver, source = _ROOT / f"tests/fuzz/{target}.c", _ROOT / NATIVE[target]
    content = driver.read_bytes() + source.read_bytes() + " ".join(options).encode()
    digest = hashlib.sha256(content).hexdigest()[:16]
    program = folder / f"fuzz-{digest}"
    if program.exists():
        return program
    compiled, stubs = program.with_suffix(".o"), program.with_suffix(".c")
    flags = [clang(), "-g", "-O1", *options]
    include = sysconfig.get_path("include")
    subprocess.run([*flags, f"-I{include}", "-c", str(driver), "-o", str(compiled)], check=True)
    undefined = subprocess.run(["nm", "--undefined-only", str(compiled)], check=True, capture_output=True, text=True)
    names = re.findall(r"\b_?Py\w+", undefined.stdout)  # of the interpreter, which a driver does not call
    stubs.write_text("".join(f"char {name}[256];\n" for name in names))
    subprocess.run([*flags, "-w", str(compiled), str(stubs), "-o", str(program)], check=True)
    return program


def _escaped(word: bytes) -> str:
    return "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in word)
