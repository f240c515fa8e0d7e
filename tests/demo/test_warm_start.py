from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollpacker.demo.model import EOS_ID, build_tokenizer
from rollpacker.demo.run import QUICK, run_demo, told_warm_start
from rollpacker.demo.task import END_OF_THOUGHT, heldout_rows
from rollpacker.demo.warm_start import Recipe, cache_key, place_of, train, warm_start

SHORT = Recipe(steps=6, step_tokens=200, problems=64, warmup_steps=2)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_checkpoint_is_made_once_and_found_again(tmp_path):
    seen: list[tuple[int, int]] = []
    torch.set_num_threads(2)
    first = warm_start(
        tmp_path, 0, lambda done, *_: seen.append((done, torch.get_num_threads())), SHORT
    )
    assert seen == [(step, 1) for step in (1, 2, 3, 4, 5, 6)], "of one thread each"
    assert torch.get_num_threads() == 2
    assert warm_start(tmp_path, 0, lambda *_: pytest.fail("trained again"), SHORT) == first
    assert entries(tmp_path) == [first.name]
    assert AutoTokenizer.from_pretrained(first).eos_token_id == EOS_ID
    assert AutoModelForCausalLM.from_pretrained(first).config.hidden_size == 96


def test_one_that_is_there_is_not_said_to_be_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    place_of(tmp_path / ".cache" / "rollpacker" / "demo").mkdir(parents=True)
    said: list[str] = []
    assert told_warm_start(said.append).is_relative_to(tmp_path)
    (line,) = said
    assert "learns" not in line


def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    def interrupt(done: int, total: int, loss: float) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(tmp_path, 0, interrupt, SHORT)
    assert entries(tmp_path) == []
    assert (warm_start(tmp_path, 0, None, SHORT) / "model.safetensors").is_file()


def test_what_a_killed_run_leaves_is_not_taken_for_a_checkpoint(tmp_path):
    (tmp_path / "partial-killed").mkdir()
    (tmp_path / "partial-killed" / "config.json").write_text("{}")
    made = warm_start(tmp_path, 0, None, SHORT)
    assert made.name != "partial-killed"
    assert (made / "model.safetensors").is_file()


def test_the_key_follows_seed_and_recipe():
    other, more = replace(SHORT, family="llama"), replace(SHORT, settings={"hidden_size": 64})
    keys = {cache_key(0, each) for each in (SHORT, Recipe(), other, more)} | {cache_key(1, SHORT)}
    assert len(keys) == 5
    assert cache_key(0, SHORT) == cache_key(0, replace(SHORT))


def test_the_same_seed_gives_the_same_weights():
    tokenizer = build_tokenizer()
    first, second, other = (train(tokenizer, seed, SHORT).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_training_teaches_both_ways_to_answer():
    tokenizer = build_tokenizer()
    losses: list[float] = []
    recipe = Recipe(steps=120, problems=200, step_tokens=200, learning_rate=4e-3, warmup_steps=20)
    model = train(tokenizer, 0, recipe, lambda done, total, loss: losses.append(loss))
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    prompts = [
        tokenizer(row["prompt"], return_tensors="pt")["input_ids"] for row in heldout_rows(20)
    ]
    end = tokenizer.convert_tokens_to_ids(END_OF_THOUGHT)
    with torch.no_grad():
        at_once = [float(model(prompt).logits[0, -1].softmax(-1)[end]) for prompt in prompts]
    assert 0.4 < sum(at_once) / len(at_once) < 0.8


def test_the_demo_says_where_it_is_kept_without_the_name_of_the_home_folder(tmp_path, monkeypatch):
    class Enough(Exception):
        pass

    def say(text: str) -> None:
        raise Enough(text)

    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Enough, match=r"\(kept in ~/\.cache/rollpacker/demo\)$"):
        run_demo(tmp_path / "out", QUICK, say)
