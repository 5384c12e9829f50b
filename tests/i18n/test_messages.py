"""The language of what flagcore prints: how it is selected, what is translated, and the columns of wide letters."""

import copy
import json
import re
from collections.abc import Iterator

import pytest

from flagcore import i18n
from flagcore.i18n import Message, _, choose, columns, from_record, left, ngettext, right, wrapped
from flagcore.report.text import reason_text
from tests.i18n.messages import sources, translations

FIELD = re.compile(r"\{[^{}]*\}")


@pytest.fixture(autouse=True)
def _language(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(i18n, "_chosen_language", "")
    yield
    choose("en")


def test_messages_are_translated_and_their_fields_filled() -> None:
    choose("zh")
    assert _("Saved to {folder}.", folder="a") == "已保存到 a。"
    assert ngettext("{count} trial, not measured", "{count} trials, none measured", 2).startswith("2 个试验")
    choose("en")
    assert _("Saved to {folder}.", folder="a") == "Saved to a."
    assert ngettext("{count} trial, not measured.", "{count} trials, none measured.", 1) == "1 trial, not measured."


def test_a_message_without_a_translation_stays_english() -> None:
    choose("zh")
    assert _("no such message: {name}", name="x") == "no such message: x"
    assert _("") == ""


def test_a_message_of_a_record_is_english_and_translated_where_it_is_printed() -> None:
    choose("zh")
    message = Message("max_trials = {count} reached", count=3)
    assert json.dumps([message]) == '["max_trials = 3 reached"]'
    assert copy.deepcopy(message) == "max_trials = 3 reached"
    assert _(message) == "已达到 max_trials = 3"


def test_a_saved_message_is_translated_with_its_values() -> None:
    message = Message("cannot be read ({why})", why=Message("max_trials = {count} reached", count=3))
    saved = json.loads(json.dumps(message.record))
    assert from_record(str(message), saved) == message
    choose("zh")
    ids = from_record(str(message), saved)
    assert ids == _(message)
    assert "已达到 max_trials = 3" in ids
    assert from_record("interrupted", None) == _("interrupted") != "interrupted"


def test_the_advice_at_the_end_of_a_reason_is_translated() -> None:
    choose("zh")
    assert reason_text("OutOfMemoryError (GPU 0) (the port was in use)") == "OutOfMemoryError (GPU 0)（端口已被占用）"
    assert reason_text("ended (by no advice)") == "ended (by no advice)"
    assert reason_text("the loss is not finite") == _("the loss is not finite") != "the loss is not finite"


@pytest.mark.parametrize(
    "record",
    [
        None,
        5,
        [],
        {"template": "max_trials = {count} reached"},
        {"template": "max_trials = {count} reached", "values": {}},
        {"template": "max_trials = {count} reached", "values": {"count": 4}},
        {"template": "{count:>999999999999}", "values": {"count": 3}},
        {"template": ["max_trials"], "values": 5},
    ],
)
def test_a_saved_message_that_is_not_of_its_text_is_ignored(record: object) -> None:
    choose("zh")
    assert from_record("max_trials = 3 reached", record) == "max_trials = 3 reached"


def test_the_catalogue_is_read_as_babel_reads_it() -> None:
    pairs = ((_first(message.id), _first(message.string)) for message in translations())
    assert i18n._catalogue("zh") == {id: text for id, text in pairs if id and text}


def _first(text: str | tuple[str, ...]) -> str:
    return text if isinstance(text, str) else text[0]


def test_translations_have_the_fields_of_their_messages() -> None:
    for message in translations():
        ids = message.id if isinstance(message.id, tuple) else (message.id,)
        texts = message.string if isinstance(message.string, tuple) else (message.string,)
        if message.id and all(texts):
            assert {frozenset(FIELD.findall(text)) for text in texts} == {frozenset(FIELD.findall(ids[-1]))}, ids


@pytest.mark.costly
def test_help_headings_messages_and_texts_of_data_files_are_translated() -> None:
    known, found = translations(), {message.id for message in sources()} - {""}
    vendors = "RCCL lost a peer or the network; look at the other ranks' logs"
    assert {"Hide progress and notes.", "limited by", "Saved to {folder}.", vendors, "use backend pytorch"} <= found
    assert [each for each in found if each not in known or not any(known[each].string)] == []


def test_a_wide_character_takes_two_columns() -> None:
    assert [columns(text) for text in ("", "abc", "显存 GiB", "（1）")] == [0, 3, 8, 5]
    assert left("显存", 6) == "显存  "
    assert right("显存", 6) == "  显存"


def test_chinese_is_broken_between_letters_and_latin_between_words() -> None:
    assert wrapped("每步时间由 communication 决定", 14) == ["每步时间由", "communication", "决定"]
    assert wrapped("one two three", 8) == ["one two", "three"]


def test_no_line_starts_with_a_comma_or_ends_with_an_opening_bracket() -> None:
    for width in range(22, 40):
        lines = wrapped("显存不足，请减小微批次（micro_batch_size）。或打开重计算；否则换芯片", width)
        assert not [line for line in lines if line[0] in "，。；）" or line[-1] in "（"]
        assert "".join(lines).replace(" ", "") == "显存不足，请减小微批次（micro_batch_size）。或打开重计算；否则换芯片"
        assert max(map(columns, lines)) <= width


def test_long_words_are_cut_except_paths() -> None:
    assert wrapped("显存a" + "b" * 20, 10, " ")[0] == "显存"
    assert max(map(columns, wrapped("显存a" + "b" * 20, 10, " "))) == 10
    assert wrapped("see /a/very/long/path", 10, cut=False) == ["see", "/a/very/long/path"]
