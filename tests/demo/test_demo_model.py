import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollpacker.demo.model import EOS_ID, PAD_ID, build_model, build_tokenizer
from rollpacker.demo.task import chain_of_thought, heldout_rows


def test_a_question_is_seven_tokens_and_decodes_to_itself():
    tokenizer = build_tokenizer()
    for row in heldout_rows(100):
        tokens = tokenizer(row["prompt"])["input_ids"]
        assert len(tokens) == 3 + sum(len(str(n)) for n in row["metadata"]["numbers"])
        assert tokenizer.decode(tokens) == row["prompt"]


def test_a_response_decodes_to_itself_without_the_end_token():
    tokenizer = build_tokenizer()
    text = chain_of_thought(84, 36)
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text) - len("</think>") + 1
    assert tokenizer.decode([*tokens, EOS_ID, PAD_ID], skip_special_tokens=True) == text


def test_the_longest_problem_fits_in_600_tokens():
    assert len(build_tokenizer()(chain_of_thought(99, 1))["input_ids"]) + 1 <= 600


def test_auto_classes_load_the_same_tokenizer_and_model(tmp_path):
    tokenizer, model = build_tokenizer(), build_model(seed=0)
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    again, loaded = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    row = heldout_rows(1)[0]
    text = row["prompt"] + chain_of_thought(*row["metadata"]["numbers"])
    tokens = tokenizer(text, return_tensors="pt")["input_ids"]
    assert again(text)["input_ids"] == tokens[0].tolist()
    assert again.decode(tokens[0]) == text
    assert (again.eos_token_id, again.pad_token_id) == (EOS_ID, PAD_ID)
    assert again.chat_template is None
    assert loaded.config.model_type == "qwen2"
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == EOS_ID
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_the_model_is_small_and_its_weights_depend_on_the_seed_alone():
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second = build_model(seed=1), build_model(seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert 190_000 < sum(p.numel() for p in first.parameters()) < 210_000
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    other = build_model(seed=2)
    assert not torch.equal(first.get_input_embeddings().weight, other.get_input_embeddings().weight)


def test_other_families_have_its_size():
    model = build_model(0, 4, "qwen3_moe", num_experts=4, moe_intermediate_size=32)
    assert (model.config.model_type, model.config.hidden_size) == ("qwen3_moe", 128)
    assert model.config.num_experts == 4
    assert model.config.eos_token_id == EOS_ID
