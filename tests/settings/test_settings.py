"""Flags, environment, defaults and their contradictions."""

import argparse
from pathlib import Path

import pytest

from mlx_lm_hooks import UsageError
from mlx_lm_tiered.settings import Settings, add_arguments, env_name, flag, format_size, parse_size, resolve, table


def parsed(argv, command="server"):
    parser = argparse.ArgumentParser()
    if command == "server":
        parser.add_argument("--prompt-cache-bytes", type=parse_size)
        parser.add_argument("--prompt-cache-size", type=int, default=10)
    add_arguments(parser.add_argument_group("ours"), command)
    sentinel = object()
    names = [action.dest for action in parser._actions]
    args = parser.parse_args(argv, argparse.Namespace(**{name: sentinel for name in names}))
    given = frozenset(name for name in names if getattr(args, name) is not sentinel)
    return vars(args), given


def settings_of(argv=(), environ=None, command="server"):
    values, given = parsed(list(argv), command)
    return resolve(values, given, environ or {})


def test_defaults():
    assert settings_of() == Settings()
    assert Settings().ssd_cache is None and Settings().writebehind


def test_flag_beats_environment_beats_default(tmp_path):
    environ = {"MLX_LM_TIERED_SSD_CACHE": str(tmp_path / "env"), "MLX_LM_TIERED_SSD_CACHE_MAX": "5GB"}
    assert settings_of(environ=environ).ssd_cache == tmp_path / "env"
    assert settings_of(environ=environ).ssd_cache_max == 5 * 10**9
    assert settings_of(["--ssd-cache", str(tmp_path / "flag")], environ).ssd_cache == tmp_path / "flag"


@pytest.mark.parametrize("name", [f for f in Settings.__dataclass_fields__])
def test_every_flag_has_an_environment_name(name):
    samples = {
        "ssd_cache": "/nowhere/kv", "ssd_cache_max": "1GB", "ssd_cache_verify": "never", "ssd_restore": "always", "ssd_queue": "7MB", "ssd_demote_idle": "9",
        "generation_checkpoint": "256", "writebehind": "0",
        "shared_cache": "file:///nowhere/store", "shared_cache_team": "secret", "shared_cache_write": "always", "shared_cache_bandwidth": "5MB", "shared_cache_max": "3GB", "shared_cache_ttl": "2d",
        "memory_budget": "4GB", "warm": "prompts.jsonl", "shutdown_timeout": "3", "admin_routes": "all", "metrics": "local", "status_page": "0", "cache_inspection": "1", "prompt_cache_bytes": "1GB", "prompt_cache_size": "3", "prompt_cache_min_tokens": "9",
        "kv_scheme": "affine:4", "kernels": "off", "paged_kv": "1", "paged_kv_block_size": "16", "paged_kv_pool": "2GB", "speculation": "ngram", "draft_model": "small", "assistant_position": "advance", "assistant_window": "64", "num_draft_tokens": "5", "spec_strict": "1", "spec_sampling": "rejection", "spec_trace": "trace.jsonl",
    }  # fmt: skip
    environ = {env_name("ssd_cache"): "/nowhere/kv", env_name(name): samples[name]}
    assert getattr(settings_of(environ=environ), name) != getattr(Settings(), name)
    assert flag(name) in {row[0] for row in table()} and env_name(name) in {row[1] for row in table()}


def test_writebehind_as_switch(tmp_path):
    assert not settings_of(["--ssd-cache", str(tmp_path), "--no-writebehind"]).writebehind
    assert not settings_of(["--ssd-cache", str(tmp_path)], {"MLX_LM_TIERED_WRITEBEHIND": "0"}).writebehind


@pytest.mark.parametrize(
    ("argv", "environ", "says"),
    [
        (["--ssd-cache-max", "1GB"], {}, "--ssd-cache-max does nothing without --ssd-cache"),
        (["--no-writebehind"], {}, "--writebehind does nothing without --ssd-cache"),
        (["--ssd-cache", "/nowhere/kv", "--prompt-cache-bytes", "0"], {}, "needs the RAM tier"),
        (["--ssd-cache", "/nowhere/kv", "--prompt-cache-size", "0"], {}, "needs the RAM tier"),
        (["--ssd-cache", "/nowhere/kv"], {"MLX_LM_TIERED_PROMPT_CACHE_BYTES": "0"}, "which MLX_LM_TIERED_PROMPT_CACHE_BYTES 0 switches off"),
        (["--ssd-cache", "/nowhere/kv", "--ssd-cache-max", "lots"], {}, "--ssd-cache-max: 'lots' is not a size"),
        (["--ssd-cache", "/nowhere/kv", "--ssd-cache-max", "0"], {}, "leaves no room"),
        (["--ssd-cache", "/nowhere/kv", "--ssd-cache-verify", "maybe"], {}, "not one of auto, always, never"),
        (["--ssd-cache", ""], {}, "empty"),
        (["--ssd-cache", __file__], {}, "is not a directory"),
        (["--shutdown-timeout", "-3"], {}, "--shutdown-timeout"),
        ([], {"MLX_LM_TIERED_SHUTDOWN_TIMEOUT": "soon"}, "MLX_LM_TIERED_SHUTDOWN_TIMEOUT"),
        (["--prompt-cache-size", "-1"], {}, "is negative"),
        (["--warm", ""], {}, "the file's name is empty"),
        (["--warm", "prompts.jsonl", "--prompt-cache-bytes", "0"], {}, "--warm needs the RAM tier"),
    ],
)
def test_what_cannot_work_is_one_sentence(argv, environ, says):
    with pytest.raises(UsageError) as caught:
        settings_of(argv, environ)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_environment_of_a_subflag_alone_is_no_error():
    assert settings_of(environ={"MLX_LM_TIERED_SSD_CACHE_MAX": "1GB"}).ssd_cache is None


def test_scripts_and_generate_have_no_server_flags():
    values, _ = parsed([], "generate")
    assert "shutdown_timeout" not in values and "ssd_cache" in values and "prompt_cache_bytes" in values


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("32GB", 32 * 10**9), ("1.5 GiB", 3 * 2**29), ("500m", 500 * 10**6), ("2k", 2000), ("1tb", 10**12), (7, 7)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "1 2", "12 parsecs", "nan"])
def test_not_sizes(text):
    with pytest.raises(ValueError):
        parse_size(text)


def test_sizes_read_back():
    assert [format_size(n) for n in (0, 999, 1500, 32 * 10**9)] == ["0 B", "999 B", "1.5 kB", "32 GB"]


def test_directory_is_absolute_and_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_of(["--ssd-cache", "~/kv"]).ssd_cache == tmp_path / "kv"
    assert settings_of(["--ssd-cache", "kv"]).ssd_cache == Path.cwd() / "kv"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ftp://host/x", "one of"), ("bucket", "one of"), ("https://me:secret@host/x", "netrc"), ("s3://key@bucket/x", "netrc"),
        ("https://host/x?token=secret", "no \\?"), ("file://host/x", "absolute"), ("http:///x", "which host"),
    ],
)  # fmt: skip
def test_a_stores_url_is_checked_and_no_secret_is_repeated(text, why):
    with pytest.raises(UsageError, match=why) as refused:
        resolve({"shared_cache": text, "ssd_cache": "/nowhere/kv"}, frozenset(("shared_cache", "ssd_cache")), {})
    assert "secret" not in str(refused.value)


def test_a_teams_key_is_not_printed():
    assert "secret" not in repr(Settings(shared_cache_team="secret"))
