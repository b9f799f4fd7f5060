"""Measure what the workflow claims of its speed and memory, as ratios in one run.

    python -m benchmarks.measure MODEL_FOLDER REPORT

Run from the project's folder, with its environment, on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from benchmarks.timing import Ratio, in_turns
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
from workflow_scripts.common.attention import tapped
from workflow_scripts.common.decoding import Conditions, PrefixRunner
from workflow_scripts.common.layout import haystack_paths
from workflow_scripts.common.models import LanguageModel, Source, load_model, load_tokenizer
from workflow_scripts.common.shards import open_shard, write_shard
from workflow_scripts.patching.corruption import corrupt
from workflow_scripts.patching.patch_heads import Pair, patch_heads
from workflow_scripts.probes.build import build_probes
from workflow_scripts.scores.detectors import DETECTORS
from workflow_scripts.scores.score import score_shards
from workflow_scripts.scores.settings import parse_score

NEEDLES, HAYSTACKS = Path("data/needles/landmarks.json"), Path("data/haystacks/en")
FORMULAS = {
    "locos": "needle_phi - off_phi * needle_len / off_len",
    "alpha_spatial": "needle_alpha - off_alpha * needle_len / off_len",
    "dla": "needle_phi + off_phi",
}
TURNS = 3
NEW_TOKENS = 12


def make_probes(folder: str, length: int, size: int, split: str = "detect") -> pl.DataFrame:
    """Return probes of one context length."""
    row = {
        "format": "nolima",
        "questions": ["onehop"],
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


def plain_generate(lm: LanguageModel, prompt: list[int], tokens: int) -> list[int]:
    """Generate with the library's own loop, exactly `tokens` tokens."""
    ids = torch.tensor([prompt])
    out = lm.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def capture_against_generation(lm: LanguageModel, folder: str, length: int) -> Ratio:
    """Capture, one probe at a time, against generating the same tokens."""
    probes = make_probes(folder, length, 4)
    tokens = [max(1, len(r.generation.ids) + 1) for r in capture(lm, probes, batch_tokens=1)]
    prompts = probes["input_ids"].to_list()

    def plain() -> None:
        for prompt, count in zip(prompts, tokens, strict=True):
            plain_generate(lm, prompt, min(count, NEW_TOKENS))

    return in_turns(
        f"capture / plain generation, {length} tokens, one probe at a time",
        lambda: capture(lm, probes, batch_tokens=1),
        plain,
        turns=TURNS,
        target="1.10" if length >= 1000 else "1.20",
    )


@contextlib.contextmanager
def stored(lm: LanguageModel, probes: pl.DataFrame, results: list[Any]) -> Iterator[Path]:
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
        write_shard(path, manifest, arrays, about, {}, device="cpu", wall_seconds=0)
        yield path


def all_scores(path: Path) -> None:
    """Compute every score that needs no model."""
    rows: dict[str, dict[str, Any]] = {name: {"formula": f} for name, f in FORMULAS.items()}
    rows |= {name: {"detector": name} for name in DETECTORS}
    for name, row in rows.items():
        score_shards([path], parse_score(name, {"dataset": "benchmark", **row}))


def scores_against_capture(lm: LanguageModel, folder: str) -> list[str]:
    """All scores from the cache against the capture, and the size and speed of the store."""
    probes = make_probes(folder, 256, 40)
    results = capture(lm, probes)
    lines = []
    with stored(lm, probes, results) as path:
        ratio = in_turns(
            "all scores that need no model / capture (40 probes, 256 tokens)",
            lambda: all_scores(path),
            lambda: capture(lm, probes),
            turns=TURNS,
            target="0.05",
        )
        lines.append(ratio.row())
        one = in_turns(
            "one edited formula / capture",
            lambda: score_shards(
                [path], parse_score("locos", {"dataset": "b", "formula": FORMULAS["locos"]})
            ),
            lambda: capture(lm, probes),
            turns=1,
            target="none",
        )
        lines.append(one.row())
        with open_shard(path) as shard:
            cells = shard.read("alpha").size
            dense = sum(
                entry.compress_size
                for entry in _zip_entries(path)
                if entry.filename.split("/")[0] in ("alpha", "phi_raw")
            )
        lines.append(
            f"| dense bytes a cell and head, alpha + phi | {dense / cells:.2f} | raw: 8 | 2.5 |"
        )
    return lines


def _zip_entries(path: Path) -> list[Any]:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        return archive.infolist()


def plain_ablation(
    lm: LanguageModel, prompts: list[list[int]], sets: list[list[Head]], means: dict[Head, Any]
) -> None:
    """Run one generation a probe and condition, with hooks, as most users would."""
    for heads in sets:
        handles = []
        for layer in lm.layers:
            chosen = [head for index, head in heads if index == layer.index]

            def hook(
                module: Any, args: Any, output: Any, chosen: list[int] = chosen, layer: Any = layer
            ) -> Any:
                for head in chosen:
                    start = head * layer.head_dim
                    output[..., start : start + layer.head_dim] = means[layer.index, head]
                return output

            if chosen:
                handles.append(layer.attention.q_proj.register_forward_hook(hook))
        for prompt in prompts:
            ids = torch.tensor([prompt])
            lm.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=sorted(lm.eos_ids),
            )
        for handle in handles:
            handle.remove()


def ablation_against_plain(lm: LanguageModel, folder: str) -> list[Ratio]:
    """An ablation sweep over k against one generation a probe and condition."""
    probes = make_probes(folder, 256, 10, "evaluate")
    prompts = probes["input_ids"].to_list()
    table = calibrate(lm, choose_prompts(probes, count=4, seed=0, max_tokens=5000))
    means = read_means(table, "q_proj")
    late = [(23, h) for h in (2, 1, 0, 7)] + [(28, 1), (23, 4), (23, 5), (22, 7), (24, 7), (24, 5)]
    order = np.random.default_rng(42).permutation(len(lm.layers) * lm.n_heads)[:10]
    anywhere = [divmod(int(i), lm.n_heads) for i in order]
    ratios = []
    for name, heads, target in (("late heads", late, "0.30"), ("random heads", anywhere, "0.65")):
        sets: list[list[Head]] = [[], *(heads[:k] for k in (1, 2, 5, 10))]
        intervention = Intervention("mean_query", "q_proj", sets, means)

        def ours(intervention: Intervention = intervention) -> None:
            generate(
                lm,
                prompts,
                intervention,
                max_new_tokens=NEW_TOKENS,
                batch_tokens=8192,
                progress=lambda _: None,
            )

        def plain(sets: list[list[Head]] = sets) -> None:
            plain_ablation(lm, prompts, sets, means)

        ratios.append(
            in_turns(
                f"ablation of none and k = 1, 2, 5, 10 / plain, {name}",
                ours,
                plain,
                turns=TURNS,
                target=target,
            )
        )
    return ratios


def patching_against_plain(lm: LanguageModel, folder: str) -> Ratio:
    """Patching every head against one forward a head (a tenth of them, times ten)."""
    probe = make_probes(folder, 256, 5).row(2, named=True)

    def encode(text: str) -> list[int]:
        return list(lm.tokenizer.encode(text, add_special_tokens=False))

    twin = corrupt(probe, "filler", encode)
    assert twin is not None
    answer = encode(probe["answer"])
    pair = Pair(probe["input_ids"], twin, probe["needle_start"], answer)
    ids = torch.tensor([twin + answer[:-1]])
    heads = [(layer.index, head) for layer in lm.layers for head in range(lm.n_heads)]

    def ours() -> None:
        runner = PrefixRunner(lm, Conditions.unchanged())
        patch_heads(lm, pair, runner, batch_tokens=8192)

    @torch.inference_mode()
    def plain() -> None:
        for layer, head in heads:

            def tap(call: Any, output: Any, layer: int = layer, head: int = head) -> Any:
                if call.layer == layer:
                    output[:, :, head] = 0.0
                return output

            with tapped(tap):
                lm.model(ids, use_cache=False, logits_to_keep=len(answer))

    return in_turns(
        "patching of all heads / one forward a head", ours, plain, turns=1, target="0.20"
    )


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
        plain_generate(lm, probes["input_ids"][0].to_list(), NEW_TOKENS)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def growth(lm: LanguageModel, folder: str) -> list[str]:
    """Return how time and memory of a capture grow with the context."""
    lines = [
        "| tokens | capture, s | capture, MiB | generation, MiB | memory ratio |",
        "|---|---|---|---|---|",
    ]
    for length in (250, 500, 1000, 2000, 4000):
        probes = make_probes(folder, length, 1)
        started = time.perf_counter()
        capture(lm, probes)
        seconds = time.perf_counter() - started
        ours, plain = (peak_memory(folder, what, length) for what in ("capture", "generate"))
        lines.append(
            f"| {length} | {seconds:.2f} | {ours:.0f} | {plain:.0f} | {ours / plain:.3f} |"
        )
    return lines


def processor() -> str:
    """Return the processor's name and how many cores this process may use."""
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":")[1].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def report(folder: str, section: Callable[[str], None]) -> str:
    """Measure everything and return the report, as Markdown."""
    lm = load_model(Source(folder), dtype="float32", device="cpu")
    versions = ", ".join(f"{name} {value}" for name, value in library_versions().items())
    lines = [
        "# Benchmarks",
        "",
        f"{datetime.date.today()}, {processor()}, {torch.get_num_threads()} threads; {versions}.",
        "Model: smollm2-135m in float32. Made by `make benchmark`; no GPU was measured.",
        "",
        "| what | ratio: min / median / max | median times | target, at most |",
        "|---|---|---|---|",
    ]
    for length in (250, 1000):
        lines.append(capture_against_generation(lm, folder, length).row())
        section(lines[-1])
    lines += scores_against_capture(lm, folder)
    section(lines[-1])
    lines += [ratio.row() for ratio in ablation_against_plain(lm, folder)]
    section(lines[-1])
    lines.append(patching_against_plain(lm, folder).row())
    section(lines[-1])
    return "\n".join([*lines, "", "## Growth with the context", "", *growth(lm, folder), ""])


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("report")
    parser.add_argument("--peak", nargs=2, metavar=("WHAT", "LENGTH"))
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(arguments.model, arguments.peak[0], int(arguments.peak[1]))
        return
    text = report(arguments.model, lambda line: print(line, file=sys.stderr, flush=True))
    Path(arguments.report).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
