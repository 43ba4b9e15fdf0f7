"""Local conversation files, looked at line by line before anything slow starts.

v0.3.0's loader says "JSON parse error" without a line, and its preprocessing leaves out or misreads what it does not
expect: `null` as an answer becomes the text "None", and a file in which some turns have `from`/`value` and others
`role`/`content` loses one kind, because all lines are brought into one schema. Images beside the text vanish without a
word, since only token ids and masks are kept.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = ("human", "user", "gpt", "assistant", "system")  # those that v0.3.0's preprocessing knows
KEYS = ("conversations", "messages")
_STYLES = {"from": "value", "role": "content"}
_MEDIA = {"image": "images", "video": "videos", "audio": "audio clips"}  # by key, which may be a plural too
SHOWN = 10


class DataError(ValueError):
    """The data cannot be used; the text names file and line."""


@dataclass
class Findings:
    lines: int = 0
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what the preprocessing leaves out


def check_file(path: Path) -> Findings:
    """Look at every conversation of a .jsonl or .json file (one object a line, or one list of objects).

    Raises DataError naming the first lines that cannot be used. What v0.3.0 leaves out (empty conversations, turns of
    unknown roles, images) is in the warnings.
    """
    found = Findings()
    style: tuple[str, str] | None = None  # how turns are written, and where that was seen first
    key: tuple[str, str] | None = None
    kinds: set[str] = set()  # of media, and the lines that have some
    with_media: list[int] = []
    try:
        for line, item in _items(path):
            found.lines += 1
            where = f"{path}, line {line}"
            if isinstance(item, _Broken):
                found.errors.append(f"{where}: {item.why}")
                continue
            name = next((name for name in KEYS if isinstance(item, dict) and name in item), None)
            if name is None:
                what = f"an object with {', '.join(map(repr, item))}" if isinstance(item, dict) else _kind(item)
                found.errors.append(f"{where}: expected an object with a list 'conversations', found {what}")
                continue
            key = key or (name, where)
            if name != key[0]:
                found.errors.append(f"{where}: has {name!r}, but {key[1]} has {key[0]!r}: use one of them in one file")
                continue
            if not item[name] and (item[name] is None or isinstance(item[name], list)):
                found.warnings.append(f"{where}: an empty conversation is left out")
                continue
            turns = item[name] if isinstance(item[name], list) else []
            own = (key for each in (item, *turns) if isinstance(each, dict) for key, value in each.items() if value)
            if here := media(own):
                kinds |= here
                with_media.append(line)
            for error, used in _turns(item[name], where, found.warnings):
                if error:
                    found.errors.append(f"{where}: {error}")
                elif style is None:
                    style = (used, where)
                elif used != style[0]:
                    found.errors.append(
                        f"{where}: a turn has {used!r}, but {style[1]} has {style[0]!r}: use one of them in one file"
                    )
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    if not found.lines:
        found.errors.append(f"{path} has no conversations")
    if found.errors:
        more = len(found.errors) - SHOWN
        raise DataError("\n".join([*found.errors[:SHOWN], *([f"and {more} more such lines"] if more > 0 else [])]))
    if with_media:  # one warning for all of them, and first: of many warnings only the first ones are shown
        having = f"{len(with_media)} records have {_listing(kinds)} (first: line {with_media[0]})"
        found.warnings.insert(0, f"{path}: {having}: {only_text(kinds)}")
    return found


def media(names: Iterable[str]) -> set[str]:
    """What the keys or columns of such names hold beside text."""
    return {_MEDIA[key] for name in names if (key := name.removesuffix("s")) in _MEDIA}


def only_text(kinds: Iterable[str]) -> str:
    return f"only their text is extracted; {_listing(kinds)} are out of reach of speculators 0.3.0"


def _listing(kinds: Iterable[str]) -> str:
    return " and ".join(sorted(kinds))


def _turns(conversation: Any, where: str, warnings: list[str]) -> Iterator[tuple[str, str]]:
    """For each turn what is wrong with it ("": nothing), and under which name its role is."""
    if not isinstance(conversation, list):
        yield f"the conversation is {_kind(conversation)}, expected a list of turns", ""
        return
    for number, turn in enumerate(conversation, 1):
        if not isinstance(turn, dict):
            yield f"turn {number} is {_kind(turn)}, expected an object", ""
            continue
        style = next((name for name in _STYLES if name in turn), None)
        if style is None:
            yield f"turn {number} has neither 'from' nor 'role'", ""
            continue
        text = turn.get(_STYLES[style])
        if not isinstance(text, str):
            yield f"turn {number}: {_STYLES[style]!r} is {_kind(text)}, expected a text{_other_parts(text)}", style
        elif not _encodes(text):  # the loader would say no more than "an error occurred"
            yield f"turn {number}: {_STYLES[style]!r} holds half of a character (a lone surrogate, as \\ud83d)", style
        elif turn[style] not in ROLES:
            warnings.append(f"{where}: turn {number} of the unknown role {turn[style]!r} is left out")
        yield "", style


def _other_parts(content: Any) -> str:
    """Of content in parts ({"type": "image_url", ...}, or {"image": ...}) what the first one is that is no text."""
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and (kind := part.get("type") or next(iter(part), "text")) not in ("text", "type"):
            return f" (text prompts only: there is a part {kind!r}; images are out of reach of speculators 0.3.0)"
    return ""


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "nothing (null)"}
    return names.get(type(value), "a number")


@dataclass(frozen=True)
class _Broken:
    why: str


def _items(path: Path) -> Iterator[tuple[int, Any]]:
    """Line number and content of each item."""
    with path.open("rb") as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
        file.seek(0)
        if start == b"[":
            content = file.read()
            try:
                yield from _listed(content.decode())
            except UnicodeDecodeError as error:
                yield content.count(b"\n", 0, error.start) + 1, _Broken(f"not UTF-8: byte {content[error.start]:#x}")
            return
        for number, line in enumerate(file, 1):  # bytes: a line that is not UTF-8 is one bad line, not the file's end
            if line.strip():
                try:
                    yield number, json.loads(line.decode())
                except UnicodeDecodeError as error:
                    yield number, _Broken(f"not UTF-8: byte {line[error.start]:#x}")
                except (ValueError, RecursionError) as error:
                    marked = line.startswith(codecs.BOM_UTF8)
                    what = "it begins with a byte-order mark; save it as UTF-8 without one" if marked else error
                    yield number, _Broken(f"not JSON: {what}")


def _listed(text: str) -> Iterator[tuple[int, Any]]:
    """The items of one list. After one that is not JSON the next cannot be found."""
    decoder, place, line, counted = json.JSONDecoder(), text.index("[") + 1, 1, 0
    first = True
    while True:
        place = _skip(text, place)
        if text[place : place + 1] == "]":
            return
        if not first:
            if text[place : place + 1] != ",":
                yield line + text.count("\n", counted, place), _Broken("not JSON: expected ',' or ']' after an item")
                return
            place = _skip(text, place + 1)
        line, counted, first = line + text.count("\n", counted, place), place, False
        try:
            item, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            at = getattr(error, "pos", place)
            yield line + text.count("\n", counted, at), _Broken(f"not JSON: {getattr(error, 'msg', error)}")
            return
        yield line, item


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place
