"""The Hugging Face hub, asked once: its libraries retry for half a minute, ten lines long."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from rollpacker.config.base import only_here

_TIMEOUT_S = 10.0
_MISSING = "there is no such folder"


def answers(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether the hub answers a question about ``name``, be it that there is no such thing.

    Raises ``ValueError`` when ``name`` cannot be one on the hub.
    """
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=_TIMEOUT_S)
    except HFValidationError:
        raise ValueError(f"'{name}' is no name of a {kind} on the hub") from None
    except HfHubHTTPError:
        return True
    except Exception:  # no connection: another library's error in each version of the hub's client
        return False
    return True


def check_model(path: str) -> None:
    """Refuse, with ``ValueError``, a folder that is not there and can be no name on the hub."""
    if only_here(path) and not Path(path).expanduser().is_dir():
        raise ValueError(_MISSING)


def model_arguments(path: str) -> dict[str, str | bool]:
    """Arguments of ``from_pretrained`` for a folder, or for the name of a model on the hub.

    Without a connection, a model that was loaded before is taken from the cache. Code that comes
    with a model is never run, nor is anybody asked whether to. Raises ``ValueError``, to be put
    behind the key, when there is no such model.
    """
    check_model(path)
    folder = Path(path).expanduser()
    local = folder.is_dir()
    try:
        online = not local and answers(path, "model")
    except ValueError as error:
        raise ValueError(f"{_MISSING}, and {error}") from None
    if not local and not online and folder_here(path) is None:
        raise ValueError(
            f"{_MISSING}, and the hub, which may have a model of that name, cannot be reached"
        )
    name = str(folder) if local else path
    found = {"pretrained_model_name_or_path": name, "trust_remote_code": False}
    return found if online else found | {"local_files_only": True}


def folder_here(path: str) -> Path | None:
    """A model's folder, in the cache for a name on the hub, which is not asked; None where there is
    none."""
    if path and Path(path).is_dir():
        return Path(path)
    try:
        found = try_to_load_from_cache(path, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def config_folder(path: str) -> str:
    """The folder of a model's ``config.json``: its own, or one in the cache for a name on the hub.

    Raises ``ValueError`` as ``model_arguments``.
    """
    place = model_arguments(path)
    name, offline = str(place["pretrained_model_name_or_path"]), "local_files_only" in place
    if Path(name).is_dir():
        return name
    return str(Path(hf_hub_download(name, "config.json", local_files_only=offline)).parent)
