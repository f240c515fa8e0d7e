"""Every test of training uses one thread."""

import pytest
import torch
from tiny_models import make_tokenizer


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def tokenizer():
    return make_tokenizer()
