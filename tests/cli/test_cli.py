"""The command line: one JSON document per verb, exit codes, errors in three lines, and nothing written on failure."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import logging
import re
import shutil
import warnings
from importlib import import_module
from pkgutil import resolve_name

import pytest
from typer.testing import CliRunner

import graphwright as gw
from graphwright.cli import app
from graphwright.cli.common import Commands, bar
from graphwright.models.generation.text import prompt_ids
from graphwright.models.train import TrainOptions
from graphwright.progress import Progress
from graphwright.surgery import PruneOptions

pytestmark = pytest.mark.usefixtures("warm")  # how a clean process starts is tested in tests/models/export
CUT = "layers.1.mlp.down -> layers.1.out"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The value of an expression is the value of its last operand. " * 60)
    return path


def test_inspect_describes_the_model(call):
    facts = json.loads(call("inspect", "bundled", "--json"))
    assert facts["schema"] == 1
    assert facts["parameters"] == 1_623_744
    assert facts["family"] == "llama"
    assert facts["tied"] is True
    assert sum(t["bytes"] for t in facts["tensors"]) == facts["nbytes"] == 2 * 1_623_744
    assert "4 layers" in call("inspect", "bundled")


def test_inspect_lists_the_tensors_of_an_unknown_class(call, tmp_path):
    directory = shutil.copytree(gw.open("bundled").directory, tmp_path / "unknown")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["Unknown"]}), encoding="utf-8")
    facts, known = (json.loads(call("inspect", path, "--json")) for path in (directory, "bundled"))
    assert facts["family"] == "unknown class Unknown"
    assert facts["notes"] == ["no registered architecture describes this class: Unknown"]
    shapes = [{t["key"]: (t["dtype"], t["shape"]) for t in found["tensors"]} for found in (facts, known)]
    assert shapes[0] == shapes[1]


@pytest.mark.usefixtures("sim")
def test_generate_runs_on_a_device(call):
    ours, theirs = (call("generate", "bundled", "The", "--tokens", "6", "--device", where) for where in ("sim", "cpu"))
    assert ours == theirs


def test_run_prints_the_probabilities_of_the_model(call):
    facts = json.loads(call("run", "bundled", "--text", "The following", "--watch", "layers.1.out", "--json"))
    model = gw.open("bundled")
    best = int(model.logits(prompt_ids(model, "The following"))[-1].argmax())
    assert facts["top"][0]["id"] == best
    assert [round(t["p"], 6) for t in facts["top"]] == sorted((round(t["p"], 6) for t in facts["top"]), reverse=True)
    assert facts["watch"][0]["shape"] == [1, 13, 192]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "seed": 3, "logprobs": 2},
        {"repetition_penalty": 1.3, "presence": 0.4, "frequency": 0.2, "stop": "e"},
    ],
)
def test_generate_json_matches_the_api(call, options):
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    facts = json.loads(call("generate", "bundled", "The following", "--tokens", 12, *given, "--json"))
    record = json.loads(json.dumps(gw.open("bundled").generate("The following", 12, **options).to_json()))
    for timed in ("setup_s", "prefill_s", "decode_s", "token_s", "tokens_per_s"):
        assert (facts.pop(timed) != 0) == (record.pop(timed) != 0)
    assert {name: facts[name] for name in record} == record
    assert call("generate", "bundled", "The following", "--tokens", 12, *given, "--quiet").rstrip("\n") == facts["text"]


def test_generate_needs_no_tokenizer_and_no_prompt(call, tmp_path):
    m = gw.open("bundled")
    m.save(tmp_path / "m")
    for file in (tmp_path / "m").glob("tokenizer*"):
        file.unlink()
    assert m.tokenizer is not None
    start = [m.tokenizer.bos_id]
    for given, ids in ((["--ids", "84,104 101"], [84, 104, 101]), ([], start)):
        wanted = m.generate(ids, 5).ids
        assert json.loads(call("generate", tmp_path / "m", *given, "--tokens", 5, "--json"))["ids"] == wanted
        assert call("generate", tmp_path / "m", *given, "--tokens", 5, "--quiet").split() == [str(i) for i in wanted]


def test_building_native_code_is_reported_on_stderr(monkeypatch):
    from graphwright import builds
    from graphwright.array.vm.machine import part

    def start(follow):
        builds.notice("building native code")

    monkeypatch.setattr(part, "_ready", False)
    monkeypatch.setattr(part, "_looked", float("inf"))
    monkeypatch.setattr(part, "start", start)
    monkeypatch.setattr(logging.getLogger("graphwright"), "propagate", False)  # pytest shows the log
    for quiet in ((), ("--quiet",)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = CliRunner().invoke(app, ["generate", "bundled", "The", "--tokens", "2", "--json", *quiet])
        assert not [w for w in seen if issubclass(w.category, builds.NativeCodeNotice)]
        assert ("building native code" in result.stderr) is not bool(quiet)
        assert json.loads(result.stdout)["prompt_tokens"] == 3


def test_generate_uses_model_defaults_on_request(call, tmp_path):
    shutil.copytree(gw.open("bundled").directory, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_k": 9}')
    plain, chosen = (
        json.loads(call("generate", tmp_path / "m", "The", "--tokens", 3, *more, "--json"))["sampling"]
        for more in ((), ("--model-defaults",))
    )
    assert (plain["temperature"], chosen["temperature"], chosen["top_k"]) == (0.0, 0.6, 9)


def test_edit_resizes_a_vocabulary_and_repeats_a_block_from_the_shell(call, tmp_path):
    call("edit", "bundled", tmp_path / "wider", "--resize-vocab", 300, "--duplicate", "layers.3", "--why", "more")
    model = gw.open(tmp_path / "wider")
    assert (model.vocab, [e.why for e in model.program.journal]) == (300, ["more"])
    assert model.select("layers").layers.count == 5


def test_edit_undo_and_export_from_the_shell(call, tmp_path):
    saved, out = tmp_path / "saved", tmp_path / "out"
    before = json.loads(call("edit", "bundled", "--cut", CUT, "--out", saved, "--json"))
    assert before["changed"]
    assert f"cut {CUT}" in call("edit", saved, "--log")
    assert call("diff", "bundled", saved, code=1)
    assert "level 3" in call("export", saved, "--plan")
    assert json.loads(call("export", saved, "--plan", "--prefer", "size", "--json"))["level"] == 5
    after = json.loads(call("edit", saved, "--undo", 1, "--json"))
    assert after["after"] == before["before"] == gw.open("bundled").program.hash()
    (tmp_path / "text").write_text("a little text")
    options = ["--onnx-cache", "--opset", 23, "--text", tmp_path / "text", "--max-shard-size", "1MB"]
    printed = call("export", saved, out, "--check", "none", *options)
    assert re.search(r"^bits per byte +[\d.]+ -> [\d.]+, of 12 bytes$", printed, re.M)
    assert b"past_key_values.0.key" in (out / "model.onnx").read_bytes()
    assert len(list(out.glob("*.safetensors"))) > 2
    assert (out / "config.json").read_bytes() == (gw.open("bundled").directory / "config.json").read_bytes()
    call("diff", "bundled", out)


def test_verify_runs_code_only_with_trust_code(call, tmp_path):
    model = gw.open("bundled")
    with model.program.edit("cut") as e:
        e.cut(CUT)
    out = tmp_path / "out"
    model.export(out, prompts=["The"], prefer="size", check="none", timed=False)
    assert "--trust-code" in call("verify", out, code=3)
    assert json.loads(call("verify", out, "--json", "--trust-code"))["unchecked"] == []


def test_saved_model_is_replaced_only_with_overwrite(call, tmp_path):
    for _ in range(2):
        call("edit", "bundled", "--cut", CUT, "--out", tmp_path / "saved", "--overwrite")
    assert "--overwrite" in call("edit", "bundled", "--cut", CUT, "--out", tmp_path / "saved", code=2)


def test_a_prompt_can_be_piped():
    result = CliRunner().invoke(app, ["generate", "bundled", "-", "--tokens", "5", "--quiet"], input="The following")
    assert result.stdout.rstrip("\n") == gw.open("bundled").generate("The following", 5).text


def test_interrupted_training_reports_what_was_saved(call, text, tmp_path, monkeypatch):
    from graphwright.models.train import Trainer

    run = Trainer.run

    def stop_at_three(self, steps, *, progress):
        if self.done >= 2:
            run(self, 1, progress=progress)
            raise KeyboardInterrupt
        return run(self, steps, progress=progress)

    monkeypatch.setattr(Trainer, "run", stop_at_three)
    small = ["--batch", 2, "--window", 32, "--save-every", 2, "--steps", 6]
    state = tmp_path / "state"
    assert f"2 steps are saved in {state}" in call(
        "train", "bundled", "--text", text, "--state", state, *small, code=130
    )
    assert "--state" in call("train", "bundled", "--text", text, *small, code=130)
    monkeypatch.undo()
    assert json.loads(call("train", "bundled", "--text", text, "--state", state, *small, "--json"))["resumed_at"] == 2


def test_the_progress_bar_fits_a_narrow_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    with bar() as progress:
        assert progress is not None
        progress(Progress("training", 3, 1000, {"loss": 1.234, "lr": 5.585e-05, "tokens/s": 12345.0}))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert "3/1000" in text
    assert "loss 1.234" in text
    assert text.count("0:00:00") >= 1
    with monkeypatch.context() as m:
        m.setenv("NO_COLOR", "1")
        with bar() as progress:
            assert progress is None


def test_a_hugging_face_directory_is_never_changed(call, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(gw.open("bundled").directory, copy)
    before = {f.name: f.read_bytes() for f in copy.iterdir()}
    assert "--out" in call("edit", copy, "--cut", CUT, code=2)
    assert {f.name: f.read_bytes() for f in copy.iterdir()} == before


def test_train_resumes_where_it_stopped(call, text, tmp_path):
    small = ["--batch", 2, "--window", 32, "--save-every", 2, "--json"]
    state = tmp_path / "state"
    whole = json.loads(
        call("train", "bundled", "--text", text, "--steps", 4, "--state", state, "--out", tmp_path / "a", *small)
    )
    assert whole["steps"] == 4
    assert whole["options"] == json.loads(json.dumps(dataclasses.asdict(TrainOptions(steps=4, batch=2, window=32))))
    again = json.loads(call("train", "bundled", "--text", text, "--steps", 4, "--state", state, *small))
    assert again["resumed_at"] == 4
    assert again["loss"]["last"] is None
    assert gw.open(tmp_path / "a").program.hash() != gw.open("bundled").program.hash()


def test_train_creates_a_model_from_a_config(call, text, tmp_path):
    fields = dict(
        gw.open("bundled").config.fields,
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=48,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    (tmp_path / "config.json").write_text(json.dumps(fields))
    out = tmp_path / "out"
    facts = json.loads(
        call(
            "train",
            tmp_path / "config.json",
            "--text",
            text,
            "--steps",
            2,
            "--batch",
            2,
            "--window",
            16,
            "--held-out",
            text,
            "--out",
            out,
            "--json",
        )
    )
    assert facts["bits_per_byte"]["after"] > 0
    assert gw.open(out).program.weights["model.norm.weight"].dtype is gw.bfloat16


def test_interrupted_generation_reports_its_text(monkeypatch):
    from graphwright.models.generation.text import TextStream

    add, added = TextStream.add, []

    def interrupted(self, *tokens):
        if len(added) >= 6:
            raise KeyboardInterrupt
        added.extend(tokens)
        return add(self, *tokens)

    monkeypatch.setattr(TextStream, "add", interrupted)
    output = CliRunner().invoke(app, ["generate", "bundled", "The following", "--json"])
    assert output.exit_code == 130
    assert json.loads(output.stdout)["what"].endswith(f"generated: {bytes(added).decode()}")


def test_interruption_is_one_json_document(call, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("graphwright.models.open"), "compare_models", lambda *_, **__: stop())
    output = call("diff", "bundled", "bundled", "--json", code=130)
    facts = json.loads(output[: output.rindex("}") + 1])
    assert (facts["ok"], facts["error"]) == (False, "Interrupted")
    assert "interrupted" in output[output.rindex("}") :]


def test_warmup_builds_all_parts_and_reports_the_time(call):
    assert json.loads(call("warmup", "--json"))["seconds"] > 0


def test_full_disk_on_stdout_is_a_short_error(capfd, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())
    with pytest.raises(SystemExit) as end:
        app(["inspect", "bundled", "--json"])
    assert end.value.code == 2
    assert "No space left" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["prune", "compress", "orthogonalize", "search"])
def test_input_files_and_destinations_are_checked_before_the_model_is_opened(call, tmp_path, monkeypatch, verb):
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    monkeypatch.chdir(tmp_path)
    assert "cannot read the text file" in call(verb, "bundled", "out", "--text", "text", code=2)
    monkeypatch.setattr("graphwright.models.open", lambda *_: pytest.fail("the model was opened"))
    assert "--overwrite" in call(verb, "bundled", ".", code=2)
    if verb == "search":
        (tmp_path / "out.gates.svg").mkdir()
        assert "is a directory" in call(verb, "bundled", "out", code=2)


@pytest.mark.parametrize("option", ["--out", "--state"])
def test_train_checks_its_folders_before_the_model_is_opened(call, monkeypatch, option):
    monkeypatch.setattr("graphwright.models.open", lambda *_: pytest.fail("the model was opened"))
    assert "mkdir -p" in call("train", "bundled", "--text", __file__, option, "no/such/folder", code=2)


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (("inspect", "/no/such/folder"), "/no/such/folder"),
        (("generate", "bundled", ""), "prompt is empty"),
        (("generate", "bundled", "x", "--ids", "1"), "both given"),
        (("generate", "bundled", "--ids", "1;2"), "--ids"),
        (("generate", "bundled", "x", "--top-p", "2"), "top_p"),
        (("train", "bundled", "--text", "/no/such/text"), "/no/such/text"),
        (("export", "bundled"), "OUT is missing"),
        (("prune", "bundled", "x", "--scope", "wide"), "loss, global, kind, layer"),
        (("compress", "bundled", "x", "--order", "1"), "expected a whole number >= 2"),
        (("train", "bundled", "--text", __file__, "--out", "."), "--overwrite"),
        (("edit", "bundled", "--cut", "layers.0.out -> layers.1.out", "--out", "x"), "layers.1.mid, layers.1.mlp.down"),
        (("edit", "bundled", "--set", "nonsense", "--out", "x"), "node.attr=value"),
        (("edit", "bundled", "--insert", "layers.1.mid -> layers.1.out", "--out", "x"), "source -> target : op"),
        (("edit", "bundled", "--apply", __file__, "--out", "x"), "test_cli.py, line 1"),
        (("edit", "bundled", "--apply", "/no/such/journal", "--out", "x"), "/no/such/journal"),
        (("edit", "bundled", "y", "--out", "x"), "y and --out x"),
        (("export", "bundled", "/proc/nowhere/out"), "/proc/nowhere"),
        (("edit", "bundled", "--cut", "a -> b", "--out", "x"), "no node has this name"),
        (("run", "bundled", "--text", "x", "--watch", "layers.9.out"), "layers.9.out"),
        (("inspect", "bundled", "--nonsense"), "nonsense"),
        (("train", "bundled", "--text", __file__, "--out", "x", "--batch", "2147483647"), "Unable to allocate"),
        (("train", "bundled", "--text", __file__, "--out", "x", "--batch", "9" * 20), "from 1 to 2147483647"),
        (("search", "bundled", "x", "--target", "0.9", "--seed", "9" * 20), "from 0 to 9223372036854775807"),
    ],
)
def test_usage_errors_are_named_and_exit_with_2(call, args, names):
    assert names in call(*args, code=2)


def test_error_is_one_json_document(call):
    out = call("inspect", "/no/such/folder", "--json", code=2)
    facts = json.loads(out[: out.rindex("}") + 1])
    assert facts["error"] == "ModelNotFound"
    assert facts["where"] == "/no/such/folder"


@pytest.mark.parametrize(
    ("args", "where", "what"),
    [
        (("inspect", "bundled", "--json", "--nonsense"), "inspect", "No such option: --nonsense"),
        (("inspect", "--json"), "inspect", "Missing argument 'DIR'"),
        (("prune", "bundled", "out", "--target", "many", "--json"), "prune", "Invalid value for '--target'"),
        (("diff", "--json", "bundled", "bundled", "bundled"), "diff", "unexpected extra argument"),
        (("inspekt", "bundled", "--json"), "", "No such command 'inspekt'"),
    ],
)
def test_usage_error_is_one_json_document(args, where, what):
    done = CliRunner().invoke(app, args)
    facts = json.loads(done.stdout)
    assert (done.exit_code, facts["ok"], facts["error"]) == (2, False, "UsageError")
    assert facts["where"].endswith(where)
    assert what in facts["what"]
    assert what in done.stderr
    assert CliRunner().invoke(app, facts["fix"].split()[-2 if where else -1 :]).exit_code == 0


def test_options_after_two_dashes_are_arguments():
    done = CliRunner().invoke(app, ["inspect", "--nonsense", "--", "--json"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "No such option: --nonsense" in done.stderr


def test_list_of_commands_is_not_truncated(call):
    assert "..." not in call("--help").partition("Commands:")[2]


@pytest.mark.parametrize("name", ["demo", "inspect", "run", "generate", "train", "edit", "export", "verify", "diff"])
def test_help_explains_every_option(call, name):
    options = call(name, "--help").partition("Options:")[2].partition("Example:")[0]
    assert not any(kind in options for kind in ("<int", "<float>", "<str>", "<path>", "<list"))
    rows = options.splitlines()
    assert not [row for row in rows if row.strip().startswith("--") and len(row.split()) < 3]


@pytest.mark.parametrize("name", [name for name, command in Commands.ALL.items() if command.options])
def test_options_of_a_command_are_the_fields_of_its_dataclass(name):
    command = Commands.ALL[name]
    kind, options = resolve_name(command.options), {p.name: p for p in command.build().params}
    own = inspect.signature(command.fn).parameters
    names = [f.name for f in dataclasses.fields(kind)]
    assert {*command.hide, *command.flags} <= set(names)
    for f in dataclasses.fields(kind):
        if f.name in command.hide or f.name in own:
            continue
        option = options[f.name]
        assert option.default == (",".join(f.default) if isinstance(f.default, tuple) else f.default)
        assert option.opts == [f"--{command.flags.get(f.name, f.name).replace('_', '-')}"]
        assert option.help


def test_values_of_options_reach_the_dataclass(call, monkeypatch):
    got = []

    def prune(directory: str, *, options: PruneOptions) -> None:
        got.append(options)

    monkeypatch.setattr(Commands.ALL["prune"], "fn", prune)
    given = ["--kinds", "heads, neurons", "--no-restore", "--ridge", 0.5, "--scope", "kind", "--no-time"]
    call("prune", "bundled", *given, "--protect", "layers.0", "--max-keep", 1, code=2)
    call("prune", "bundled", *given, "--protect", "layers.0")
    kinds = ("heads", "neurons")
    expected = PruneOptions(kinds=kinds, restore=False, ridge=0.5, scope="kind", timed=False, protect="layers.0")
    assert got == [expected]


def test_help_of_every_command_ends_with_an_example(call):
    assert Commands.ALL.keys() >= {"demo", "inspect", "run", "generate", "train", "edit", "export", "verify", "warmup"}
    for name in Commands.ALL:
        shown = " ".join(call(name, "--help").split())
        assert f"Example: graphwright {name}" in shown or name in ("life", "verify")  # which need what others write
    assert "graphwright" in call("--version")
