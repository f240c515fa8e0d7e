"""vLLM on a GPU: start, weights, sleep, drafts and rates, as ``doctor --run`` tries them."""

from pathlib import Path

import pytest
from runtime_jobs import Workshop, write_wide_model

from rollpacker.job.ask.doctor import EngineTrial

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_part_of_an_engine_works_here(tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("vllm")
    shop = Workshop(tmp_path, rows=4)
    shop.model = write_wide_model(tmp_path / "wide")
    engine = {"kind": "vllm", "gpu_memory": 0.2, "max_running": 64}
    devices = {"kind": "cuda", "per_node": 1}
    config = shop.config("here", engine=engine, devices=devices, model__dtype=dtype)
    findings = [*EngineTrial(config).findings()]
    assert [each.detail for each in findings if not each.ok] == []
