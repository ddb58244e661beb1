"""`MLX_LM_PLUGINS` in commands and in scripts, `enable` and `disable`, and the host's own launcher."""

from __future__ import annotations

import witness

REPORT = """
import mlx_lm, mlx_lm.server
from mlx_lm_patches.host import host
print(host.active, mlx_lm.server.LRUPromptCache is not mlx_lm.models.cache.LRUPromptCache)
"""


def test_a_command_takes_the_environment_as_the_flag(from_wheel):
    done = from_wheel.run([*from_wheel.form("package", "server"), "--help"], MLX_LM_PLUGINS="witness")
    assert "plugin witness:" in done.stdout
    done = from_wheel.run([*from_wheel.form("script", "server")], check=False, MLX_LM_PLUGINS="witness,nosuch")
    assert done.returncode == 2 and "no plugin named 'nosuch'" in done.stderr


def test_a_script_gets_the_plugins_of_the_environment(from_wheel, tmp_path):
    record = tmp_path / "events"
    done = from_wheel.run([from_wheel.python, "-c", REPORT], MLX_LM_PLUGINS="witness", WITNESS_LOG=str(record))
    assert done.stdout == "True True\n"
    assert witness.events(record)[0] == {"event": "configure", "command": "script", "given": [], "note": None}


def test_a_script_with_an_unknown_plugin_ends_with_one_sentence(from_wheel):
    done = from_wheel.run([from_wheel.python, "-c", REPORT], check=False, MLX_LM_PLUGINS="nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "mlx_lm plugins: error: no plugin named 'nosuch' is installed (installed: tiered, witness)\n"


def test_a_plugins_own_command_starts_it_itself(from_wheel):
    """`mlx_lm.NAME` is not a script that the environment switches NAME on in."""
    script = from_wheel.folder / "mlx_lm.witness"
    script.write_text(REPORT)
    done = from_wheel.run([from_wheel.python, str(script)], MLX_LM_PLUGINS="witness")
    assert done.stdout == "False False\n"


def test_enable_before_and_after_the_import_and_disable(from_wheel):
    code = """
import sys
from mlx_lm_hooks import enable, disable
assert "mlx_lm" not in sys.modules
enable("witness")
import mlx_lm.server
g = sys.modules["mlx_lm.generate"]
from mlx_lm.models.cache import LRUPromptCache
first = mlx_lm.server.LRUPromptCache is not LRUPromptCache, g._merge_caches.__module__, hasattr(g.generate_step, "__wrapped__")
disable()
second = mlx_lm.server.LRUPromptCache is LRUPromptCache, hasattr(g.generate_step, "__wrapped__")
enable("witness")
third = mlx_lm.server.LRUPromptCache is not LRUPromptCache, hasattr(g.generate_step, "__wrapped__")
print(first, second, third)
"""
    done = from_wheel.run([from_wheel.python, "-c", code])
    assert done.stdout == "(True, 'mlx_lm.generate', True) (True, False) (True, True)\n"


def test_a_plugin_that_does_not_load_is_named(from_wheel, tmp_path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_lm.plugins]\nbroken = no_such_module\n")
    done = from_wheel.run([*from_wheel.form("script", "server"), "--plugin", "broken"], check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        "mlx_lm.server: error: the plugin 'broken' cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'\n"
    )


def test_launch_needs_no_start_up_file(from_wheel):
    code = """
import sys
from mlx_lm_hooks import find_host
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "mlx_lm_patches.finder"]
find_host().launch("server", ["--plugin", "witness", "--help"])
"""
    done = from_wheel.run([from_wheel.python, "-c", code])
    assert done.stdout.startswith("usage: ") and "plugin witness:" in done.stdout


def test_start_up_state(from_wheel, stock):
    code = "from mlx_lm_hooks import find_host; s = find_host().start_up(); print(s['state'], s['active'], s['path'])"
    done = from_wheel.run([from_wheel.python, "-c", code])
    state, active, path = done.stdout.split()
    assert (state, active) == ("ok", "True") and path.startswith(str(from_wheel.path))
