"""Measure what the workflow claims of its speed and memory, as ratios in one run.

    python -m benchmarks.measure MODEL_FOLDER REPORT [--turns 3]

Run from the project's folder, with its environment, on an otherwise idle machine; `make benchmark` does.
Every comparison also asserts that both ways give the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
import yaml
from numcodecs import Blosc

from benchmarks import plain
from benchmarks.timing import Ratio, in_turns, seconds_of
from workflow_scripts.ablation.calibration import calibrate, choose_prompts, read_means
from workflow_scripts.ablation.generation import generate
from workflow_scripts.ablation.interventions import Head, Intervention
from workflow_scripts.activations.capture_probes import (
    capture_probes,
    probe_records,
    region_lengths,
    shard_arrays,
    token_texts,
)
from workflow_scripts.common.artifacts import library_versions
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.layout import haystack_paths
from workflow_scripts.common.models import LanguageModel, Source, load_model, load_tokenizer
from workflow_scripts.common.shards import KEEP_BITS, open_shard, write_shard
from workflow_scripts.estimate.costs import cache_bytes, capture_flops
from workflow_scripts.estimate.shapes import shape_of
from workflow_scripts.patching.patch import choose_pairs
from workflow_scripts.patching.patch_heads import patch_heads
from workflow_scripts.probes.build import build_probes
from workflow_scripts.probes.prompts import Encoder
from workflow_scripts.scores.detectors import DETECTORS
from workflow_scripts.scores.pooling import pool_heads
from workflow_scripts.scores.score import score_shards
from workflow_scripts.scores.settings import parse_score

NEEDLES, HAYSTACKS = Path("data/needles/landmarks.json"), Path("data/haystacks/en")
FORMULAS = {
    "locos": "needle_phi - off_phi * needle_len / off_len",
    "alpha_spatial": "needle_alpha - off_alpha * needle_len / off_len",
    "dla": "needle_phi + off_phi",
}
NEW_TOKENS = 12


def make_probes(
    folder: str, length: int, size: int, split: str = "detect", question: str = "onehop"
) -> pl.DataFrame:
    """Return probes of one context length."""
    row = {
        "format": "nolima",
        "questions": [question],
        "split": split,
        "context_lengths": [length],
        "depths": [0, 25, 50, 75, 100],
        "size": size,
        "max_new_tokens": NEW_TOKENS,
    }
    tokenizer = load_tokenizer(Source(folder))
    return build_probes(tokenizer, "benchmark", row, NEEDLES, haystack_paths(HAYSTACKS))


def capture(lm: LanguageModel, probes: pl.DataFrame, *, batch_tokens: int = 8192) -> list[Any]:
    """Capture probes as the workflow does."""
    return capture_probes(
        lm,
        probes,
        directions=["raw"],
        batch_tokens=batch_tokens,
        max_length=1 << 30,
        progress=lambda _: None,
    )


def capture_against_generation(
    lm: LanguageModel, folder: str, length: int, turns: int, target: str
) -> Ratio:
    """Capture, one probe at a time, against generating the same tokens."""
    probes = make_probes(folder, length, 3)
    prompts = probes["input_ids"].to_list()
    captured = [result.generation.ids for result in capture(lm, probes, batch_tokens=1)]
    assert captured == [plain.generate(lm, prompt, NEW_TOKENS) for prompt in prompts]
    return in_turns(
        f"capture / plain generation, {length} tokens, one probe at a time",
        lambda: capture(lm, probes, batch_tokens=1),
        lambda: [plain.generate(lm, prompt, NEW_TOKENS) for prompt in prompts],
        turns=turns,
        target=target,
    )


@contextlib.contextmanager
def stored(
    lm: LanguageModel, probes: pl.DataFrame, results: list[Any], keep_bits: int = KEEP_BITS
) -> Iterator[Path]:
    """Write a shard into a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "0.zarr.zip"
        arrays = shard_arrays(results) | {"region_length": region_lengths(results, probes)}
        about = {
            "probes": probe_records(results, probes),
            "token_text": token_texts(lm, results, probes),
            "n_layers": len(lm.layers),
            "n_heads": lm.n_heads,
            "n_kv_heads": lm.layers[0].n_kv_heads,
        }
        manifest = Path(name) / "0.json"
        write_shard(path, manifest, arrays, about, {}, keep_bits=keep_bits)
        yield path


def all_scores(path: Path, names: Sequence[str] = (*FORMULAS, *DETECTORS)) -> dict[str, Any]:
    """Compute scores that need no model, by default every one; (layers, heads) by name."""
    found = {}
    for name in names:
        row = {"formula": FORMULAS[name]} if name in FORMULAS else {"detector": name}
        settings = parse_score(name, {"dataset": "benchmark", **row})
        found[name] = pool_heads(score_shards([path], settings).probes, settings.pool)
    return found


def scores_against_capture(
    lm: LanguageModel, probes: pl.DataFrame, path: Path, turns: int
) -> list[Ratio]:
    """Time the scores that need no model, all and one, against the capture."""
    described = f"capture ({probes.height} probes, 256 tokens)"
    every = in_turns(
        f"all scores that need no model / {described}",
        lambda: all_scores(path),
        lambda: capture(lm, probes),
        turns=turns,
        target="0.05",
    )
    one = [seconds_of(lambda: all_scores(path, ["locos"])) for _ in range(turns)]
    return [every, Ratio(f"one edited formula / {described}", one, every.theirs, "none")]


def peer_against_ours(
    lm: LanguageModel, probes: pl.DataFrame, results: list[Any], turns: int
) -> Ratio:
    """Time the detectors of the peer against one capture and the same scores, on passing probes."""
    passed = [i for i, result in enumerate(results) if result.status == "passed"][:4]
    some = probes[passed]
    rows = some.to_dicts()

    def ours() -> dict[str, Any]:
        found = capture(lm, some)
        with stored(lm, some, found) as path:
            return all_scores(path, list(plain.PEER))

    expected = plain.detect(lm, rows, NEW_TOKENS)
    for name, values in ours().items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-4, err_msg=name)
    return in_turns(
        f"{len(plain.PEER)} detectors: one capture and their scores / one program a detector, "
        f"{len(passed)} probes",
        ours,
        lambda: plain.detect(lm, rows, NEW_TOKENS),
        turns=turns,
        target="0.20",
    )


def store_lines(lm: LanguageModel, probes: pl.DataFrame, results: list[Any]) -> list[str]:
    """Return size and error of a shard, as rows of the first table."""
    with (
        stored(lm, probes, results) as path,
        stored(lm, probes, results, 23) as exact,
        open_shard(path) as shard,
        open_shard(exact) as whole,
        zipfile.ZipFile(path) as archive,
    ):
        offsets = shard.read("row_offset")
        planes = [shard.read("phi_raw"), whole.read("phi_raw")]
        sums = [
            np.abs(np.add.reduceat(plane, offsets, axis=-1, dtype=np.float64).mean(-1)).ravel()
            for plane in planes
        ]
        top, rounded_top = (np.argsort(-values)[:50] for values in reversed(sums))
        error = float((np.abs(sums[0] - sums[1]) / sums[1])[top].max())
        scores, exact_scores = all_scores(path), all_scores(exact)
        assert all(np.array_equal(scores[name], exact_scores[name]) for name in scores)
        size = sum(
            archive.getinfo(name).compress_size
            for plane in ("alpha", "phi_raw")
            for name in chunk_names(archive, plane)
        )
        total = path.stat().st_size
    cells = planes[0].size
    per_row = sum(len(result.capture.step) for result in results if result.capture is not None)
    heads = shard.n_layers * shard.n_heads
    return [
        f"| bytes a cell, alpha + phi | {size / cells:.2f} | raw 8 | 2.5 |",
        f"| bytes a step and head of all else | {(total - size) / (per_row * heads):.1f} | | none |",
        f"| rounding: largest relative error of a head's contribution, top 50 "
        f"{'same' if set(top) == set(rounded_top) else 'changed'} | {error:.1e} | | 1e-3 |",
        "| rounding: change of any score (they read exact sums) | 0 | | 1e-3 |",
    ]


def chunk_names(archive: zipfile.ZipFile, plane: str) -> list[str]:
    """Return the entries of a shard that hold the chunks of a dense plane."""
    return [name for name in archive.namelist() if name.startswith(f"{plane}/c/")]


def reading_speed(lm: LanguageModel, folder: str, turns: int) -> Ratio:
    """Time the bare decompression of phi against reading it, on a shard of a few chunks.

    The probes of `store_lines` fill about two; a row of these is four times as long.
    """
    probes = make_probes(folder, 1000, 30, question="literal")
    results = capture(lm, probes)
    codec = Blosc()
    with (
        stored(lm, probes, results) as path,
        open_shard(path) as shard,
        zipfile.ZipFile(path) as archive,
    ):
        chunks = [archive.read(name) for name in chunk_names(archive, "phi_raw")]
        size = shard.read("phi_raw").nbytes / 1e6
        return in_turns(
            f"bare decompression of phi / reading it from the store ({size:.0f} MB)",
            lambda: [codec.decode(chunk) for chunk in chunks],
            lambda: shard.read("phi_raw"),
            turns=7 * turns,
            target="at least 0.5",
        )


def ablation_against_plain(lm: LanguageModel, folder: str, turns: int) -> list[Ratio]:
    """An ablation sweep over k against one generation a probe and condition."""
    prompts = make_probes(folder, 256, 5, "evaluate")["input_ids"].to_list()
    calibrating = make_probes(folder, 256, 4)
    table = calibrate(lm, choose_prompts(calibrating, count=4, seed=0, max_tokens=5000))
    means = read_means(table, "q_proj")
    late = [(23, h) for h in (2, 1, 0, 7)] + [(28, 1), (23, 4), (23, 5), (22, 7), (24, 7), (24, 5)]
    order = np.random.default_rng(42).permutation(len(lm.layers) * lm.n_heads)[:10]
    anywhere = [divmod(int(i), lm.n_heads) for i in order]
    ratios = []
    for name, heads, target in (("late", late, "0.30"), ("random", anywhere, "0.65")):
        sets: list[list[Head]] = [[], *(heads[:k] for k in (1, 2, 5, 10))]
        intervention = Intervention("mean_query", "q_proj", sets, means)

        def ours(intervention: Intervention = intervention) -> list[list[list[int]]]:
            found = generate(
                lm,
                prompts,
                intervention,
                max_new_tokens=NEW_TOKENS,
                batch_tokens=8192,
                progress=lambda _: None,
            )
            return [[answer.ids for answer in answers] for answers in found]

        def theirs(sets: list[list[Head]] = sets) -> list[list[list[int]]]:
            return plain.ablate(lm, prompts, sets, means, NEW_TOKENS)

        assert ours() == theirs()
        name = f"ablation of none and k = 1, 2, 5, 10 / one generation each, {name} heads"
        ratios.append(in_turns(name, ours, theirs, turns=turns, target=target))
    return ratios


def patching_against_plain(lm: LanguageModel, folder: str) -> list[Ratio]:
    """Patch all heads of 4 probes, a turn each, against a forward for every tenth head, times ten."""
    probes = make_probes(folder, 256, 40)
    heads = [(layer.index, head) for layer in lm.layers for head in range(lm.n_heads)]
    some = heads[4::10]
    share = len(some) / len(heads)
    times: dict[str, list[float]] = {"ours": [], "all": [], "answer": []}
    runner = PrefixRunner(lm, Conditions.unchanged())
    for _, pair in choose_pairs(Encoder(lm.tokenizer, folder), probes, "filler", 4, 42):
        started = time.perf_counter()
        effects = patch_heads(lm, pair, runner, batch_tokens=8192)
        times["ours"].append(time.perf_counter() - started)
        twin = pair.corrupt + pair.answer[:-1]
        clean = plain.head_outputs(lm, pair.clean + pair.answer[:-1])
        for name, keep in (("all", 0), ("answer", len(pair.answer))):
            started = time.perf_counter()
            logits = [
                found[-len(pair.answer) :] for found in plain.patch(lm, twin, clean, some, keep)
            ]
            times[name].append((time.perf_counter() - started) / share)
        for (layer, head), rows in zip(some, logits, strict=True):
            steps = torch.arange(len(pair.answer))
            logprob = float(rows.log_softmax(-1)[steps, torch.tensor(pair.answer)].mean())
            effect = float(effects.heads["logprob"][layer, head])
            assert abs(logprob - effects.corrupt["logprob"] - effect) < 1e-3
    ours, theirs = times["ours"], times["all"]
    what = "patching of all heads / one forward a head"
    return [
        Ratio(f"{what}, {len(ours)} probes together", [sum(ours)], [sum(theirs)], "0.20"),
        Ratio("the same, by probe", ours, theirs, "none"),
        Ratio("the same, with the answer's logits only", ours, times["answer"], "none"),
    ]


def peak_memory(folder: str, what: str, length: int) -> float:
    """Return the peak resident memory of a process that captures or generates, in MiB."""
    command = [sys.executable, "-m", "benchmarks.measure", folder, "-", "--peak", what, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def print_peak(folder: str, what: str, length: int) -> None:
    """Capture or generate one probe and print this process's peak memory in MiB."""
    lm = load_model(Source(folder), dtype="float32", device="cpu")
    probes = make_probes(folder, length, 1)
    if what == "capture":
        capture(lm, probes)
    else:
        plain.generate(lm, probes["input_ids"][0].to_list(), NEW_TOKENS)
    print(own_peak())


def own_peak() -> float:
    """Return the peak resident memory of this process, in MiB.

    Not by getrusage, which counts the memory of the parent from which a process was forked.
    """
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def growth(lm: LanguageModel, folder: str) -> list[str]:
    """Return how time and memory of a capture grow with the context, beside the cost model's."""
    shape = shape_of(lm.model.config.to_dict())
    lines = [
        "| tokens | capture, s | GFLOP by the cost model | GFLOP/s | capture, MiB | generation, MiB "
        "| memory ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    lengths, seconds, flops, memory = (250, 500, 1000, 2000, 4000, 7000), [], [], []
    for length in lengths:
        probes = make_probes(folder, length, 1)
        started = time.perf_counter()
        (result,) = capture(lm, probes)
        seconds.append(time.perf_counter() - started)
        flops.append(capture_flops(shape, length, len(result.generation.ids)) / 1e9)
        ours, theirs = (peak_memory(folder, what, length) for what in ("capture", "generate"))
        memory.append(ours)
        lines.append(
            f"| {length} | {seconds[-1]:.2f} | {flops[-1]:.0f} | {flops[-1] / seconds[-1]:.0f} "
            f"| {ours:.0f} | {theirs:.0f} | {ours / theirs:.3f} |"
        )
    exponent = np.polyfit(np.log(lengths), np.log(seconds), 1)[0]
    predicted = np.polyfit(np.log(lengths), np.log(flops), 1)[0]
    slope = np.polyfit(lengths[2:], memory[2:], 1)[0] * 1024
    kept = cache_bytes(shape, 1, "float32") / 1024
    return [
        *lines,
        "",
        f"Time grows as tokens to the power {exponent:.2f} (FLOPs of the cost model: {predicted:.2f}); "
        f"from 1000 tokens on, memory by {slope:.0f} KiB a token, of which {kept:.0f} are keys and "
        "values (once in the batch, once in the prefix that the next probe may share).",
    ]


def shard_growth(path: Path) -> list[str]:
    """Return time and peak memory of a score over 1, 4 and 16 shards, each in its own process."""
    lines = ["| shards | scores, s | peak, MiB |", "|---|---|---|"]
    for count in (1, 4, 16):
        command = [
            sys.executable,
            "-m",
            "benchmarks.measure",
            str(path),
            "-",
            "--shards",
            str(count),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds, peak = map(float, done.stdout.split()[-2:])
        lines.append(f"| {count} | {seconds:.2f} | {peak:.0f} |")
    return lines


def print_shard_growth(path: str, count: int) -> None:
    """Score the same shard some times over; print seconds and the process's peak memory in MiB."""
    settings = parse_score("locos", {"dataset": "benchmark", "formula": FORMULAS["locos"]})
    seconds = seconds_of(lambda: score_shards([path] * count, settings))
    print(seconds, own_peak())


def times_by_rule(results: Path) -> list[str]:
    """Return the time of the default main job by rule, from Snakemake's own records."""
    totals: dict[str, list[float]] = {}
    for path in sorted((results / "benchmarks").rglob("*.tsv")):
        rule = path.relative_to(results / "benchmarks").parts[0].removesuffix(".tsv")
        totals.setdefault(rule, []).extend(pl.read_csv(path, separator="\t")["s"].to_list())
    lines = ["| rule | jobs | seconds, all jobs |", "|---|---|---|"]
    lines += [f"| {rule} | {len(times)} | {sum(times):.1f} |" for rule, times in totals.items()]
    return [*lines, f"| all | | {sum(map(sum, totals.values())):.1f} |"]


def formula_edit(model: str, turns: int) -> list[str]:
    """Return the wall time from an edited formula to its new ranking, through Snakemake."""
    target = Path("results") / model / "scores" / "benchmark.parquet"
    seconds = []
    for turn in range(turns):
        row = {"dataset": "nolima", "formula": f"needle_phi - {turn + 2} * off_phi / off_len"}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as overlay:
            yaml.safe_dump({"scores": {"benchmark": row}}, overlay)
            overlay.flush()
            command = ["snakemake", "-j1", str(target), "--configfile", overlay.name]
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", *command], capture_output=True, check=True)
            seconds.append(time.perf_counter() - started)
    target.unlink()
    low, middle, high = min(seconds), float(np.median(seconds)), max(seconds)
    captured = sum(
        pl.read_csv(path, separator="\t")["s"].sum()
        for path in (Path("results") / model / "benchmarks/capture/nolima").rglob("*.tsv")
    )
    return [
        f"From an edited formula to its new ranking, through `snakemake`: {low:.1f} / {middle:.1f} / "
        f"{high:.1f} s (min / median / max), {middle / captured:.3f} of the capture's time.",
    ]


def processor() -> str:
    """Return the processor's name and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":")[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def prefill_on_gpu(folder: str) -> str:
    """Return the prefill's FLOP rate on a GPU, or that there is none; the reader divides by the peak."""
    if not torch.cuda.is_available():
        return (
            "No GPU was at hand: neither these ratios nor the prefill's MFU were measured on one."
        )
    lm = load_model(Source(folder), dtype="bfloat16", device="cuda")
    length = 4000
    ids = make_probes(folder, length, 1)["input_ids"][0].to_list()
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.inference_mode():
            PrefixRunner(lm, Conditions.unchanged()).prefill([ids], [0], 0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    rate = capture_flops(shape_of(lm.model.config.to_dict()), length, 0) / min(seconds) / 1e12
    return f"{torch.cuda.get_device_name()}: prefill of {length} tokens in bfloat16, {rate:.1f} TFLOP/s."


def report(folder: str, turns: int, say: Callable[[str], None]) -> str:
    """Measure everything and return the report, as Markdown."""
    lm = load_model(Source(folder), dtype="float32", device="cpu")
    versions = ", ".join(f"{name} {value}" for name, value in library_versions().items())
    lines: list[str] = []

    def add(new: Sequence[str]) -> None:
        lines.extend(new)
        for line in new:
            say(line)

    add(
        [
            "# Benchmarks",
            "",
            f"{datetime.date.today()}, {processor()}, {torch.get_num_threads()} threads; {versions}.",
            "Model: SmolLM2-135M-Instruct in float32. Made by `make benchmark`; see docs/speed.md.",
            "",
            "| what | ratio: min / median / max | median times | target, at most |",
            "|---|---|---|---|",
        ]
    )
    for length, target in ((250, "1.20"), (1000, "1.10")):
        add([capture_against_generation(lm, folder, length, turns, target).row()])
    probes = make_probes(folder, 256, 40)
    results = capture(lm, probes)
    with stored(lm, probes, results) as path:
        add([ratio.row() for ratio in scores_against_capture(lm, probes, path, turns)])
        shards = shard_growth(path)
    add([peer_against_ours(lm, probes, results, turns).row()])
    add([ratio.row() for ratio in ablation_against_plain(lm, folder, turns)])
    add([ratio.row() for ratio in patching_against_plain(lm, folder)])
    add(store_lines(lm, probes, results))
    add([reading_speed(lm, folder, turns).row()])
    add(["", prefill_on_gpu(folder)])
    add(["", "## Growth with the context", "", *growth(lm, folder)])
    add(["", "## Growth with the number of shards", "", *shards])
    model = "smollm2-135m"
    if (Path("results") / model / "benchmarks").is_dir():
        add(["", "## The default main job", "", *times_by_rule(Path("results") / model), ""])
        add(formula_edit(model, turns))
    return "\n".join([*lines, ""])


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("report")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peak", nargs=2, metavar=("WHAT", "LENGTH"))
    parser.add_argument("--shards", type=int)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.model, arguments.peak[0], int(arguments.peak[1]))
    elif arguments.shards:
        print_shard_growth(arguments.model, arguments.shards)
    else:
        text = report(
            arguments.model, arguments.turns, lambda line: print(line, file=sys.stderr, flush=True)
        )
        Path(arguments.report).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
