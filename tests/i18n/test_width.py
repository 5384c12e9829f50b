"""Columns of double-width letters."""

from flagcore.i18n.width import columns, left, right, wrapped


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
