"""What engines say of themselves."""

from dataclasses import replace

from rollpacker.engine.base import EngineInfo, least


def test_of_two_engines_the_least_holds_whoever_comes_first() -> None:
    one = EngineInfo(
        kv_tokens=64,
        max_length=40,
        tensor_parallel=(1,),
        latency={1: 1.0},
        prefill_token_s=0.0,
        exact_seeds=True,
    )
    other = replace(one, kv_tokens=32, max_length=50)
    assert least(one, other) == least(other, one) == replace(one, kv_tokens=32)
