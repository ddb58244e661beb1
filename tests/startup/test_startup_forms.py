"""Every way to start upstream's commands, from a wheel and from an editable install."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
import witness
from support.server import Server

from mlx_lm_tiered.kernels import source

FORMS = ("script", "subcommand", "package", "module")
DEPRECATED = "Calling `python -m mlx_lm.{}...` directly is deprecated."


@pytest.mark.parametrize("form", FORMS)
def test_server_help_has_the_groups(installed, form):
    done = installed.run([*installed.form(form, "server"), "--plugin", "witness", "--help"])
    assert re.search(r"^plugins:\n +--plugin NAME", done.stdout, re.M)
    assert re.search(r"^plugin witness:\n +--witness-note", done.stdout, re.M)
    assert (DEPRECATED.format("server") in done.stdout) == (form == "module")


@pytest.mark.parametrize(("form", "command"), [("module", "generate"), ("subcommand", "chat")])
def test_other_commands_have_the_groups(from_wheel, form, command):
    done = from_wheel.run([*from_wheel.form(form, command), "--plugin=witness", "--help"])
    assert "plugin witness:" in done.stdout
    assert (DEPRECATED.format(command) in done.stdout) == (form == "module")


def test_the_wheel_has_the_kernels_text(from_wheel):
    names = "*map(source.digest, ('cuda', 'metal'))"
    done = from_wheel.run([from_wheel.python, "-c", f"from mlx_lm_tiered.kernels import source; print({names})"])
    assert done.stdout.split() == [source.digest("cuda"), source.digest("metal")]


@pytest.mark.parametrize(
    ("environment", "form"), [("from_wheel", "script"), ("editable", "subcommand"), ("editable", "package"), ("from_wheel", "module")]
)
def test_serves(request, environment, form, tiny_llama, tmp_path):
    environment = request.getfixturevalue(environment)
    record = tmp_path / "events"
    with Server(
        tiny_llama,
        tmp_path / "server.log",
        ["--plugin", "witness", "--witness-note", "hello"],
        command=environment.form(form, "server"),
        env={**environment.environ(WITNESS_LOG=str(record)), "MLX_LM_PLUGINS": None},
    ) as server:
        answer = server.chat(witness_chat(), max_tokens=4)
        again = server.chat(witness_chat(), max_tokens=4)
        assert server.terminate() == 0
    assert again.text == answer.text
    assert again.cached_tokens == again.prompt_tokens - 1
    seen = witness.events(record)
    assert seen[0] == {
        "event": "configure",
        "command": "server",
        "given": ["model", "plugin", "port", "witness_note"],
        "note": "hello",
    }
    loaded = [e for e in seen if e["event"] == "model_loaded"]
    assert [e["path"] for e in loaded] == [str(Path(tiny_llama).resolve())]
    # A busy turn may fall between: the generation thread learns a little later that its last request has ended.
    assert [e["event"] for e in seen if e["event"] != "busy"][-2:] == ["shutdown", "unconfigure"]


def witness_chat():
    return [{"role": "user", "content": "What does the os module of Python do, and what is sys for?"}]


def test_generate_command_reuses_over_calls_of_one_process(from_wheel, tiny_llama, tmp_path):
    record = tmp_path / "events"
    argv = [*from_wheel.form("script", "generate"), "--model", str(tiny_llama), "--prompt", "The os module", "--max-tokens", "4"]
    plain = from_wheel.run(argv)
    done = from_wheel.run([*argv, "--plugin", "witness"], WITNESS_LOG=str(record))
    assert text_of(done.stdout) == text_of(plain.stdout)
    puts = [e for e in witness.events(record) if e["event"] == "put"]
    assert len(puts) == 1 and puts[0]["offsets"] == [puts[0]["tokens"]]


def text_of(output: str) -> str:
    """A generation without its measurements."""
    return output.split("==========")[1]


def test_wheel_holds_the_start_up_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("mlx_lm_tiered.pth").startswith(b"import sys; ")
        assert archive.read("mlx_lm_tiered.pth").count(b"\n") == 1
        assert archive.read("mlx_lm_tiered.start") == b"mlx_lm_patches.finder:install\n"


def test_an_unknown_plugin_is_refused_by_name(from_wheel):
    for form in ("subcommand", "module"):
        done = from_wheel.run([*from_wheel.form(form, "server"), "--plugin", "nosuch"], check=False)
        assert done.returncode == 2
        assert re.fullmatch(
            r".*: error: no plugin named 'nosuch' is installed \(installed: tiered, witness\)\n", done.stderr
        ), done.stderr


def test_wrong_settings_exit_2_with_one_sentence(from_wheel):
    argv = [*from_wheel.form("script", "server"), "--plugin", "witness", "--witness-note", "bad"]
    done = from_wheel.run(argv, check=False)
    assert (done.returncode, done.stderr) == (2, "mlx_lm.server: error: --witness-note cannot be bad; give another note\n")
