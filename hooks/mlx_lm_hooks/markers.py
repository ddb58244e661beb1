"""The pluggy markers of the project name ``mlx_lm``."""

import pluggy

PROJECT = "mlx_lm"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
