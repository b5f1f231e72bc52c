"""Chat templates are rendered as their writers expect, in a sandbox."""

import pytest

from pdjax.models.chat import render

USER = [{"role": "user", "content": "Hi <&> é"}]


def test_special_tokens_and_the_generation_prompt_are_there():
    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert render(template, USER, bos="<s>", eos="</s>") == "<s>user:Hi <&> é</s>assistant:"
    assert render(template, USER, bos="", eos="", add_generation_prompt=False) == "user:Hi <&> é"


def test_blocks_leave_no_blank_lines():
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}"
    assert render(template, [{"role": "user", "content": "x"}], bos="", eos="") == "x\n"


def test_json_is_not_escaped_for_html():
    assert render("{{ messages[0] | tojson }}", USER, bos="", eos="") == '{"role": "user", "content": "Hi <&> é"}'


def test_loops_may_break_and_dates_may_be_asked_for():
    template = "{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}"
    assert render(template, USER * 2, bos="", eos="") == "Hi <&> é4"


def test_a_template_can_refuse_the_messages():
    with pytest.raises(ValueError, match="refused by the model's chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", USER, bos="", eos="")


def test_a_template_cannot_leave_its_sandbox():
    with pytest.raises(ValueError, match="chat template"):
        render("{{ ''.__class__.__mro__[1].__subclasses__() }}", USER, bos="", eos="")


def test_smollm2_adds_its_own_system_message(smollm2):
    text = render(smollm2.chat_template, [{"role": "user", "content": "Hi"}], bos="", eos="")
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is"),
        ("Hi", "messages is 'Hi'"),
        (["Hi"], r"messages\[0\] is 'Hi'"),
        ([{"role": "user"}], r"messages\[0\]\['content'\] is None"),
        ([*USER, {"role": 3, "content": "x"}], r"messages\[1\]\['role'\] is 3"),
    ],
)
def test_messages_of_another_form_are_refused(messages, named):
    with pytest.raises(ValueError, match=named):
        render("", messages, bos="", eos="")
