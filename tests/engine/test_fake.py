from __future__ import annotations

from engine_models import drain, prompt, request

from rollpacker.config import FakeEngineConfig
from rollpacker.engine.fake import FakeEngine, scripted_length, scripted_token


def test_lengths_and_tokens_follow_from_the_seed():
    config = FakeEngineConfig(lengths=[3, 8, 5])
    engine = FakeEngine(config)
    engine.submit([request(i, prompt(2), seed=100 + i, max_tokens=50) for i in range(40)])
    outputs = drain(engine)
    for i, output in outputs.items():
        length = scripted_length(config, 100 + i)
        assert output.tokens.tolist() == [scripted_token(100 + i, t) for t in range(length)]
        assert output.finish_reason == "stop"
    assert {len(o.tokens) for o in outputs.values()} == {3, 8, 5}
    assert engine.stats().steps == 8


def test_responses_over_the_limit_are_truncated():
    engine = FakeEngine(FakeEngineConfig(lengths=[10]))
    engine.submit([request(0, prompt(2), max_tokens=4)])
    output = drain(engine)[0]
    assert (len(output.tokens), output.finish_reason) == (4, "length")
