"""Train the tuned lens of a model on texts."""

import json
import sys
from typing import Any

from torch import Tensor
from tqdm import tqdm

from workflow_scripts.common.models import model_of_rule
from workflow_scripts.common.script import log, run_script
from workflow_scripts.lenses.layouts import write_lens
from workflow_scripts.lenses.training import (
    hold_out,
    mean_divergences,
    token_windows,
    train_lens,
)
from workflow_scripts.probes.haystacks import read_haystacks


def identity(hidden: Tensor) -> Tensor:
    """Return the stream as it is: the logit lens, which the trained one is measured against."""
    return hidden


def main(snakemake: Any) -> None:
    """Write the lens of a model and log how well it does on the sequences held out."""
    spec = json.loads(snakemake.params.spec)
    texts = [haystack.text for haystack in read_haystacks(snakemake.input.texts)]
    lm = model_of_rule(snakemake)
    held_out, training = hold_out(token_windows(lm, texts), spec["seed"])
    log.info("tuned lens: %d sequences, %d held out", len(training), len(held_out))
    with tqdm(total=spec["train"]["steps"], desc="training", unit="step", file=sys.stderr) as bar:
        lens = train_lens(lm, training, **spec["train"], seed=spec["seed"], progress=bar.update)
    before = mean_divergences(lm, [identity] * len(lens), held_out)
    after = mean_divergences(lm, lens, held_out)
    for layer, (logit_lens, tuned_lens) in enumerate(zip(before, after, strict=True)):
        log.info("layer %d: KL %.3f nats, of the logit lens %.3f", layer, tuned_lens, logit_lens)
    weights = [translator.weight().detach().cpu() for translator in lens]
    biases = [translator.bias.detach().cpu() for translator in lens]
    write_lens(snakemake.output[0], weights, biases, spec=spec)


if __name__ == "__main__":
    run_script(main, snakemake)  # type: ignore[name-defined]  # noqa: F821
