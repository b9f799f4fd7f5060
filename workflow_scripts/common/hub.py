"""Files of the Hugging Face hub: had at once, or refused in one line that says what to do."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import (
    constants,
    get_session,
    hf_hub_download,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # exported lazily

from workflow_scripts.common.errors import UserError

PATIENCE_S = 10
"""Seconds in which the hub must answer; the library itself would try for about a minute."""

FOLDERS = {"dataset": "datasets", "space": "spaces"}
"""Kind of repository -> first part of its address; a model has none."""


def hub_model_config(hub: str, revision: str) -> Path:
    """Return the config.json of a hub model; raises as `hub_file` does."""
    folder = "name a local folder: source: {folder: ...}"
    return hub_file(hub, "config.json", revision, instead=folder)


def hub_file(
    repository: str, file: str, revision: str, *, kind: str = "model", instead: str
) -> Path:
    """Return a file of the hub, from its cache on this machine or fetched.

    Parameters
    ----------
    repository, file, revision
        An id of the hub, a path inside the repository, and a commit.
    kind
        "model", "dataset" or "space".
    instead
        What a user can do without the hub, to end the messages with.

    Raises
    ------
    UserError
        If the hub cannot be reached, or does not have the file or give it to this user.
    """
    cached = try_to_load_from_cache(repository, file, revision=revision, repo_type=kind)
    if isinstance(cached, str):
        return Path(cached)
    what = f"{kind} {repository} at revision {revision}"
    if is_offline_mode():
        raise UserError(
            f"{what}: not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set; unset "
            f"it, or {instead}"
        )
    page = "/".join(filter(None, (constants.ENDPOINT, FOLDERS.get(kind), repository)))
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE_S)
        return Path(hf_hub_download(repository, file, revision=revision, repo_type=kind))
    except GatedRepoError:
        raise UserError(
            f"{what}: is gated; accept its licence at {page} and set HF_TOKEN, or {instead}"
        ) from None
    except RepositoryNotFoundError:
        raise UserError(
            f"{what}: the hub has no such repository, or keeps it private; check the id, set "
            f"HF_TOKEN, or {instead}"
        ) from None
    except RevisionNotFoundError:
        raise UserError(
            f"{what}: the repository has no such commit; take one of {page}/commits/main"
        ) from None
    except RemoteEntryNotFoundError:
        raise UserError(
            f"{what}: holds no {file}; check the name, or take another revision"
        ) from None
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(
            f"{what}: cannot be fetched from {constants.ENDPOINT} ({reason}); check the network, or "
            f"{instead}"
        ) from None
