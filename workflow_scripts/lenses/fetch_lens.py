"""Fetch the tuned lens of a model from the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

from workflow_scripts.common.hub import FOLDERS, hub_file
from workflow_scripts.common.models import load_config, source_of_rule
from workflow_scripts.common.script import run_script
from workflow_scripts.lenses.layouts import read_lens, write_lens

KINDS = {folder: kind for kind, folder in FOLDERS.items()}
"""First part of a hub id of three parts -> kind of repository; others hold models."""


def download(hub: str, revision: str, path: str) -> Path:
    """Return where a file of a hub repository lies in the local cache; raises as `hub_file` does."""
    first, _, rest = hub.partition("/")
    kind, repository = (KINDS[first], rest) if first in KINDS and "/" in rest else ("model", hub)
    return hub_file(repository, path, revision, kind=kind, instead="name a local file")


def main(snakemake: Any) -> None:
    """Write the translators of a lens in the store's own layout, after checking that they fit."""
    spec = json.loads(snakemake.params.spec)
    config = load_config(source_of_rule(snakemake)).get_text_config(decoder=True)
    path = download(**spec)
    weights = read_lens(path, config.num_hidden_layers, config.hidden_size)
    write_lens(snakemake.output[0], weights, spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
