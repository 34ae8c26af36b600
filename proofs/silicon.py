"""Measured GPU rows, the roofline fitted to them, and the errors of held-out predictions.

The roofline is the planner's, written again over arrays so that it can be fitted. The planner itself is scored:
`powerband.plan.closed_loop` with coefficients and `powerband.plan.residual_model` with trees, both fitted to rows of
other groups only.
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
from scipy.optimize import least_squares

from powerband import plan
from powerband.core import shape as shapes
from powerband.core.coefficients import Coefficients, Spread
from powerband.core.device import Device
from powerband.core.scheme import Scheme
from powerband.plan import residual_model
from powerband.plan.closed_loop import steady_state
from powerband.plan.residual_model import ENGINES, FORMATS, ResidualModel
from powerband.plan.step_time import StepTimes
from powerband.plan.step_work import Batch, Split, Steps, Work
from powerband.store.schemes import all_schemes

Array = NDArray[np.float64]
DATA = Path(__file__).parent / "data" / "silicon"
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
}  # GLM-5 has no config.json in the data
HOLD_OUTS = {"sweep": 8, "cell": 12, "system": 4, "family": 9}  # and the number of folds


@dataclass
class Rows:
    """The measured rows, as columns."""

    raw: list[dict[str, str]]
    served: list[tuple[Steps, Device]]
    values: dict[str, Array]
    decode: dict[str, Array]  # the work of one decode step of all sequences
    prompt: dict[str, Array]  # the work of the prefill of one prompt

    def __len__(self) -> int:
        return len(self.raw)

    def codes(self, *names: str) -> NDArray[np.int64]:
        """Return a group number for each row; rows with equal values in these columns form a group."""
        words = ["|".join(row[name] for name in names) for row in self.raw]
        numbers = {word: number for number, word in enumerate(sorted(set(words)))}
        return np.array([numbers[word] for word in words])


def read(*, scored: bool = True) -> Rows:
    """Read the rows and compute the work of each."""
    schemes = {one.name: one for one in all_schemes()}
    known: dict[Any, Steps] = {}
    raw, served, values, decode, prompt = [], [], [], [], []
    with (DATA / "silicon_clean.csv").open() as stream:
        for row in csv.DictReader(stream):
            if row["family"] not in MODELS or (scored and row["scored"] != "True"):
                continue
            row["cell"] = f"{row['family']} {row['system']}"
            scheme, device = _scheme(row, schemes), plan.device(row["system"].replace("_", "-"))
            split, dtype = _split(row), scheme.compute_dtype(device.tflops)
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
            served.append((steps, device))
            decode.append(steps(Batch(decodes=users, decode_context=isl + osl / 2)))
            prompt.append(steps(Batch(prefill_tokens=isl, prefill_context=isl / 2, finished_prompts=1)))
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
                    "flops": device.flops(dtype),
                    "bf16": device.flops("bf16"),
                    "link": device.link,
                    "sparse": float(steps.shape.experts > 0),
                    "format": FORMATS.index(dtype),
                    "backend": ENGINES.index(row["backend"]),
                    "blackwell": float(row["system"].startswith("b")),
                    "weight_only": float(dtype == "bf16" and scheme.expert_bits() < 8),
                }
            )
    return Rows(raw, served, _columns(values), _work(decode), _work(prompt))


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


# Start value of each coefficient and the scale of its deviation (log); shares vary less than overheads.
START: dict[str, tuple[float, float]] = {
    "bandwidth": (0.8, 0.35), "experts_bandwidth": (0.6, 0.35), "kv_bandwidth": (0.6, 0.35), "attention": (0.3, 0.35),
    "bf16": (0.6, 0.35), "fp8": (0.5, 0.35), "fp4": (0.35, 0.35), "experts": (0.5, 0.35), "weight_only": (0.5, 0.7),
    "step vllm": (3e-3, 0.7), "step sglang": (2e-3, 0.7), "step trtllm": (1e-3, 0.7),
    "layer vllm": (1.5e-5, 0.7), "layer sglang": (1.5e-5, 0.7), "layer trtllm": (1e-5, 0.7),
    "experts_layer": (3e-5, 0.7), "sequence": (1e-5, 0.7), "collective": (1.2e-5, 0.7), "all_reduce": (0.5, 0.35),
    "all_to_all": (0.5, 0.35), "overlap": (2.0, 0.35), "interference": (0.8, 0.7),
    "queue": (0.3, 0.7), "queue exponent": (0.7, 0.7), "steps before prefill": (0.5, 0.7),
    "request vllm": (0.02, 0.7), "request sglang": (0.02, 0.7), "request trtllm": (0.02, 0.7),
    "blackwell layer": (1.0, 0.25), "blackwell collective": (1.0, 0.25), "blackwell kv": (1.0, 0.25),
    "blackwell bandwidth": (1.0, 0.25),
}  # fmt: skip
NAMES = tuple(START)
_CENTRE = np.log([value for value, _ in START.values()])
_SCALE = np.array([scale for _, scale in START.values()])


class Roofline:
    """The planner's roofline over all rows at once, with the logarithms of the coefficients as parameters."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.group = rows.codes("family", "system", "backend", "precision")

    def predict(self, x: Array) -> tuple[Array, Array, Array, Array]:
        """Return TPOT and TTFT of a closed loop, and the times of a decode step and of a prefill."""
        c, v = dict(zip(NAMES, np.exp(x), strict=True)), self.rows.values
        step, prompt = self._seconds(self.rows.decode, c), self._seconds(self.rows.prompt, c)
        users = v["users"]
        tpot = step + users * prompt / v["osl"] * c["interference"]
        power = c["queue exponent"] / (1 + c["queue exponent"])
        ttft = self._of("request", c) + prompt * (1 + c["queue"] * users**power) + step * c["steps before prefill"]
        return tpot, ttft, step, prompt

    def _of(self, what: str, c: dict[str, float]) -> Array:
        return np.array([c[f"{what} {name}"] for name in ENGINES])[self.rows.values["backend"].astype(int)]

    def _seconds(self, work: dict[str, Array], c: dict[str, float]) -> Array:
        v, newer = self.rows.values, self.rows.values["blackwell"]
        read = np.where(v["sparse"] > 0, c["experts_bandwidth"], c["bandwidth"]) * c["blackwell bandwidth"] ** newer
        compute = np.array([c[name] for name in FORMATS])[v["format"].astype(int)]
        compute = compute * np.where(v["sparse"] > 0, c["experts"], 1) * c["weight_only"] ** v["weight_only"]
        power = 1 + c["overlap"]
        reading, computing = work["weight_bytes"] / (v["bandwidth"] * read), work["flops"] / (v["flops"] * compute)
        weights = (reading**power + computing**power) ** (1 / power)
        kv = work["kv_bytes"] / (v["bandwidth"] * c["kv_bandwidth"] * c["blackwell kv"] ** newer)
        sending = work["collectives"] * c["collective"] * c["blackwell collective"] ** newer
        sending = sending + work["all_reduce_bytes"] / (v["link"] * c["all_reduce"])
        sending = sending + work["all_to_all_bytes"] / (v["link"] * c["all_to_all"])
        layer = (self._of("layer", c) + v["sparse"] * c["experts_layer"]) * c["blackwell layer"] ** newer
        fixed = self._of("step", c) + layer * work["layers"] + work["sequences"] * c["sequence"]
        return np.asarray(weights + kv + work["attention_flops"] / (v["bf16"] * c["attention"]) + sending + fixed)

    def fit(self, rows: NDArray[np.int64]) -> Array:
        """Fit to some rows; the offset that rows of one group share is not a coefficient, so it is mostly removed."""
        v = self.rows.values

        def errors(x: Array) -> Array:
            tpot, ttft, _, _ = self.predict(x)
            first = _white(np.clip(np.log(tpot / v["tpot"])[rows], -1.5, 1.5), self.group[rows], 0.2, 0.1)
            second = _white(np.clip(np.log(ttft / v["ttft"])[rows], -2, 2), self.group[rows], 0.12, 0.3)
            return np.concatenate([first, second, (x - _CENTRE) / _SCALE])

        found = least_squares(errors, _CENTRE, loss="soft_l1", f_scale=1.5, max_nfev=60)
        return np.asarray(found.x)


def _white(errors: Array, group: NDArray[np.int64], between: float, within: float) -> Array:
    """Whiten errors that share an offset within a group, so that they count as independent."""
    size = np.bincount(group)
    mean = np.bincount(group, errors) / np.maximum(size, 1)
    part = 1 - np.sqrt(within**2 / (within**2 + size * between**2))
    return np.asarray((errors - (part * mean)[group]) / within)


def folds(rows: Rows, hold_out: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the training rows and the held-out rows of each fold; whole groups are held out."""
    names = np.array([row[hold_out] for row in rows.raw])
    groups = sorted(set(names))
    np.random.default_rng(0).shuffle(groups)
    parts = min(HOLD_OUTS[hold_out], len(groups))
    for part in range(parts):
        held = np.isin(names, groups[part::parts])
        yield np.flatnonzero(~held), np.flatnonzero(held)


Prediction = dict[str, Array]
_LATENCIES = ("ttft", "tpot")
_SHRINK = 5  # the offset of a configuration with this many rows is halved


def coefficients(x: Array, *, engine: str, blackwell: float) -> Coefficients:
    """Return a fit as a Coefficients document."""
    c = dict(zip(NAMES, np.exp(x), strict=True))
    layer = c["blackwell layer"] ** blackwell
    return Coefficients(
        engine=engine,
        bandwidth=c["bandwidth"] * c["blackwell bandwidth"] ** blackwell,
        experts_bandwidth=c["experts_bandwidth"] / c["bandwidth"],
        kv_bandwidth=c["kv_bandwidth"] * c["blackwell kv"] ** blackwell,
        compute=c["bf16"],
        compute_by_format={"fp8": c["fp8"], "fp4": c["fp4"]},
        weight_only_compute=c["weight_only"],
        experts_compute=c["experts"],
        attention=c["attention"],
        overlap=1 + c["overlap"],
        step_s=c[f"step {engine}"],
        layer_s=c[f"layer {engine}"] * layer,
        experts_layer_s=c["experts_layer"] * layer,
        sequence_s=c["sequence"],
        collective_s=c["collective"] * c["blackwell collective"] ** blackwell,
        all_reduce_bandwidth=c["all_reduce"],
        all_to_all_bandwidth=c["all_to_all"],
        prefill_interference=c["interference"],
        queue_factor=c["queue"],
        queue_exponent=c["queue exponent"] / (1 + c["queue exponent"]),
        steps_before_prefill=c["steps before prefill"],
        request_s=c[f"request {engine}"],
    )


class Planner:
    """The planner as shipped, with a roofline and trees fitted to the training rows only."""

    def __init__(self, rows: Rows, roofline: Roofline, known: NDArray[np.int64]) -> None:
        self.rows, self.known = rows, known
        x, v = roofline.fit(known), rows.values
        own = {(e, b): coefficients(x, engine=e, blackwell=b) for e in ENGINES for b in (0.0, 1.0)}
        self.times, self.steady = [], []
        for number, (steps, device) in enumerate(rows.served):
            engine, newer = ENGINES[int(v["backend"][number])], float(v["blackwell"][number])
            times = StepTimes(steps, device, own[engine, newer])
            users, prompt, output = (float(v[name][number]) for name in ("users", "isl", "osl"))
            self.times.append(times)
            self.steady.append(steady_state(times, concurrency=users * steps.split.data, prompt=prompt, output=output))
        fitted = dict(zip(("tpot", "ttft"), roofline.predict(x)[:2], strict=True))
        self.roofline = {name: np.array([getattr(one, f"{name}_s") for one in self.steady]) for name in _LATENCIES}
        for name in _LATENCIES:
            assert np.allclose(self.roofline[name], fitted[name], rtol=1e-6), (
                "the planner differs from the fitted roofline"
            )
        table = np.array([self._features(number) for number in range(len(rows))])
        residuals = {name: np.log(v[name] / self.roofline[name]) for name in _LATENCIES}
        boosters = {name: boosted(table[known], residuals[name][known], roofline.group[known]) for name in _LATENCIES}
        left = residuals["tpot"][known] - boosters["tpot"].predict(table[known])
        trees = {name: as_lists(one) for name, one in boosters.items()}
        none = {name: Spread(low=1.0, high=1.0) for name in _LATENCIES}
        self.residual = ResidualModel(trees, self._known_configs(left), {"known": none, "new": none})

    def _engine(self, number: int) -> str:
        return ENGINES[int(self.rows.values["backend"][number])]

    def _features(self, number: int) -> list[float]:
        return residual_model.features(self._engine(number), self.times[number], self.steady[number])

    def _known_configs(self, left: Array) -> dict[str, float]:
        """Return the remaining log error of vLLM's TPOT for each configuration, then for each split of it."""
        found: dict[str, float] = {}
        chosen = [place for place, number in enumerate(self.known) if self._engine(number) == "vllm"]
        left = left.copy()
        for depth in (0, 1):
            names = {place: residual_model.config_keys(self.times[self.known[place]])[depth] for place in chosen}
            for name in sorted(set(names.values())):
                places = [place for place in chosen if names[place] == name]
                found[name] = float(left[places].sum() / (len(places) + _SHRINK))
                left[places] -= found[name]
        return found

    def predict(self, number: int) -> tuple[float, float]:
        """Return the predicted TTFT and TPOT of a row."""
        times, found, engine = self.times[number], self.steady[number], self._engine(number)
        factors = self.residual(engine, times, found)
        return found.ttft_s * factors.ttft, found.tpot_s * factors.tpot


def boosted(table: Array, target: Array, group: NDArray[np.int64]) -> Any:
    """Fit boosted trees; each group has the weight of the square root of its size."""
    size = np.bincount(group)[group]
    options = dict(  # noqa: C408
        objective="l1", learning_rate=0.05, num_leaves=15, min_data_in_leaf=12, feature_fraction=0.6,
        bagging_fraction=0.8, bagging_freq=1, lambda_l2=2.0, verbose=-1, seed=0, deterministic=True, num_threads=2,
    )  # fmt: skip
    return lightgbm.train(options, lightgbm.Dataset(table, target, weight=1 / np.sqrt(size)), 300)


def as_lists(booster: Any) -> list[residual_model.Tree]:
    """Return the trees as nested lists with rounded numbers, as in the catalogue."""

    def walk(node: dict[str, Any]) -> Any:
        if "leaf_value" in node:
            return float(f"{node['leaf_value']:.3g}")
        sides = (walk(node["left_child"]), walk(node["right_child"]))
        return [node["split_feature"], float(f"{node['threshold']:.5g}"), *sides]

    return [walk(tree["tree_structure"]) for tree in booster.dump_model()["tree_info"]]


def held_out(
    rows: Rows, hold_out: str, *, report: Callable[[str], None] = lambda _: None
) -> tuple[Prediction, Prediction]:
    """Predict every row from the other groups: with the roofline alone, and with the residual model."""
    roofline = Roofline(rows)
    roofline_only, corrected = ({name: np.zeros(len(rows)) for name in _LATENCIES} for _ in range(2))
    for number, (known, held) in enumerate(folds(rows, hold_out)):
        report(f"{hold_out} {number + 1}")
        planner = Planner(rows, roofline, known)
        for row in held:
            corrected["ttft"][row], corrected["tpot"][row] = planner.predict(row)
        for name in _LATENCIES:
            roofline_only[name][held] = planner.roofline[name][held]
    return roofline_only, corrected


def spreads(rows: Rows, predicted: Prediction) -> dict[str, Spread]:
    """Return the factors between which 80 % of vLLM's rows fall."""
    vllm = rows.values["backend"] == ENGINES.index("vllm")
    found = {}
    for name in _LATENCIES:
        low, high = np.quantile((rows.values[name] / predicted[name])[vllm], [0.1, 0.9])
        found[name] = Spread(low=round(float(low), 3), high=round(float(high), 3), points=int(vllm.sum()))
    return found
