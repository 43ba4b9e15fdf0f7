"""A bad line of a conversation file is named, and what is left out is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_compat.extraction.conversations import DataError, check_file

GOOD = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
ROLE = {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
TEXT, IMAGE = {"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "cat.png"}}


def lines(path: Path, *items: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in items))
    return path


def test_good_files(tmp_path: Path) -> None:
    assert check_file(lines(tmp_path / "a.jsonl", GOOD, "", GOOD)).lines == 2
    assert check_file(lines(tmp_path / "b.jsonl", ROLE)).warnings == []
    (tmp_path / "c.json").write_text(json.dumps([GOOD, GOOD, GOOD], indent=1))
    assert check_file(tmp_path / "c.json").lines == 3
    assert check_file(lines(tmp_path / "d.jsonl", {"messages": ROLE["conversations"]})).lines == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"conversations": [', "line 3: not JSON: Expecting value"),
        ('\ufeff{"conversations": []}', "line 3: not JSON: it begins with a byte-order mark; save it as UTF-8 without"),
        ("[]", "line 3: expected an object with a list 'conversations', found a list"),
        (
            {"text": "Hi", "id": 3},
            "line 3: expected an object with a list 'conversations', found an object with 'text', 'id'",
        ),
        ({"messages": GOOD["conversations"]}, "line 3: has 'messages', but .*line 1 has 'conversations'"),
        ({"conversations": "Hi"}, "line 3: the conversation is a text, expected a list of turns"),
        ({"conversations": ["Hi"]}, "line 3: turn 1 is a text, expected an object"),
        ({"conversations": [{"speaker": "A", "value": "Hi"}]}, "line 3: turn 1 has neither 'from' nor 'role'"),
        ({"conversations": [{"from": "human", "value": None}]}, r"line 3: turn 1: 'value' is nothing \(null\)"),
        ({"conversations": [{"from": "human", "value": [1]}]}, "line 3: turn 1: 'value' is a list, expected a text"),
        (
            {"conversations": [{"from": "human", "value": [TEXT, IMAGE]}]},
            r"is a list, expected a text \(text prompts only: there is a part 'image_url'; images are out of reach of ",
        ),
        (
            {"conversations": [{"from": "human", "value": [{"text": "Hi"}, {"image": "a.png"}]}]},
            r"'value' is a list, expected a text \(text prompts only: there is a part 'image'; ",
        ),
        ({"conversations": [{"from": "human", "value": [TEXT, {"text": "Hi"}, {}]}]}, "is a list, expected a text$"),
        ({"conversations": [{"from": "human"}]}, "line 3: turn 1: 'value' is nothing"),
        (
            {"conversations": [{"from": "human", "value": "Hi \ud83d"}]},
            r"line 3: turn 1: 'value' holds half of a character \(a lone surrogate, as \\ud83d\)",
        ),
        ('{"conversations": ' + "[" * 100_000, "line 3: not JSON: maximum recursion depth"),
        (ROLE, "line 3: a turn has 'role', but .*line 1 has 'from'"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: Any, said: str) -> None:
    path = lines(tmp_path / "chats.jsonl", GOOD, GOOD, line, GOOD)
    with pytest.raises(DataError, match=said) as raised:
        check_file(path)
    assert str(raised.value).startswith(f"{path}, line 3: ")


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_a_line_in_another_encoding_is_named(tmp_path: Path, name: str) -> None:
    good, latin = json.dumps(GOOD).encode(), json.dumps(GOOD).replace("Hello", "Grüße").encode("latin-1")
    listed = name.endswith(".json")
    start, between, end = (b"[", b",\n", b"]") if listed else (b"", b"\n", b"\n")
    (tmp_path / name).write_bytes(start + between.join([good, good, latin, good]) + end)
    with pytest.raises(DataError) as raised:
        check_file(tmp_path / name)
    assert str(raised.value) == f"{tmp_path / name}, line 3: not UTF-8: byte 0xfc"


def test_only_the_first_bad_lines_are_shown(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        check_file(lines(tmp_path / "chats.jsonl", *["{"] * 14))
    assert len(str(raised.value).splitlines()) == 11
    assert str(raised.value).endswith("and 4 more such lines")


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    tool = {"conversations": [*GOOD["conversations"], {"from": "tool", "value": "42"}]}
    path = lines(tmp_path / "chats.jsonl", GOOD, {"conversations": []}, {"conversations": None}, tool)
    assert check_file(path).warnings == [
        f"{path}, line 2: an empty conversation is left out",
        f"{path}, line 3: an empty conversation is left out",
        f"{path}, line 4: turn 3 of the unknown role 'tool' is left out",
    ]


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_records_with_images_are_counted_in_one_warning(tmp_path: Path, name: str) -> None:
    """And it comes first: of many warnings only the first ones are shown."""
    llava = [GOOD | {"image": "cat.png"}, GOOD | {"images": ["cat.png", "dog.png"], "image": "cat.png"}]
    in_a_turn = {"conversations": [GOOD["conversations"][0] | {"images": ["cat.png"]}, GOOD["conversations"][1]]}
    without = [GOOD | {"images": [], "image": None, "video": ""}, GOOD | {"imagery": "vivid"}]
    items = [{"conversations": []}, *without, *llava, in_a_turn, GOOD]
    path = lines(tmp_path / name, *items)
    if name.endswith(".json"):
        path.write_text("[" + ",\n".join(map(json.dumps, items)) + "]")
    assert check_file(path).warnings == [
        f"{path}: 3 records have images (first: line 4): only their text is extracted; images are out of reach of "
        "speculators 0.3.0",
        f"{path}, line 1: an empty conversation is left out",
    ]


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (["images"], "images"),
        (["video"], "videos"),
        (["videos"], "videos"),
        (["audio"], "audio clips"),
        (["audios", "image"], "audio clips and images"),
    ],
)
def test_other_media_have_their_names(tmp_path: Path, keys: list[str], what: str) -> None:
    (warning,) = check_file(lines(tmp_path / "chats.jsonl", GOOD | dict.fromkeys(keys, "a.file"))).warnings
    assert f" 1 records have {what} (first: line 1): only their text is extracted; {what} are out of reach" in warning


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[\n{"conversations": []},\n{"conversations": [}\n]', "line 3: not JSON: Expecting value"),
        ('[\n{"conversations": []}\n\n{"conversations": []}]', "line 4: not JSON: expected ',' or ']' after an item"),
        ('[{"conversations": []}, 7]', "line 1: expected an object"),
        ("[]", "has no conversations"),
        ("\n \n", "has no conversations"),
    ],
)
def test_lists(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "chats.json").write_text(text)
    with pytest.raises(DataError, match=said):
        check_file(tmp_path / "chats.json")
