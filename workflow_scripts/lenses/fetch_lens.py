"""Fetch the tuned lens of a model from the Hugging Face hub."""

import json
from typing import Any

from huggingface_hub import hf_hub_download

from workflow_scripts.common.errors import UserError
from workflow_scripts.common.models import load_config, source_of_rule
from workflow_scripts.common.script import run_script
from workflow_scripts.lenses.layouts import read_lens, write_lens

REPOSITORY_TYPES = {"spaces": "space", "datasets": "dataset"}
"""First part of a hub id of three parts -> type of repository; others hold models."""


def download(hub: str, revision: str, path: str) -> str:
    """Return where a file of a hub repository lies in the local cache, downloaded if it must be.

    Raises
    ------
    UserError
        If it is neither in the cache nor to be had.
    """
    kind, _, repository = hub.partition("/") if hub.count("/") == 2 else ("", "", hub)
    try:
        return hf_hub_download(
            repository, path, revision=revision, repo_type=REPOSITORY_TYPES.get(kind)
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"tuned lens {hub}/{path} at revision {revision}: cannot be fetched ({reason}); check id, "
            "path and network, or name a local file"
        ) from None


def main(snakemake: Any) -> None:
    """Write the translators of a lens in the store's own layout, after checking that they fit."""
    spec = json.loads(snakemake.params.spec)
    config = load_config(source_of_rule(snakemake)).get_text_config(decoder=True)
    path = download(**spec)
    weights = read_lens(path, config.num_hidden_layers, config.hidden_size)
    write_lens(snakemake.output[0], weights, spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
