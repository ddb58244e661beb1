"""The plugin installed and not asked for: nothing is loaded, nothing differs."""

from __future__ import annotations

import http.client
import json
import re
import sys

import pytest
from support.server import Server

LISTING = "import sys; print(*sorted(m for m in sys.modules if m.split('.')[0] in {names}))"
OURS = "('pluggy', 'mlx_lm_hooks', 'mlx_lm_patches', 'mlx_lm_tiered')"


def test_only_the_finder_is_loaded(installed):
    """Of the finder, a stand-in (until Python 3.15): not one module of ours."""
    first = "; f = type(sys.meta_path[0]); print(f.__module__, f.__name__, len([x for x in sys.meta_path if type(x).__module__ == f.__module__]))"
    done = installed.run([installed.python, "-c", LISTING.format(names=OURS) + first])
    if sys.version_info >= (3, 15):
        assert done.stdout.split() == ["mlx_lm_patches", "mlx_lm_patches.finder", "mlx_lm_patches.finder", "Finder", "1"]
    else:
        assert done.stdout.split() == ["mlx_lm_patches.finder", "Start", "1"]


def test_the_stand_in_gives_way_to_the_finder_in_its_place(from_wheel):
    """Also when another finder came first meanwhile."""
    code = (
        "import sys;"
        "sys.meta_path.insert(0, type('Other', (), {'find_spec': lambda *a: None})());"
        "import mlx_lm.server; print(*[type(f).__name__ for f in sys.meta_path if type(f).__name__ in ('Other', 'Start', 'Finder')])"
    )
    done = from_wheel.run([from_wheel.python, "-c", code])
    assert done.stdout.split() == ["Other", "Finder"]


def test_importing_mlx_lm_loads_no_more_than_the_finder_and_changes_nothing(from_wheel):
    code = "import mlx_lm, mlx_lm.server; assert mlx_lm.server.LRUPromptCache is mlx_lm.models.cache.LRUPromptCache; "
    done = from_wheel.run([from_wheel.python, "-c", code + LISTING.format(names=OURS)])
    assert done.stdout.split() == ["mlx_lm_patches", "mlx_lm_patches.finder"]


def test_the_finder_needs_nothing_but_sys(from_wheel):
    """A process without `site` has only what the interpreter itself loads; the finder adds itself."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules); import mlx_lm_patches.finder as f;"
        "f.install(); f.install(); print(sorted(set(sys.modules) - before), sum(type(x) is f.Finder for x in sys.meta_path))"
    )
    where = from_wheel.run([from_wheel.python, "-c", "import mlx_lm_patches; print(mlx_lm_patches.__path__[0])"]).stdout.strip()
    done = from_wheel.run([from_wheel.python, "-I", "-S", "-c", code, where.rpartition("/")[0]])
    assert done.stdout.strip() == "['mlx_lm_patches', 'mlx_lm_patches.finder'] 1"


@pytest.mark.parametrize(("form", "command"), [("module", "server"), ("subcommand", "generate")])
def test_help_is_stock(from_wheel, stock, form, command):
    ours = from_wheel.run([*from_wheel.form(form, command), "--help"])
    theirs = stock.run([*stock.form(form, command), "--help"])
    assert (ours.stdout, ours.stderr) == (theirs.stdout, theirs.stderr)
    assert "usage:" in ours.stdout


def test_help_with_a_plugin_only_adds(from_wheel, stock):
    """Upstream's own entries are all there, word by word and in order."""
    ours = from_wheel.run([*from_wheel.form("script", "server"), "--plugin", "witness", "--help"]).stdout
    theirs = stock.run([*stock.form("script", "server"), "--help"]).stdout
    options = theirs[theirs.index("options:") :]
    assert options.strip() in ours


def test_errors_are_stock(from_wheel, stock):
    argv = ["--port", "none", "--no-such-flag"]
    ours = from_wheel.run([*from_wheel.form("script", "server"), *argv], check=False)
    theirs = stock.run([*stock.form("script", "server"), *argv], check=False)
    assert (ours.returncode, ours.stderr) == (theirs.returncode, theirs.stderr) and ours.returncode == 2


def test_a_script_with_its_own_plugin_flag_is_left_alone(from_wheel):
    script = from_wheel.folder / "own.py"
    script.write_text(
        "import argparse, sys\n"
        "import mlx_lm.generate, mlx_lm.server\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--plugin')\n"
        "print(parser.parse_args().plugin, mlx_lm.server.argparse is argparse, 'pluggy' in sys.modules)\n"
    )
    done = from_wheel.run([from_wheel.python, str(script), "--plugin", "tiered"])
    assert done.stdout == "tiered True False\n"


def test_served_bytes_are_stock(from_wheel, stock, tiny_llama, tmp_path):
    replies = []
    for name, environment in (("stock", stock), ("ours", from_wheel)):
        with Server(
            tiny_llama,
            tmp_path / f"{name}.log",
            command=environment.form("script", "server"),
            env={**environment.environ(), "MLX_LM_PLUGINS": None},
        ) as server:
            replies.append([exchange(server.port, *request) for request in requests()])
    assert replies[0] == replies[1]
    assert [status for status, _, _ in replies[0]] == [200, 200, 200, 200, 404, 404]


def requests():
    chat = {"messages": [{"role": "user", "content": "What is os?"}], "max_tokens": 5}
    yield "POST", "/v1/chat/completions", chat
    yield "POST", "/v1/chat/completions", {**chat, "stream": True}
    yield "POST", "/v1/completions", {"prompt": "The os module", "max_tokens": 5, "logprobs": True}
    yield "GET", "/health", None
    yield "GET", "/stats", None
    yield "POST", "/admin/cache/flush", {}


def exchange(port, method, path, body):
    """Status, headers and body of a reply, ids and times masked."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, json.dumps(body) if body is not None else None)
    reply = connection.getresponse()
    data = re.sub(rb'("id": "\w+-)[0-9a-f-]+', rb"\1*", reply.read())
    data = re.sub(rb'("created": )\d+', rb"\1*", data)
    headers = [(k, v) for k, v in reply.getheaders() if k not in ("Date", "Content-Length")]
    return reply.status, headers, data
