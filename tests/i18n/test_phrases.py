"""Finished texts, told by templates."""

from __future__ import annotations

import time

from flagcore.i18n.phrases import Phrases

WORDS = Phrases(
    {
        "measured": "实测",
        "baseline": "基线",
        "trial {0}": "试验 {0}",
        "trial {0} ({1})": "试验 {0}（{1}）",
        "{0} cannot be read: {1}": "无法读取 {0}：{1}",
        "must divide {0} = {1}": "必须整除 {0} = {1}",
        "use {0}": "请用 {0}",
        "Note: {0}.": "注意：{0}。",
        "{0} is {1}": "{0} 是 {1}",
        "the cache of {0} holds {1}": "{0} 的缓存有 {1}",
        "Predicted {0} of {1}": "在 {1} 中预测 {0}",
        "stays as it is": "",
    }
)


def test_places_are_filled_in_and_may_change_order() -> None:
    assert WORDS.text("Predicted 3 of 8") == "在 8 中预测 3"


def test_what_fills_a_place_is_told_too() -> None:
    assert WORDS.text("Note: the cache of trial 3 holds baseline.") == "注意：试验 3 的缓存有基线。"
    assert WORDS.text("trial 0 (baseline)") == "试验 0（基线）"


def test_parts_are_told_where_the_whole_is_unknown() -> None:
    assert WORDS.text("trial 3: measured, 12 GiB") == "试验 3：实测，12 GiB"
    assert WORDS.text("No such thing, baseline") == "No such thing，基线"


def test_a_problem_of_a_key_is_told_behind_the_key_and_its_value() -> None:
    assert WORDS.text("a.yaml: train.tp = 6 must divide heads = 64; use 1, 2 or 4") == (
        "a.yaml: train.tp = 6 必须整除 heads = 64；请用 1、2 或 4"
    )
    assert WORDS.text("train.name = 'a b' must divide x = 1").startswith("train.name = 'a b' 必须整除")


def test_a_list_is_told_item_by_item_with_chinese_between() -> None:
    assert WORDS.text("use 'a, b', c or baseline") == "请用 'a, b'、c 或基线"
    assert WORDS.text("use x and y (or z)") == "请用 x 和 y（or z）"
    assert WORDS.text("0.39 to 0.5 s") == "0.39 到 0.5 s"
    assert WORDS.text("Predicted 1 to 4 GiB of a, b, c") == "在 a、b、c 中预测 1 到 4 GiB"


def test_of_two_ways_that_whose_places_hold_fewer_clauses_is_taken() -> None:
    words = Phrases(
        {"must be {0}, or null": "必须是 {0}，或 null", "must be {0}": "必须是 {0}", "an integer of {0}": "{0} 的整数"}
    )
    assert words.text("must be an integer of 1, or null") == "必须是 1 的整数，或 null"


def test_the_mark_of_a_prediction_stands_before_a_name_in_any_language() -> None:
    assert WORDS.text("~baseline") == "~基线"


def test_the_full_stop_of_a_sentence_is_in_no_place() -> None:
    assert WORDS.text("Predicted 3 of 8.") == "在 8 中预测 3。"


def test_a_sentence_before_another_needs_no_entry_of_its_own() -> None:
    words = Phrases({"Drawn are {0} passes.": "画的是 {0} 次计算。", "Numbers are micro-batches.": "数字是微批次。"})
    assert words.text("Drawn are 8 passes. Numbers are micro-batches.") == "画的是 8 次计算。数字是微批次。"


def test_the_point_of_a_figure_ends_no_sentence() -> None:
    words = Phrases({"None kept {0}.{1}": "都不满足 {0}。{1}", "The nearest is {0}.": "最接近的是 {0}。"})
    assert words.text("None kept p99 <= 0.1 s. The nearest is 3.") == "都不满足 p99 <= 0.1 s。最接近的是 3。"


def test_a_bracket_behind_a_name_is_not_the_names() -> None:
    words = Phrases({"nobody knows {0}": "没有人知道{0}", "links of {0}": "{0} 的互连", "give {0}": "请给出 {0}"})
    assert words.text("nobody knows links of A (give nic)") == "没有人知道 A 的互连（请给出 nic）"


def test_what_stands_behind_a_figure_is_told() -> None:
    assert WORDS.text("~4,120 baseline") == "~4,120 基线"


def test_what_is_unknown_stays() -> None:
    for text in ("RuntimeError: NCCL watchdog is not happy with what it saw", "", "  ", "12.5", "stays as it is"):
        assert WORDS.text(text) == text


def test_lines_are_told_one_by_one_with_their_indents() -> None:
    assert WORDS.text("flag: trial 1\n  - measured\n\nx") == "flag: 试验 1\n  - 实测\n\nx"


def test_finished_lines_stay() -> None:
    words = Phrases({"measured": "实测"})
    words.finished.add("measured")
    assert words.text("measured\n measured") == "measured\n 实测"


def test_a_long_text_takes_no_time() -> None:
    lines = [
        f"trial {number} (baseline): measured, {number} s; a.yaml cannot be read: trial 3" for number in range(500)
    ]
    began = time.process_time()
    assert WORDS.text("\n".join(lines)).count("试验") == 1000
    assert time.process_time() - began < 2.0
