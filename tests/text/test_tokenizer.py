"""Tokenizers: exact ids, exact bytes back, and no way from user text to a control token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from firstlight.spec.errors import ConfigError, RequestError
from firstlight.text.tiktoken_form import PATTERN
from firstlight.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_file

FAMILY = "x\U0001f469\u200d\U0001f469\u200d\U0001f467 \u65e5\u672c \u00f1"
TEXTS = {
    "english": "It's the first light: we'll see, won't we? I'D say so.",
    "chinese": "你好\uff0c世界。今天是2024年12月31日\uff0c天气晴朗\uff01繁體字與日本語の混在",
    "code": "def f(x: int) -> str:\n\treturn f'{x**2:>08d}'  # done\r\n\r\n\n    pass\n",
    "emoji": FAMILY + "\U0001f1eb\U0001f1f7 e\u0301 \ufeff\ufffd",
    "spaces": "  a\t\tb \n \n\n  c    \u3000\u00a0 ",
    "numbers": "1 12 123 1234 12345 3.14159 \u0660\u0661\u0662\u0663",
    "markup": "<|open|>message role=\"user\"<|sep|>hi<|close|><|end_of_msg|>[EOS]<\uff5cUser\uff5c>",
    "nul": "a\x00b\x7f\x1b[0m",
    "empty": "",
}


@pytest.mark.parametrize("name", TEXTS)
def test_round_trip(tokenizer: Tokenizer, name: str) -> None:
    ids = tokenizer.encode(TEXTS[name])
    assert TEXTS[name] == tokenizer.decode(ids)
    assert TEXTS[name].encode() == b"".join(map(tokenizer.token_bytes, ids))


def test_round_trip_of_random_text(tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    for _ in range(200):
        letters = [draw.randrange(0x11000) for _ in range(draw.randint(1, 40))]
        text = "".join(chr(letter) for letter in letters if not 0xD800 <= letter < 0xE000)
        assert text == tokenizer.decode(tokenizer.encode(text))


K3_WORDS = {
    "message": 2778, "think": 39964, "response": 12092, "tools": 25385, "call": 10257, "argument": 47185, "json": 5534, " role": 6244,
    " type": 1798, " tool": 4453, " index": 4002, " key": 2355, " name": 1530, '="': 878, '"': 1, "assistant": 69702, "user": 2482,
    "system": 14062, "tool": 20960,
}


def test_k3_ids_of_words(kimi_k3: Tokenizer) -> None:
    assert {word: [token_id] for word, token_id in K3_WORDS.items()} == {word: kimi_k3.encode(word) for word in K3_WORDS}


@pytest.mark.parametrize(("text", "ids"), [
    ("Is Beijing the capital of China? Answer in JSON.", [3229, 45880, 276, 10484, 318, 9579, 30, 61982, 306, 11419, 13]),
    ("what time is it?", [20161, 1169, 387, 483, 30]),
    (
        "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without markdown code blocks (```json) or any"
        " additional formatting.\nThe JSON data must match the following schema:\n```json\n{\"additionalProperties\":false,\"properties\":"
        "{\"capital\":{\"type\":\"boolean\"}},\"required\":[\"capital\"],\"type\":\"object\"}\n```",
        [1008, 2403, 387, 42070, 472, 1268, 12092, 15764, 129392, 36512, 16518, 12080, 4503, 2746, 413, 10872, 11419, 1544, 2932, 66661, 3253,
         13825, 347, 3251, 5534, 8, 528, 1178, 6031, 44768, 341, 1008, 11419, 1544, 2746, 4620, 276, 4111, 14453, 777, 3251, 5534, 198, 8264,
         58549, 8727, 1289, 8092, 2020, 27129, 22849, 144829, 22849, 2217, 7471, 16849, 60336, 2020, 20331, 46890, 144829, 131917, 2217, 7471,
         3721, 35823, 3251],
    ),
])
def test_k3_ids_of_sentences(kimi_k3: Tokenizer, text: str, ids: list[int]) -> None:
    """Source: prompts whose token counts Moonshot's verifier publishes."""
    assert ids == kimi_k3.encode(text)


def test_k3_control_tokens(kimi_k3: Tokenizer) -> None:
    assert 163840 == kimi_k3.num_vocab
    assert [163586] == kimi_k3.encode("<|end_of_msg|>", special=True)
    assert [163587, 2778, 163589] == kimi_k3.encode("<|open|>message<|sep|>", special=True)
    assert (163584, 163585, ()) == (kimi_k3.bos_id, kimi_k3.eos_id, kimi_k3.prefix_ids)
    assert 163600 == kimi_k3.special_ids["<|reserved_token_163600|>"]
    assert list(range(163584, 163840)) == sorted(kimi_k3.special_ids.values())
    assert {163587, 163588, 163589} == set(kimi_k3.special_ids.values()) - kimi_k3.hidden_ids
    assert "<|open|>think<|sep|>ok" == kimi_k3.decode([163587, 39964, 163589, *kimi_k3.encode("ok"), 163586], skip_special=True)


def test_byte_level_is_bytes(byte_level: Tokenizer) -> None:
    assert list(FAMILY.encode()) == byte_level.encode(FAMILY)
    assert 288 == byte_level.num_vocab
    assert list(range(256, 288)) == sorted(byte_level.special_ids.values())
    assert [258, 259, 97, 261] == byte_level.encode("<|end_of_msg|><|open|>a<|sep|>", special=True)


def test_user_text_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    control_ids = set(tokenizer.special_ids.values())
    for text, token_id in tokenizer.special_ids.items():
        for typed in (text, f"a{text}b", f" {text}\n{text}"):
            ids = tokenizer.encode(typed)
            assert not control_ids & set(ids), typed
            assert typed == tokenizer.decode(ids)
        assert [token_id] == tokenizer.encode(text, special=True)
        assert text.encode() == tokenizer.token_bytes(token_id)


def test_parts_of_a_control_token_do_not_join(kimi_k3: Tokenizer) -> None:
    assert "<|open|>" == kimi_k3.decode(kimi_k3.encode("<|op", special=True) + kimi_k3.encode("en|>", special=True))
    assert 163587 not in kimi_k3.encode("<|op", special=True) + kimi_k3.encode("en|>", special=True)


def test_special_encoding_equals_the_library(deepseek: Tokenizer, deepseek_folder: Path) -> None:
    library = tokenizers.Tokenizer.from_file(str(deepseek_folder / "tokenizer.json"))
    draw = random.Random(3)
    pieces = [*list(deepseek.special_ids)[:8], *list(deepseek.special_ids)[-12:], "hello ", " 你好", "\n\n", "x", "<\uff5c", "123456"]
    for _ in range(300):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        assert library.encode(text, add_special_tokens=False).ids == deepseek.encode(text, special=True)
    for text in TEXTS.values():
        assert library.encode(text, add_special_tokens=False).ids == deepseek.encode(text, special=True)


def test_unknown_ids_are_refused(tokenizer: Tokenizer) -> None:
    for token_id in (-1, tokenizer.num_vocab, 2**40):
        with pytest.raises(RequestError, match=f"token id {token_id} is not in the vocabulary"):
            tokenizer.decode([1, token_id])
        with pytest.raises(RequestError, match=f"Use ids from 0 to {tokenizer.num_vocab - 1}"):
            tokenizer.token_bytes(token_id)


def test_every_id_has_bytes(tokenizer: Tokenizer) -> None:
    spellings = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.num_vocab)]
    assert all(spellings)
    assert {bytes([byte]) for byte in range(256)} <= set(spellings)


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    for special in (False, True):
        with pytest.raises(RequestError, match=r"lone surrogate U\+D83D at character 2"):
            tokenizer.encode("ab\ud83dc", special=special)


def test_long_runs_are_cut_as_the_model_was_trained(kimi: Tokenizer) -> None:
    run = "light" * 12_001
    pieces = [run[:24_999], run[24_999:]]
    assert [token_id for begin in range(0, len(run), 25_000) for token_id in kimi.encode(run[begin : begin + 25_000])] == kimi.encode(run)
    assert [token_id for piece in pieces for token_id in kimi.encode(piece)] != kimi.encode(run)
    short = "light" * 5_000
    text = f"{short} {short} {' ' * 25_001}x"
    assert kimi.encode(text[:75_002]) + kimi.encode(text[75_002:]) == kimi.encode(text)
    words = "light " * 70_000
    assert kimi.encode(words[:400_000]) + kimi.encode(words[400_000:]) == kimi.encode(words)


@pytest.mark.parametrize("letter", ["a", " ", "\n", "日", "'", "1", "\U0001f469"])
def test_long_text_costs_linear_time(tokenizer: Tokenizer, letter: str) -> None:
    """A quadratic encoder would need minutes; the limit of the test run catches it."""
    text = letter * 200_000
    assert text == tokenizer.decode(tokenizer.encode(text))


def test_pattern_pieces() -> None:
    regex = pytest.importorskip("regex")
    pieces = regex.findall(PATTERN, "HelloWorld it's 你好ab 12345, x=1;\n\n  end", regex.V1)
    assert ["Hello", "World", " it's", " ", "你好", "ab", " ", "123", "45", ",", " x", "=", "1", ";\n\n", " ", " end"] == pieces


# Folders that lack something, or are damaged.


def kimi_folder(folder: Path, ranks: bytes | None = None, **settings: Any) -> Path:
    """256 single bytes and two control tokens, but for what is changed."""
    from base64 import b64encode

    lines = b"".join(b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
    (folder / "tiktoken.model").write_bytes(lines if ranks is None else ranks)
    settings = {"added_tokens_decoder": {"256": {"content": "[BOS]"}, "257": {"content": "[EOS]"}}, "bos_token": "[BOS]", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_no_files_is_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 12}')
    assert load_tokenizer(tmp_path) is None
    assert tokenizer_file(tmp_path / "nowhere") is None


def test_the_own_form_goes_first(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("damaged")
    tokenizer = load_tokenizer(kimi_folder(tmp_path))
    assert tokenizer is not None and 258 == tokenizer.num_vocab


def test_vocabulary_grows_to_that_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 300}}')
    tokenizer = load_tokenizer(kimi_folder(tmp_path))
    assert tokenizer is not None
    assert (300, b"<|reserved_token_299|>") == (tokenizer.num_vocab, tokenizer.token_bytes(299))


def test_without_settings_every_slot_is_reserved(tmp_path: Path) -> None:
    (kimi_folder(tmp_path) / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert (512, None, 256) == (tokenizer.num_vocab, tokenizer.bos_id, tokenizer.special_ids["<|reserved_token_256|>"])


@pytest.mark.parametrize(("wanted", "prefix"), [(True, (256,)), (False, ()), (None, ())])
def test_a_prompt_begins_as_the_settings_say(tmp_path: Path, wanted: bool | None, prefix: tuple[int, ...]) -> None:
    tokenizer = load_tokenizer(kimi_folder(tmp_path, add_bos_token=wanted))
    assert tokenizer is not None and prefix == tokenizer.prefix_ids


@pytest.mark.parametrize(("change", "message"), [
    ({"ranks": b"!!!! 0\n"}, "line 1 is b'!!!! 0'"),
    ({"ranks": b"IQ==\n"}, "line 1 is b'IQ=='"),
    ({"ranks": b"IQ== 0 1\n"}, "line 1 is"),
    ({"ranks": b"IQ== zero\n"}, "line 1 is"),
    ({"ranks": b"IQ== 0\nIg== 2\n"}, "not ranked 0 to 1"),
    ({"ranks": b""}, "holds 0 tokens"),
    ({"ranks": b"\xff\xfe\x00"}, "line 1 is"),
    ({"added_tokens_decoder": {"x": {"content": "a"}}}, "has the key 'x', not an id"),
    ({"added_tokens_decoder": {"256": {}}}, "an id and a text are needed"),
    ({"added_tokens_decoder": {"256": "[BOS]"}}, "an id and a text are needed"),
    ({"added_tokens_decoder": []}, "a dict is needed"),
    ({"added_tokens_decoder": {"256": {"content": "a"}, "257": {"content": "a"}}}, "'a' stands for two added tokens"),
    ({"added_tokens_decoder": {"256": {"content": "<|reserved_token_257|>"}, "258": {"content": "a"}}}, "stands for two added tokens"),
    ({"added_tokens_decoder": {"255": {"content": "a"}}}, "names token 255, the 256 ranks of tiktoken.model leave 256 to 511"),
    ({"added_tokens_decoder": {"512": {"content": "a"}}}, "names token 512"),
    ({"bos_token": 5}, "`bos_token` is 5"),
    ({"tokenizer_class": "QWenTokenizer"}, "`tokenizer_class` is 'QWenTokenizer'"),
])
def test_damaged_tiktoken_files(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(kimi_folder(tmp_path, **change))
    assert message in raised.value.fact
    assert raised.value.fix


def test_a_cut_rank_file_is_noticed(tmp_path: Path, kimi: Tokenizer) -> None:
    """Cut between two lines it is still well-formed; the control tokens then leave a gap."""
    source = Path(__file__).resolve().parents[1] / "data" / "tokenizers" / "kimi"
    lines = (source / "tiktoken.model").read_bytes().splitlines(keepends=True)
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines[:100_000]))
    (tmp_path / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    with pytest.raises(ConfigError, match="names token 163584, the 100000 ranks"):
        load_tokenizer(tmp_path)


def test_damaged_settings(tmp_path: Path) -> None:
    (kimi_folder(tmp_path) / "tokenizer_config.json").write_bytes(b'{"added_tokens_decoder": {')
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_tokenizer(tmp_path)


# tokenizer.json in unusual shapes.


def byte_letters() -> dict[str, int]:
    """The byte-level alphabet as the library has it, numbered."""
    return {letter: number for number, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}


def json_folder(folder: Path, change: Callable[[dict[str, Any]], None] = lambda layout: None, settings: dict[str, Any] | None = None) -> Path:
    """A byte-level tokenizer.json without merges, but for what is changed."""
    layout = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": byte_letters(), "merges": []},
    }
    change(layout)
    (folder / "tokenizer.json").write_text(json.dumps(layout))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    """One entry of `added_tokens`."""
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True, **flags}


def test_token_in_the_vocabulary_cannot_be_built(tmp_path: Path) -> None:
    """With `ignore_merges` a whole word of the vocabulary is one token, control tokens too."""

    def change(layout: dict[str, Any]) -> None:
        layout["model"]["vocab"]["<think>"] = 256
        layout["model"]["ignore_merges"] = True
        layout["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}, {**layout["pre_tokenizer"], "use_regex": False}]}
        layout["added_tokens"] = [added(256, "<think>", special=False)]

    tokenizer = load_tokenizer(json_folder(tmp_path, change))
    assert tokenizer is not None
    assert [256] == tokenizer.encode("<think>", special=True)
    for text in ("<think>", "a <think> b", "<think>"):
        assert 256 not in tokenizer.encode(text)
        assert text == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("flags", [{"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}, {"single_word": True}])
def test_neighbours_of_a_control_token(tmp_path: Path, flags: dict[str, bool]) -> None:
    folder = json_folder(tmp_path, lambda layout: layout["added_tokens"].append(added(256, "<mask>", **flags)))
    tokenizer, library = load_tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer is not None
    for text in ("a <mask> b", "a<mask>b", "<mask>", "  \n <mask>\t  <mask> ", "x <mask><mask> y", ". <mask>."):
        assert library.encode(text, add_special_tokens=False).ids == tokenizer.encode(text, special=True), text


def test_spaces_among_the_added_tokens_are_text(tmp_path: Path) -> None:
    folder = json_folder(tmp_path, lambda layout: layout["added_tokens"].append(added(256, "    ", special=False)))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert 256 in tokenizer.encode("a    b")
    assert {} == tokenizer.special_ids
    assert "a    b" == tokenizer.decode(tokenizer.encode("a    b"))


def test_prefix_of_the_post_processor(tmp_path: Path) -> None:
    def change(layout: dict[str, Any]) -> None:
        layout["added_tokens"] = [added(256, "[gMASK]"), added(257, "<sop>")]
        layout["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "[gMASK]", "type_id": 0}}, {"SpecialToken": {"id": "<sop>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in (("[gMASK]", 256), ("<sop>", 257))},
        }

    tokenizer = load_tokenizer(json_folder(tmp_path, change))
    assert tokenizer is not None
    assert (256, 257) == tokenizer.prefix_ids
    assert 2 == len(tokenizer.encode("ab"))
    settings = {"bos_token": "[gMASK]", "add_bos_token": False}
    without = load_tokenizer(json_folder(tmp_path, change, settings))
    assert without is not None and (257,) == without.prefix_ids


def test_truncation_and_padding_of_the_file_do_not_count(tmp_path: Path) -> None:
    def change(layout: dict[str, Any]) -> None:
        layout["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        layout["padding"] = {
            "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}

    tokenizer = load_tokenizer(json_folder(tmp_path, change))
    assert tokenizer is not None
    assert "abcdefghij" == tokenizer.decode(tokenizer.encode("abcdefghij"))
    assert 1 == len(tokenizer.encode("a"))


def test_rows_that_only_pad_the_model_have_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 260}')
    tokenizer = load_tokenizer(json_folder(tmp_path))
    assert tokenizer is not None
    assert (260, b"", "") == (tokenizer.num_vocab, tokenizer.token_bytes(259), tokenizer.decode([256, 259]))


def test_byte_fallback(tmp_path: Path) -> None:
    """The form of Llama 2: a mark for spaces, one in front of the text, unknown letters as bytes."""

    def change(layout: dict[str, Any]) -> None:
        letters = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"\u2581": 257, "a": 258, "b": 259, "\u2581a": 260}
        layout["model"] = {
            "type": "BPE", "vocab": letters, "merges": [["\u2581", "a"]], "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
        layout["normalizer"] = {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}
        layout["pre_tokenizer"] = None
        layout["decoder"] = {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}

    tokenizer = load_tokenizer(json_folder(tmp_path, change))
    assert tokenizer is not None
    assert [260, 259] == tokenizer.encode("ab")
    for text in ("ab", " ab", "a  b ", FAMILY):
        assert text == tokenizer.decode(tokenizer.encode(text))
    assert b"\xf0" == tokenizer.token_bytes(0xF0 + 1)
    assert b" a" == tokenizer.token_bytes(260)


@pytest.mark.parametrize(("change", "message"), [
    (lambda layout: layout.pop("model"), "is damaged"),
    (lambda layout: layout["model"].update(merges=[["a", "??"]]), "is damaged"),
    (lambda layout: layout["model"].update(vocab=5), "is damaged"),
    (lambda layout: layout.update(added_tokens={"a": 1}), "is not a tokenizer"),
    (lambda layout: layout.update(added_tokens=["a"]), "an id and a text are needed"),
    (lambda layout: layout.update(added_tokens=[{"id": 256}]), "an id and a text are needed"),
    (lambda layout: layout.update(added_tokens=[added(256, "<a>"), added(257, "<a>")]), "stands for two added tokens"),
    (lambda layout: layout.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "decodes with ['WordPiece']"),
    (lambda layout: layout.update(decoder=None), "decodes with nothing"),
])
def test_damaged_json_files(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(json_folder(tmp_path, change))
    assert message in raised.value.fact
    assert raised.value.fix


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'{"model": ', b"\xff\xfe{}", b"\x00" * 64], ids=["empty", "list", "null", "cut", "utf16", "zeros"])
def test_files_that_are_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError):
        load_tokenizer(tmp_path)
