"""Chat templates that write the present date into prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlplace.models.template_dates import WARNING, date_problems
from tests.tiny_tokenizer import tiny_tokenizer

# As in the templates of Llama 3.2
_DATED = """
{%- if not date_string is defined %}
  {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
  {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{{- "Today Date: " + date_string + "\\n" }}
{%- for message in messages %}{{ message.content }}{% endfor %}
"""
# As in those of Granite
_FIXED = (
    "{{ strftime_now('%B %d, %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
)
_PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "arguments", "fix"),
    [
        (_DATED, {}, "env.template: {date_string: 26 Jul 2024}"),
        (_DATED, {"date_string": "1 Jan 2026"}, None),
        (_FIXED, {}, "a chat_template.jinja without strftime_now"),
        (_PLAIN, {}, None),
        ("{{ raise_exception('no') }}", {}, None),
    ],
)
def test_a_template_that_writes_the_present_date_is_told(
    tmp_path: Path, template: str, arguments: dict[str, object], fix: str | None
) -> None:
    folder = tiny_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    found = list(date_problems(folder, arguments))
    if fix is None:
        assert found == []
        return
    (problem,) = found
    assert (problem.code, problem.key) == (WARNING, "env.template")
    assert (problem.fix or "").startswith(fix)


def test_a_folder_without_a_tokenizer_has_no_dates(tmp_path: Path) -> None:
    assert list(date_problems(tmp_path, {})) == []
