"""Print what the models of the config will cost, before a cluster is committed to them."""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import log, run_script
from workflow_scripts.estimate.costs import BYTES, Stage, stages
from workflow_scripts.estimate.shapes import Shape, shape_of

KNOWN = Path(__file__).resolve().parents[2] / "data/models/shapes.json"
"""config.json, cut to its dimensions, of the paper's models and of the embedded one."""

GB = 1e9


def find_shape(name: str, source: dict[str, Any]) -> Shape:
    """Return the shape of a model without the network: a local folder's, or a known one.

    Raises
    ------
    UserError
        If its dimensions are not known here.
    """
    if "folder" in source:
        path = Path(source["folder"]) / "config.json"
        return shape_of(json.loads(path.read_text(encoding="utf-8")))
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    key = source.get("hub", source.get("wheel"))
    if key not in known:
        raise UserError(
            f"models.{name}: the dimensions of {key} are not known; add them to data/models/shapes.json "
            "from its config.json"
        )
    return shape_of(known[key])


def hours(stage: Stage, weights: int, device: dict[str, float]) -> float:
    """Return the time of a stage: its FLOPs at the stated MFU, or its reading of the weights."""
    arithmetic = stage.flops / (device["tflops"] * 1e12 * device["mfu"])
    reading = stage.steps * weights / (device["bandwidth_gb"] * GB)
    return (arithmetic + reading) / 3600


def page(config: dict[str, Any]) -> str:
    """Return the estimate of every model of the config, as Markdown."""
    device = config["estimate"]
    lines = [
        "# Estimate",
        "",
        f"For a device of {device['tflops']:g} TFLOP/s at an MFU of {device['mfu']:g} and "
        f"{device['bandwidth_gb']:g} GB/s of memory bandwidth (`estimate:` in the config). Upper "
        "bounds: what shared prefixes and trunks save is not subtracted, and every answer is taken to "
        "use all its tokens. The assumptions stand in docs/speed.md.",
        "",
        "| model | stage | PFLOP | hours | device memory, GB | store, GB |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in config["models"].items():
        shape = find_shape(name, row["source"])
        weights = shape.parameters() * BYTES[row["dtype"]]
        found = stages(config, name, shape)
        lines += [
            f"| {name} | {stage.name} | {stage.flops / 1e15:.3g} | {hours(stage, weights, device):.2g} "
            f"| {(weights + stage.device_bytes) / GB:.3g} | {stage.disk_bytes / GB:.2g} |"
            for stage in found
        ]
        lines.append(
            f"| {name} | all | {sum(stage.flops for stage in found) / 1e15:.3g} "
            f"| {sum(hours(stage, weights, device) for stage in found):.2g} "
            f"| {(weights + max(stage.device_bytes for stage in found)) / GB:.3g}, weights "
            f"{weights / GB:.3g} | {sum(stage.disk_bytes for stage in found) / GB:.2g} |"
        )
    return "\n".join([*lines, ""])


def main(snakemake: Any) -> None:
    """Write the page, and show it."""
    text = page(snakemake.config)
    with atomic_path(snakemake.output[0]) as temporary:
        temporary.write_text(text, encoding="utf-8")
    log.info("%s\n%s", snakemake.output[0], text)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
