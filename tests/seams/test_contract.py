"""Every hook of the contract is called in a real server's life, with what its spec says."""

from __future__ import annotations

import inspect
import json

import pytest

from mlx_lm_hooks import specs
from support.server import Server, user

HOOKS = {name: spec for name, spec in vars(specs).items() if name.startswith("mlx_lm_")}

# Types whose names at run time are not those of the annotations.
TYPES = {
    ("mlx_lm_add_arguments", "group"): "_ArgumentGroup",
    ("mlx_lm_prefix_cache", "max_entries"): "NoneType",
    ("mlx_lm_prefix_cache", "max_bytes"): "NoneType",
    ("mlx_lm_prefix_cache", "serves"): "str",
    ("mlx_lm_merge_row", "caches"): "list",
    ("mlx_lm_decoding", "rows"): "list",
    ("mlx_lm_hold", "tokens"): "list",
    ("mlx_lm_hold", "preempted"): "int",
    ("mlx_lm_room", "caches"): "list",
}

# A plugin that has all hooks, answers none, and notes the types of what it is given.
PLUGIN = """
import inspect, json, os
from mlx_lm_hooks import hookimpl, specs

def note(hook, arguments):
    with open(os.environ["CONTRACT_LOG"], "a") as file:
        print(json.dumps([hook, {name: type(value).__name__ for name, value in arguments.items()}]), file=file)

for name, spec in list(vars(specs).items()):
    if name.startswith("mlx_lm_"):
        exec(f"def {name}({', '.join(inspect.signature(spec).parameters)}):\\n    note({name!r}, dict(locals()))")
        globals()[name] = hookimpl(globals()[name])
"""


@pytest.fixture(scope="module")
def calls(tmp_path_factory, tiny_llama, tiny_lfm2) -> dict[str, dict[str, str]]:
    """The first call of each hook: argument names and the names of their types."""
    folder = tmp_path_factory.mktemp("contract")
    info = folder / "contract-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: contract\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[mlx_lm.plugins]\ncontract = contract_plugin\n")
    (folder / "contract_plugin.py").write_text(PLUGIN)
    env = {"PYTHONPATH": str(folder), "CONTRACT_LOG": str(folder / "calls"), "MLX_LM_PLUGINS": None}
    with Server(tiny_llama, folder / "log", ["--plugin", "contract"], env=env) as server:
        assert server.chat(user("hi"), max_tokens=2).completion_tokens
        assert server.chat(user("hi", "yes", "well"), max_tokens=2).completion_tokens
        assert server.chat(user("hi"), max_tokens=2, model=str(tiny_lfm2)).completion_tokens
        assert server.terminate() == 0
    made = [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    return {hook: arguments for hook, arguments in reversed(made)}


@pytest.mark.parametrize("name", HOOKS)
def test_it_is_called_with_what_its_spec_says(calls, name):
    assert name in calls, "no call in a server's life; have this test provoke one, or say where it is tested"
    parameters = inspect.signature(HOOKS[name]).parameters
    assert list(calls[name]) == list(parameters)
    for argument, type_name in calls[name].items():
        assert TYPES.get((name, argument), str(parameters[argument].annotation)) == type_name
