"""The shape of the model that vLLM's engines load."""

import pytest
from engine_models import build


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide")
    build("wide").config.save_pretrained(path)
    return path
