"""The start-up file's import finder. It may run in every Python process: nothing but `sys` is imported here.

Importing even this module costs half of a start-up's millisecond, so the ``.pth`` file
puts a one-line stand-in first on `sys.meta_path`, which calls `install` at the first
import from mlx-lm. A ``.start`` file (Python 3.15) can only call `install` at once.

The finder looks at imports of three modules and steps aside unless plugins were
asked for; then it wraps their loader, so that `startup` sees each module after
it has run. The environment and the command line are read when one of the three
is imported, never when the finder is installed.
"""

import sys

WATCHED = ("mlx_lm.server", "mlx_lm.generate", "mlx_lm.chat")
COMMANDS = ("server", "generate", "chat")
PLUGINS_ENV = "MLX_LM_PLUGINS"


def program(argv):
    """What a process runs and its arguments, from `sys.orig_argv`: the module after ``-m`` or a script's base name.

    ``("", [])`` when it runs neither. `sys.argv` will not do: it is ``-m`` while
    packages are imported for ``python -m``, and programs change it.
    """
    i = 1
    while i < len(argv):
        arg = argv[i]
        if arg == "--check-hash-based-pycs":
            i += 1
        elif arg == "-" or not arg.startswith("-"):
            name = arg.replace("\\", "/").rpartition("/")[2]
            return name.removesuffix(".exe"), argv[i + 1 :]
        elif not arg.startswith("--"):
            for at, letter in enumerate(arg[1:], start=2):
                if letter in "cmXW":
                    value, rest = (arg[at:], i + 1) if arg[at:] else ("".join(argv[i + 1 : i + 2]), i + 2)
                    if letter == "c":
                        return "", []
                    if letter == "m":
                        return value, argv[rest:]
                    i = rest - 1
                    break
        i += 1
    return "", []


def command():
    """``server``, ``generate`` or ``chat`` when this process is that mlx-lm command, else None."""
    name, rest = program(sys.orig_argv)
    if name in ("mlx_lm", "mlx_lm.__main__") and rest:
        name = "mlx_lm." + rest[0]
    package, _, verb = name.partition(".")
    return verb if package == "mlx_lm" and verb in COMMANDS else None


def asks(argv):
    """Whether arguments of an mlx-lm command name plugins."""
    return any(arg in ("--plugin", "--plugin-strict") or arg.startswith("--plugin=") for arg in argv)


def requested():
    """Whether plugins were asked for: in the environment, or on the command line of an mlx-lm command."""
    import os  # already loaded by the interpreter itself

    name, rest = program(sys.orig_argv)
    wanted = [plugin.strip() for plugin in os.environ.get(PLUGINS_ENV, "").split(",") if plugin.strip()]
    if wanted:
        # `mlx_lm.NAME` is the plugin's own command; it starts the plugin itself when it means to.
        return name.removeprefix("mlx_lm.") not in wanted
    return command() is not None and asks(rest)


class Loader:
    """A module's loader that reports the module to `startup` once it has run. Everything else is the inner loader's."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def create_module(self, spec):
        return self.inner.create_module(spec)

    def exec_module(self, module):
        self.inner.exec_module(module)
        from . import startup

        startup.loaded(module)

    def get_code(self, name):
        """Only `runpy` asks a loader for code, for ``python -m``: run the imported, hooked module's main block instead."""
        source = (
            'if __name__ == "__main__":\n'
            "    from mlx_lm_patches.startup import run_as_main\n"
            f"    run_as_main({name!r})\n"
            "else:\n"
            f"    exec(__loader__.inner.get_code({name!r}))\n"
        )
        return compile(source, self.inner.get_filename(name), "exec")


class Finder:
    """The meta-path finder. `wanted` is set by the host when plugins were switched on without flag or environment."""

    wanted = False

    def find_spec(self, name, path=None, target=None):
        if name not in WATCHED or self._searching(name) or not (self.wanted or requested()):
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None and not isinstance(spec.loader, Loader):
                    spec.loader = Loader(spec.loader)
                return spec
        return None

    def _searching(self, name):
        """Whether this thread is already in the search below: another finder that walks the path asked us again.

        The stack tells it per thread; a flag would hide concurrent imports from the finder.
        """
        here = sys._getframe(1)
        frame = here.f_back
        while frame is not None:
            if frame.f_code is here.f_code and frame.f_locals.get("name") == name:
                return True
            frame = frame.f_back
        return False


def install():
    """Put the finder first on `sys.meta_path`, or where its stand-in is, and return it.

    Once: a virtual environment runs start-up files twice. A replaced item of the list
    does not disturb the import that may be walking it; a removed one would.
    """
    ours = [finder for finder in sys.meta_path if type(finder).__module__ == __name__]
    for finder in ours:
        if isinstance(finder, Finder):
            return finder
    finder = Finder()
    if ours:
        sys.meta_path[sys.meta_path.index(ours[0])] = finder
    else:
        sys.meta_path.insert(0, finder)
    return finder
