"""What a run is asked to read and is not here: told before its libraries are imported, which takes
several seconds."""

from __future__ import annotations

from rollpacker.config import DataConfig
from rollpacker.data.read import check_places
from rollpacker.hub import check_model


def check_here(model: str, *data: DataConfig | None) -> None:
    """Raises ``ValueError`` for a model's folder, or data, that are not here.

    The hub is not asked: what may be there is found missing later.
    """
    try:
        check_model(model)
    except ValueError as error:
        raise ValueError(f"model.path={model}: {error}") from None
    for each in data:
        if each is not None:
            check_places(each)
