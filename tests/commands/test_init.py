"""A profile file from a target, drafts and a data file: valid, with the right kinds and columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from alphaprof.cli.app import app
from alphaprof.commands.init import init
from alphaprof.config.load import load_profile
from alphaprof.errors import AlphaprofError, DataUnreadable, OptionInvalid
from tests.loops import each

TALK = {"messages": [{"role": "user", "content": "hello"}], "conversation_id": "c-1"}


def written(folder: Path, row: object = TALK, *drafts: str) -> Any:
    (folder / "traffic.jsonl").write_text("\n" + json.dumps(row) + "\n")
    init("Qwen/Qwen3-8B", drafts, [folder / "traffic.jsonl"], folder / "my.yaml")
    load_profile(folder / "my.yaml")
    return yaml.safe_load((folder / "my.yaml").read_text())


def test_the_column_of_prompts_and_that_of_clusters_are_found(tmp_path: Path) -> None:
    (source,) = written(tmp_path)["data"]
    assert source == {"domain": "traffic", "path": "traffic.jsonl", "messages": "messages", "cluster": "conversation_id"}
    for name, row, prompt in (("a", {"n": 1, "prompt": "x"}, "{prompt}"), ("b", {"n": 1, "question": "x"}, "{question}")):
        (tmp_path / name).mkdir()
        (source,) = written(tmp_path / name, row)["data"]
        assert (source["prompt"], source["chat"]) == (prompt, True)


CHAT = [{"role": "user", "content": "hello"}]
SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [  # a first row with more than one text, and the columns to find
    (
        {"custom_id": "r-1", "body": {"messages": CHAT, "tools": [{"type": "function"}]}},
        {"messages": "body.messages", "tools": "body.tools"},
    ),
    ({"id": "a", "conversations": [{"from": "human", "value": "hello"}]}, {"messages": "conversations"}),
    ({"id": "a", "input": json.dumps(CHAT), "output": json.dumps(CHAT)}, {"messages": "input"}),
    ({"id": "a", "call": {"log": CHAT}}, {"messages": "call.log"}),
    ({"id": "a", "question": "hello", "answer": "no"}, {"prompt": "{question}", "chat": True}),
    (
        {"id": "a", "instruction": "say", "input": "hello", "output": "x"},
        {"prompt": "{instruction}\n\n{input}", "chat": True},
    ),
    ({"question_id": 81, "category": "writing", "turns": ["hello", "more"]}, {"prompt": "{turns.0}", "chat": True}),
    ({"id": "a", "inputs": {"prompt": "hello"}}, {"prompt": "{inputs.prompt}", "chat": True}),
]


@pytest.mark.parametrize(("row", "columns"), SHAPES)
def test_chats_and_prompts_are_found_by_name_and_shape(row: dict[str, Any], columns: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    (first,) = init("target", [], [tmp_path / "t.jsonl"], tmp_path / "my.yaml")
    (source,) = yaml.safe_load((tmp_path / "my.yaml").read_text())["data"]
    assert {name: value for name, value in source.items() if name not in ("domain", "path", "cluster")} == columns
    assert "hello" in first


@pytest.mark.parametrize("row", [{"id": "a", "title": "b"}, {"chosen": CHAT, "rejected": CHAT}, {"one": CHAT, "two": CHAT}])
def test_it_asks_where_no_name_says_which_column_holds_prompts(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    with pytest.raises(OptionInvalid) as caught:
        init("target", [], [tmp_path / "t.jsonl"], tmp_path / "my.yaml")
    assert "--messages COLUMN" in caught.value.hint
    name = list(row)[1]
    options = {"messages": name} if isinstance(row[name], list) else {"prompt": name}
    init("target", [], [tmp_path / "t.jsonl"], tmp_path / "my.yaml", **options)
    (source,) = yaml.safe_load((tmp_path / "my.yaml").read_text())["data"]
    assert source.get("messages", source.get("prompt")) in (name, f"{{{name}}}")


READ: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {  # a first row, what a source has, what is shown
    "anthropic": (
        {"system": "Be terse.", "messages": CHAT},
        {"messages": "messages"},
        ["  system: Be terse.", "  user: hello"],
    ),
    "responses": (
        {"instructions": "Be terse.", "input": "hello", "category": "a"},
        {"messages": "input", "domain": {"column": "category"}},
        ["  system: Be terse.", "  user: hello"],
    ),
    "gemini": ({"contents": [{"parts": [{"text": "hello"}]}]}, {"messages": "contents"}, ["  user: hello"]),
    "span": (
        {"attributes": {"gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]}},
        {"messages": "attributes.gen_ai.input.messages"},
        ["  user: hello"],
    ),
    "beside": (
        {"messages": CHAT, "system_prompt": "S", "domain": "code"},
        {"messages": "messages", "domain": {"column": "domain"}},
        ["  user: hello", "  (not in the prompt: system_prompt; if your server puts it there: system: '{system_prompt}')"],
    ),
    "long": (
        {"messages": [{"role": "user", "content": "x " * 999 + "\nend"}, {"role": "assistant", "content": "a"}]},
        {"messages": "messages"},
        [
            "  user: " + "x " * 999,
            "  end",
            "  (cut before this answer; to measure answers: continuation {kind: given, answer: last})",
        ],
    ),
}


@pytest.mark.parametrize("name", READ)
def test_the_whole_first_prompt_is_shown_as_a_server_reads_it(name: str, tmp_path: Path) -> None:
    row, columns, lines = READ[name]
    folder = tmp_path / "logs"  # a folder is a source like a file
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps(row))
    (first,) = init("target", [], [folder], tmp_path / "my.yaml")
    (source,) = yaml.safe_load((tmp_path / "my.yaml").read_text())["data"]
    assert source == {"domain": "logs", "path": "logs"} | columns
    assert first.splitlines() == ["first prompt of logs:", *lines]


@each(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "text": "hello"}]}, "a turn of 'user' that has no content, but text"),
        ({"turns": [{"from": "critic", "value": "hello"}]}, "a turn from 'critic'"),
        ({"messages": [{"role": "user", "content": " "}]}, "a prompt that says nothing"),
    ],
)
def test_no_profile_is_written_of_turns_that_are_not_read(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataUnreadable, match=words):
        init("target", [], [tmp_path / "t.jsonl"], tmp_path / "my.yaml")
    assert not (tmp_path / "my.yaml").exists()


@each("name", ["./none", "/none/here", "x/y/none.gguf"])
def test_a_model_that_must_be_here_and_is_not_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(TALK))
    for target, drafts in (("target", [name]), (name, [])):
        with pytest.raises(OptionInvalid, match=f"{name} does not exist"):
            init(target, drafts, [tmp_path / "t.jsonl"], tmp_path / "my.yaml")


def test_drafts_are_of_the_kinds_that_their_names_or_files_say(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"], "block_size": 12}))
    found = written(tmp_path, TALK, "a/b-EAGLE3-c", str(folder), "amd/PARD-Llama", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")
    kinds = {name: draft["kind"] for name, draft in found["drafts"].items()}
    assert kinds == {
        **{kind: kind for kind in ("eagle3", "dflash", "pard")},
        "small": "model",
        "small5": "model",
        "ngram": "prompt_lookup",
    }
    assert found["drafts"]["dflash"]["model"] == "head"  # as seen from the profile
    assert found["gammas"] == [1, 2, 3, 4, 5, 6, 7, 8, 11]


def test_prompt_lookup_by_name_is_the_draft_that_is_there_anyway(tmp_path: Path) -> None:
    """`--draft ngram` is no model on a hub."""
    assert written(tmp_path, TALK, "ngram", "prompt_lookup")["drafts"] == {"ngram": {"kind": "prompt_lookup"}}


def test_the_commented_costs_are_valid(tmp_path: Path) -> None:
    written(tmp_path)
    text = (tmp_path / "my.yaml").read_text()
    (tmp_path / "other.yaml").write_text(text.replace("# costs:", "costs:"))
    assert load_profile(tmp_path / "other.yaml").costs.source == "roofline"


def test_tables_are_read_too(tmp_path: Path) -> None:
    table = pd.DataFrame({"id": [1], "prompt": ["x"]})
    table.to_csv(tmp_path / "t.csv")
    table.to_parquet(tmp_path / "t.parquet")
    for name in ("t.csv", "t.parquet"):
        init("target", [], [tmp_path / name], tmp_path / f"{name}.yaml")
        assert yaml.safe_load((tmp_path / f"{name}.yaml").read_text())["data"][0]["prompt"] == "{prompt}"


FAULTS = {"": "is empty", "[1]": "is not a JSON object", '{"n": 1}': "no column that is known", "{": "is not JSON"}


@each("content", FAULTS)
def test_data_that_tell_nothing_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    with pytest.raises(AlphaprofError, match=FAULTS[content]):
        init("target", [], [tmp_path / "data.jsonl"], tmp_path / "my.yaml")
    assert not (tmp_path / "my.yaml").exists()


def test_the_command_says_what_is_next_and_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "traffic.jsonl").write_text(json.dumps(TALK))
    call = ["init", "target", "--data", str(tmp_path / "traffic.jsonl"), "--out", str(tmp_path / "my.yaml")]
    assert f"Next: alphaprof profile {tmp_path / 'my.yaml'} --dry-run" in CliRunner().invoke(app, call).stdout
    spaced = tmp_path / "my own #1.yaml"
    assert f"Next: alphaprof profile '{spaced}' --dry-run" in CliRunner().invoke(app, [*call[:-1], str(spaced)]).stdout
    assert "exists already" in str(CliRunner().invoke(app, call).exception)


def test_every_data_file_is_a_source_with_a_domain_of_its_own(tmp_path: Path) -> None:
    call = ["init", "target", "--out", str(tmp_path / "my.yaml")]
    for name in ("a/chat.jsonl", "code.jsonl", "b/chat.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(TALK))
        call += ["--data", str(tmp_path / name)]
    assert CliRunner().invoke(app, call).exit_code == 0
    found = [(source["domain"], source["path"]) for source in yaml.safe_load((tmp_path / "my.yaml").read_text())["data"]]
    assert found == [("chat", "a/chat.jsonl"), ("code", "code.jsonl"), ("chat2", "b/chat.jsonl")]
    with pytest.raises(AlphaprofError, match="twice"):
        init("target", [], [tmp_path / "code.jsonl"] * 2, tmp_path / "other.yaml")


def test_prompts_of_a_base_model_stay_as_they_are(tmp_path: Path) -> None:
    """A local model that has no chat template; with one, in either file that may hold it, prompts are turns of the user."""
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    model = tmp_path / "model"
    model.mkdir()
    found = []
    for number, (name, text) in enumerate(
        [
            ("tokenizer_config.json", "{}"),
            ("chat_template.jinja", "{{ messages }}"),
            ("tokenizer_config.json", '{"chat_template": ""}'),
        ]
    ):
        if number == 2:
            (model / "chat_template.jinja").unlink()
        (model / name).write_text(text)
        out = tmp_path / f"{number}.yaml"
        init(str(model), [], [tmp_path / "prompts.jsonl"], out)
        found.append(yaml.safe_load(out.read_text())["data"][0].get("chat", False))
    assert found == [False, True, True]
