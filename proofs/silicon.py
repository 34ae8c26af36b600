"""Measured GPU rows, the roofline fitted to them, and what a hold-out says of its predictions.

The roofline is the planner's own (`powerband.plan.times`), written once more over arrays so that it can be fitted; a row's
work comes from `powerband.plan.work`. What the roofline leaves is learned from rows of other groups only.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import least_squares

from powerband import plan
from powerband.core import shape as shapes
from powerband.core.scheme import Scheme
from powerband.plan.work import Batch, Split, Steps, Work

Array = NDArray[np.float64]
DATA = Path(__file__).parent / "data" / "silicon"
BACKENDS, FORMATS = ("vllm", "sglang", "trtllm"), ("bf16", "fp8", "fp4")
MODELS = {
    "Llama-3.1-8B": "meta-llama--Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama--Meta-Llama-3.1-70B",
    "DeepSeek-V3/R1": "deepseek-ai--DeepSeek-R1",
    "gpt-oss-120b": "openai--gpt-oss-120b",
    "Qwen3-32B": "Qwen--Qwen3-32B",
    "Qwen3-235B-A22B-FP8": "Qwen--Qwen3-235B-A22B-FP8",
    "Qwen3.5-397B-A17B": "Qwen--Qwen3.5-397B-A17B",
    "MiniMax-M2.5": "MiniMaxAI--MiniMax-M2.5",
    "Kimi-K2.5": "moonshotai--Kimi-K2.5",
}  # GLM-5 has no config.json here
HOLD_OUTS = {"sweep": 8, "cell": 12, "system": 4, "family": 9}  # and into how many parts its groups are dealt


@dataclass
class Rows:
    """The rows as columns."""

    raw: list[dict[str, str]]
    values: dict[str, Array]
    decode: dict[str, Array]  # the work of a step that writes one token of every answer
    prompt: dict[str, Array]  # the work of reading one prompt

    def __len__(self) -> int:
        return len(self.raw)

    def codes(self, *names: str) -> NDArray[np.int64]:
        """Number the groups that rows with the same words form."""
        words = ["|".join(row[name] for name in names) for row in self.raw]
        numbers = {word: number for number, word in enumerate(sorted(set(words)))}
        return np.array([numbers[word] for word in words])


def read(*, scored: bool = True) -> Rows:
    """Read the rows, and work out what each of them moved and computed."""
    schemes = {one.name: one for one in plan.all_schemes()}
    known: dict[Any, Steps] = {}
    raw, values, decode, prompt = [], [], [], []
    with (DATA / "silicon_clean.csv").open() as stream:
        for row in csv.DictReader(stream):
            if row["family"] not in MODELS or (scored and row["scored"] != "True"):
                continue
            row["cell"] = f"{row['family']} {row['system']}"
            scheme, device = _scheme(row, schemes), plan.device(row["system"].replace("_", "-"))
            split, multiplies_in = _split(row), scheme.multiplies_in(device.tflops)
            small_kv = row["backend"] == "trtllm" and scheme.computes_in in ("fp8", "fp4")
            kv_bytes = 1.0 if small_kv or row["model_path"].startswith("nvidia/") else 2.0
            key = (row["family"], scheme.name, scheme.linear_bits, split, kv_bytes)
            if key not in known:
                config = json.loads((DATA / "models" / f"{MODELS[row['family']]}.json").read_text())
                shape = shapes.from_config_json(config)
                assert shape is not None
                known[key] = Steps(shape, scheme, split, kv_bytes=kv_bytes)
            steps, isl, osl = known[key], float(row["isl"]), float(row["osl"])
            users = float(row["conc"] or row["batch_size"])
            raw.append(row)
            decode.append(steps(Batch(decodes=users, context=isl + osl / 2)))
            prompt.append(steps(Batch(prefill=isl, behind=isl / 2, firsts=1)))
            values.append(
                {
                    "ttft": float(row["silicon_ttft_ms"]) / 1e3,
                    "tpot": float(row["silicon_tpot_ms"]) / 1e3,
                    "users": users / split.data,
                    "isl": isl,
                    "osl": osl,
                    "tp": split.tensor,
                    "ep": split.expert,
                    "dp": split.data,
                    "bandwidth": device.bandwidth,
                    "flops": device.flops(multiplies_in),
                    "bf16": device.flops("bf16"),
                    "link": device.link,
                    "sparse": float(steps.shape.experts > 0),
                    "format": FORMATS.index(multiplies_in),
                    "backend": BACKENDS.index(row["backend"]),
                    "blackwell": float(row["system"].startswith("b")),
                    "int4": float(row["gemm_quant_mode"].startswith("int4")),
                }
            )
    return Rows(raw, _columns(values), _work(decode), _work(prompt))


def _scheme(row: dict[str, str], schemes: dict[str | None, Scheme]) -> Scheme:
    mode, precision = row["gemm_quant_mode"], row["precision"]
    if row["family"] == "gpt-oss-120b":
        return schemes["mxfp4"]
    if mode.startswith("fp8") or precision == "fp8":
        return schemes["fp8-dynamic"]
    if mode == "nvfp4" or precision == "fp4":
        latent = row["family"] in ("DeepSeek-V3/R1", "Kimi-K2.5")  # their attention is not quantized
        update = {"linear_bits": 16.0, "experts_bits": 4.5} if latent else {}
        return schemes["nvfp4"].model_copy(update=update)
    if mode == "int4_wo":
        return schemes["w4a16-gptq"].model_copy(update={"linear_bits": 16.0, "experts_bits": 4.5})
    return schemes["bf16"]


def _split(row: dict[str, str]) -> Split:
    expert = int(row["moe_ep_size"] or 1) if row["family"] not in ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-32B") else 1
    return Split(tensor=int(row["tp_size"]), data=int(row["attention_dp_size"] or 1), expert=expert)


def _columns(values: list[dict[str, float]]) -> dict[str, Array]:
    return {name: np.array([one[name] for one in values], float) for name in values[0]}


def _work(found: list[Work]) -> dict[str, Array]:
    return {name: np.array([getattr(one, name) for one in found], float) for name in Work._fields}


# Where a fit begins and how far it may go, in logarithms: shares are near what engines reach, overheads are looser.
START: dict[str, tuple[float, float]] = {
    "bandwidth": (0.8, 0.35), "experts_bandwidth": (0.6, 0.35), "kv_bandwidth": (0.6, 0.35), "attention": (0.3, 0.35),
    "bf16": (0.6, 0.35), "fp8": (0.5, 0.35), "fp4": (0.35, 0.35), "experts": (0.5, 0.35), "int4": (0.5, 0.7),
    "step vllm": (3e-3, 0.7), "step sglang": (2e-3, 0.7), "step trtllm": (1e-3, 0.7),
    "layer vllm": (1.5e-5, 0.7), "layer sglang": (1.5e-5, 0.7), "layer trtllm": (1e-5, 0.7),
    "experts_layer": (3e-5, 0.7), "sequence": (1e-5, 0.7), "round": (1.2e-5, 0.7), "link": (0.5, 0.35),
    "exchange": (0.5, 0.35), "overlap": (2.0, 0.35), "mixing": (0.8, 0.7),
    "queue": (0.3, 0.7), "queue power": (0.7, 0.7), "under way": (0.5, 0.7),
    "request vllm": (0.02, 0.7), "request sglang": (0.02, 0.7), "request trtllm": (0.02, 0.7),
    "blackwell layer": (1.0, 0.25), "blackwell round": (1.0, 0.25), "blackwell kv": (1.0, 0.25),
    "blackwell bandwidth": (1.0, 0.25),
}  # fmt: skip
NAMES = tuple(START)
_CENTRE = np.log([value for value, _ in START.values()])
_REACH = np.array([reach for _, reach in START.values()])


class Roofline:
    """The planner's roofline over all rows at once; coefficients are logarithms."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.group = rows.codes("family", "system", "backend", "precision")

    def predict(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """Return TPOT and TTFT in a closed loop, and the times of a decode step and of a prompt."""
        c, v = dict(zip(NAMES, np.exp(x), strict=True)), self.rows.values
        step, prompt = self._seconds(self.rows.decode, c), self._seconds(self.rows.prompt, c)
        users = v["users"]
        tpot = step + users * prompt / v["osl"] * c["mixing"]
        power = c["queue power"] / (1 + c["queue power"])
        ttft = self._of("request", c) + prompt * (1 + c["queue"] * users**power) + step * c["under way"]
        return tpot, ttft, step, prompt

    def _of(self, what: str, c: dict[str, float]) -> Array:
        return np.array([c[f"{what} {name}"] for name in BACKENDS])[self.rows.values["backend"].astype(int)]

    def _seconds(self, work: dict[str, Array], c: dict[str, float]) -> Array:
        v, newer = self.rows.values, self.rows.values["blackwell"]
        read = np.where(v["sparse"] > 0, c["experts_bandwidth"], c["bandwidth"]) * c["blackwell bandwidth"] ** newer
        compute = np.array([c[name] for name in FORMATS])[v["format"].astype(int)]
        compute = compute * np.where(v["sparse"] > 0, c["experts"], 1) * c["int4"] ** v["int4"]
        power = 1 + c["overlap"]
        reading, computing = work["weight_bytes"] / (v["bandwidth"] * read), work["flops"] / (v["flops"] * compute)
        weights = (reading**power + computing**power) ** (1 / power)
        kv = work["kv_bytes"] / (v["bandwidth"] * c["kv_bandwidth"] * c["blackwell kv"] ** newer)
        sending = work["rounds"] * c["round"] * c["blackwell round"] ** newer
        sending = sending + work["reduce_bytes"] / (v["link"] * c["link"])
        sending = sending + work["exchange_bytes"] / (v["link"] * c["exchange"])
        layer = (self._of("layer", c) + v["sparse"] * c["experts_layer"]) * c["blackwell layer"] ** newer
        fixed = self._of("step", c) + layer * work["layers"] + work["sequences"] * c["sequence"]
        return np.asarray(weights + kv + work["attention_flops"] / (v["bf16"] * c["attention"]) + sending + fixed)

    def fit(self, rows: NDArray[np.int64]) -> Array:
        """Fit to some rows; rows of one group share an offset that is nobody's coefficient, so it is mostly taken out."""
        v = self.rows.values

        def errors(x: Array) -> Array:
            tpot, ttft, _, _ = self.predict(x)
            first = _white(np.clip(np.log(tpot / v["tpot"])[rows], -1.5, 1.5), self.group[rows], 0.2, 0.1)
            second = _white(np.clip(np.log(ttft / v["ttft"])[rows], -2, 2), self.group[rows], 0.12, 0.3)
            return np.concatenate([first, second, (x - _CENTRE) / _REACH])

        found = least_squares(errors, _CENTRE, loss="soft_l1", f_scale=1.5, max_nfev=60)
        return np.asarray(found.x)


def _white(errors: Array, group: NDArray[np.int64], between: float, within: float) -> Array:
    """Scale errors that share an offset within a group so that they count as independent ones."""
    size = np.bincount(group)
    mean = np.bincount(group, errors) / np.maximum(size, 1)
    part = 1 - np.sqrt(within**2 / (within**2 + size * between**2))
    return np.asarray((errors - (part * mean)[group]) / within)


def folds(rows: Rows, hold_out: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield which rows are known and which are asked for; whole groups are held out."""
    names = np.array([row[hold_out] for row in rows.raw])
    groups = sorted(set(names))
    np.random.default_rng(0).shuffle(groups)
    parts = min(HOLD_OUTS[hold_out], len(groups))
    for part in range(parts):
        asked = np.isin(names, groups[part::parts])
        yield np.flatnonzero(~asked), np.flatnonzero(asked)


def features(rows: Rows, step: Array, prompt: Array) -> Array:
    """What the rest is learned from: loads, splits, and which part of a step each kind of work is. No names."""
    v, d, p, log = rows.values, rows.decode, rows.prompt, np.log
    columns = [
        log(v["users"]), log(v["isl"]), log(v["osl"]), log(v["tp"]), log(v["dp"]), log(v["ep"]), v["backend"],
        v["format"], v["sparse"], log(d["weight_bytes"] / v["bandwidth"] / step),
        log(d["kv_bytes"] / v["bandwidth"] / step), log(d["flops"] / v["flops"] / step + 1e-6),
        log(v["users"] * prompt / v["osl"] / step), log(p["flops"] / v["flops"] / prompt),
        log(p["weight_bytes"] / v["bandwidth"] / prompt), log(p["attention_flops"] / v["bf16"] / prompt + 1e-6),
        log(d["reduce_bytes"] / v["link"] / step + 1e-4), d["rounds"] / 100,
        log(d["exchange_bytes"] / v["link"] / step + 1e-4), log(d["layers"]), log(v["bandwidth"] / v["flops"] * 1e3),
        log(step), log(prompt), log(v["users"] * v["isl"]),
    ]  # fmt: skip
    return np.stack(columns, 1)


def boosted(known: NDArray[np.int64], asked: NDArray[np.int64], rest: Array, table: Array, group: Array) -> Array:
    """Learn the rest by boosted trees, every group counting for the square root of its size."""
    size = np.bincount(group[known].astype(int))[group[known].astype(int)]
    found = []
    for seed in range(3):
        options = dict(  # noqa: C408
            objective="l1", learning_rate=0.05, num_leaves=15, min_data_in_leaf=12, feature_fraction=0.6,
                       bagging_fraction=0.8, bagging_freq=1, lambda_l2=2.0, verbose=-1, seed=seed)  # fmt: skip
        data = lightgbm.Dataset(table[known], rest[known], weight=1 / np.sqrt(size))
        found.append(lightgbm.train(options, data, 300).predict(table[asked]))
    return np.asarray(np.mean(found, 0))


class Neighbours:
    """A Gaussian process over the rest: rows of the same model, device, engine and split tell most of each other."""

    def __init__(self, rows: Rows, step: Array, prompt: Array) -> None:
        v, d = rows.values, rows.decode
        loads = np.stack([np.log(v[name]) for name in ("users", "isl", "osl", "tp", "ep", "dp")], 1)
        self.loads = (loads - loads.mean(0)) / np.maximum(loads.std(0), 0.3)
        parts = features(rows, step, prompt)[:, [9, 10, 11, 12, 13, 21, 22]]
        parts = np.column_stack([parts, d["rounds"] / 200])
        self.parts = (parts - parts.mean(0)) / parts.std(0)
        groups = (("backend",), ("family", "backend"), ("family", "system", "backend", "precision"),
                  ("family", "system", "backend", "precision", "tp_size", "moe_ep_size", "attention_dp_size"),
                  ("system", "backend"), ("precision", "backend", "system"), ("backend", "backend_version"))  # fmt: skip
        self.groups = [rows.codes(*names) for names in groups]

    def kernel(self, a: NDArray[np.int64], b: NDArray[np.int64], weights: Array) -> Array:
        """Return how alike rows are expected to be."""
        same = [(group[a][:, None] == group[b][None]).astype(float) for group in self.groups]
        near = _near(self.parts[a], self.parts[b], 1.5)
        kinds = [near, same[0] * near, same[1] * (0.5 + 0.5 * _near(self.parts[a], self.parts[b], 2.0)),
                 same[2] * (0.5 + _near(self.loads[a], self.loads[b], 1.2)),
                 same[3] * (0.5 + _near(self.loads[a], self.loads[b], 0.8)), same[4], same[5], same[6]]  # fmt: skip
        return np.asarray(sum(weight * kind for weight, kind in zip(weights, kinds, strict=True)))

    def __call__(self, known: Any, asked: Any, rest: Array, weights: Array, noise: float) -> Array:
        middle = float(np.median(rest[known]))
        table = self.kernel(known, known, weights) + noise * np.eye(len(known))
        solved = cho_solve(cho_factor(table), rest[known] - middle)
        return np.asarray(middle + self.kernel(asked, known, weights) @ solved)


def _near(a: Array, b: Array, scale: float) -> Array:
    squares = ((a / scale) ** 2).sum(1)[:, None] + ((b / scale) ** 2).sum(1)[None] - 2 * (a / scale) @ (b / scale).T
    return np.asarray(np.exp(-0.5 * np.maximum(squares, 0)))


_ALIKE = {"tpot": (np.array([0.03, 0.02, 0.03, 0.04, 0.02, 0.01, 0.01, 0.005]), 0.002),
          "ttft": (np.array([0.06, 0.05, 0.06, 0.08, 0.05, 0.03, 0.02, 0.02]), 0.02)}  # fmt: skip
Prediction = dict[str, Array]


def held_out(
    rows: Rows, hold_out: str, *, say: Callable[[str], None] = lambda _: None
) -> tuple[Prediction, Prediction]:
    """Predict every row from other groups: by the roofline alone, and with what the other groups taught of the rest."""
    roofline, alone, taught = Roofline(rows), {}, {}
    for name in ("tpot", "ttft"):
        alone[name], taught[name] = np.zeros(len(rows)), np.zeros(len(rows))
    for number, (known, asked) in enumerate(folds(rows, hold_out)):
        say(f"{hold_out} {number + 1}")
        tpot, ttft, step, prompt = roofline.predict(roofline.fit(known))
        table, alike = features(rows, step, prompt), Neighbours(rows, step, prompt)
        for name, predicted in (("tpot", tpot), ("ttft", ttft)):
            rest = np.log(rows.values[name] / predicted)
            learned = boosted(known, asked, rest, table, roofline.group)
            if hold_out == "sweep":  # the model and the GPU are known: their other rows say most
                learned = (learned + alike(known, asked, rest, *_ALIKE[name])) / 2
            alone[name][asked] = predicted[asked]
            taught[name][asked] = predicted[asked] * np.exp(learned)
    return alone, taught


def coefficients(rows: Rows, *, blackwell: bool) -> dict[str, Any]:
    """Return what the planner's catalogue keeps of a fit to all rows: vLLM's coefficients, and how far off they were."""
    roofline = Roofline(rows)
    c = dict(zip(NAMES, np.exp(roofline.fit(np.arange(len(rows)))), strict=True))
    newer = 1.0 if blackwell else 0.0
    alone, _ = held_out(rows, "cell")
    vllm = rows.values["backend"] == BACKENDS.index("vllm")

    def spread(metric: str) -> dict[str, float]:
        ratio = (rows.values[metric] / alone[metric])[vllm]
        low, high = np.quantile(ratio, [0.1, 0.9])
        return {"low": round(float(low), 3), "high": round(float(high), 3), "of": int(vllm.sum())}

    found = {
        "bandwidth": c["bandwidth"] * c["blackwell bandwidth"] ** newer,
        "experts_bandwidth": c["experts_bandwidth"] / c["bandwidth"],
        "kv_bandwidth": c["kv_bandwidth"] * c["blackwell kv"] ** newer,
        "compute": c["bf16"],
        "compute_in": {"fp8": c["fp8"], "fp4": c["fp4"]},
        "experts": c["experts"],
        "attention": c["attention"],
        "overlap": 1 + c["overlap"],
        "step_s": c["step vllm"],
        "layer_s": c["layer vllm"] * c["blackwell layer"] ** newer,
        "experts_layer_s": c["experts_layer"] * c["blackwell layer"] ** newer,
        "sequence_s": c["sequence"],
        "round_s": c["round"] * c["blackwell round"] ** newer,
        "link": c["link"],
        "exchange": c["exchange"],
        "request_s": c["request vllm"],
    }
    return {**_rounded(found), "ttft": spread("ttft"), "tpot": spread("tpot")}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.3g}")
